"""Saving and loading of attached priors, as a small adapter or together with the model."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from huggingface_hub import HfApi, snapshot_download
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file

from attention_priors._io import read_json, write_json
from attention_priors.config import FORMAT, check_format
from attention_priors.hf.attach import (
    CONFIG_KEY,
    Model,
    attach,
    attached_parts,
    attached_priors,
    check_attached_can_be_loaded,
    detach,
    notes_on,
)
from attention_priors.hf.files import damage_named, folder_or_repository, read_weights, write_weights
from attention_priors.hf.interface import ATTRIBUTE
from attention_priors.models.card import CARD, TRAINING_KEY, name_on_hub, write_card

DESCRIPTION = "prior_adapter_config.json"
WEIGHTS = "prior_adapter.safetensors"
PEFT_DESCRIPTION = "adapter_config.json"
TOGETHER = "save both together: model.save_pretrained(OTHER) of the base model with the adapter in it"
"""Fix for an adapter whose base model is unknown or missing, for error messages."""
FOR_FILES = ("revision", "token", "cache_dir", "local_files_only", "subfolder")
"""Options of ``from_pretrained`` that locate files."""


def save_adapter(model: nn.Module, folder: str | Path) -> None:
    """Save the priors attached to a model as a description (JSON) and parameters (safetensors), a few kilobytes.

    The model itself is not saved; :func:`load_adapter` attaches the adapter to a model. A model card is written too,
    unless the folder has a card of a person.

    Args:
        model: a model returned by :func:`attach`, or a wrapper of it (PEFT, DDP).
        folder: folder for the adapter, created if missing. File names do not clash with PEFT's, so both may share a
            folder.

    Raises:
        ValueError: nothing is attached, or loading could not rebuild a prior or logit scale from its name.
    """
    model, config = _described(model)
    check_attached_can_be_loaded(model)
    tensors: dict[str, Tensor] = {
        f"layers.{index}.{name}": tensor
        for index, part in attached_priors(model).items()
        for name, tensor in part.state_dict().items()
    }
    folder = Path(folder)
    write_weights(folder / WEIGHTS, tensors)
    # The description is written last: where it exists, the weights are complete.
    write_json(
        folder / DESCRIPTION,
        {
            "format": FORMAT,
            "attention_priors": version("attention-priors"),
            "base_model_class": type(model).__name__,
            "base_model_type": model.config.model_type,
            "base_model_layers": _layers(model),
            "base_model_name_or_path": model.config.name_or_path or None,
            "attached": config,
        },
    )
    name, base = type(model).__name__, name_on_hub(model.config.name_or_path)
    write_card(
        folder,
        f"Positional priors for {name}",
        attached_parts(config),
        "from attention_priors.hf import load_adapter\n"
        f"from transformers import {name}\n\n"
        f'model = load_adapter({name}.from_pretrained("{base or "BASE_MODEL"}"), "THIS_ADAPTER")',
        base=base,
        notes=notes_on(config),
        training=getattr(model.config, TRAINING_KEY, None),
    )
    for part in attached_priors(model).values():
        part.is_saved = True


def load_adapter(model: Model, name_or_path: str | Path, **options: Any) -> Model:
    """Attach an adapter of :func:`save_adapter` to its base model.

    Args:
        model: the base model, without attached priors.
        name_or_path: a folder, or a repository on the Hugging Face Hub.
        options: options of ``snapshot_download``, such as ``revision`` and ``token``.

    Returns:
        The model, changed in place.

    Raises:
        ValueError: the adapter does not fit the model or was made for another model type, or its files are damaged or
            inconsistent.
        FileNotFoundError: the folder holds no adapter.
        OSError: the adapter cannot be downloaded.
    """
    folder = Path(name_or_path)
    if not folder.is_dir():
        with folder_or_repository("adapter", name_or_path):
            folder = Path(snapshot_download(str(name_or_path), allow_patterns=[DESCRIPTION, WEIGHTS], **options))
    for name in (DESCRIPTION, WEIGHTS):
        if not (folder / name).is_file():
            alone = (folder / PEFT_DESCRIPTION).is_file()
            what = "an adapter of PEFT, without attached priors" if alone else "not an adapter of priors"
            raise FileNotFoundError(
                f"{name_or_path} has no {name}, so it is {what}; save_adapter(model, folder) saves attached priors"
            )
    description = read_json(folder / DESCRIPTION)
    check_format(description.get("format") if isinstance(description, dict) else None, folder / DESCRIPTION)
    arguments = arguments_of(description.get("attached"), folder / DESCRIPTION)
    made_for = description.get("base_model_type")
    if made_for != model.config.model_type:
        raise ValueError(
            f"the adapter {name_or_path} is for a base model of type {made_for!r} "
            f"({description.get('base_model_class')}), not {model.config.model_type!r} ({type(model).__name__})"
        )
    layers = description.get("base_model_layers")
    if layers != _layers(model):
        raise ValueError(
            f"the adapter {name_or_path} is for a base model with {layers} layers; this {type(model).__name__} has "
            f"{_layers(model)}"
        )
    tensors = read_weights(folder / WEIGHTS)
    attach(model, **arguments)
    wanted: dict[str, Tensor] = {
        f"layers.{index}.{name}": parameter
        for index, part in attached_priors(model).items()
        for name, parameter in part.state_dict(keep_vars=True).items()
    }
    try:
        _fill(wanted, tensors, f"the adapter {name_or_path}")
    except ValueError:
        detach(model)
        raise
    for part in attached_priors(model).values():
        part.is_saved = True
    return model


def _layers(model: PreTrainedModel) -> int | None:
    return getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", None)


def push_adapter_to_hub(model: nn.Module, repo_id: str, *, private: bool | None = None, **options: Any) -> str:
    """Upload the priors attached to a model to the Hugging Face Hub. :func:`load_adapter` loads them by ``repo_id``.

    A model card is uploaded too, unless the repository has a card of a person.

    Args:
        model: as for :func:`save_adapter`.
        repo_id: ``user/name``. The repository is created if missing.
        private: whether a new repository is private.
        options: options of ``HfApi``, such as ``token``.

    Returns:
        URL of the commit.
    """
    _described(model)
    check_attached_can_be_loaded(model)
    api = HfApi(**options)
    api.create_repo(repo_id, private=private, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        if api.file_exists(repo_id, CARD):
            # save_adapter replaces its own cards only.
            api.hf_hub_download(repo_id, CARD, local_dir=folder)
        save_adapter(model, folder)
        commit = api.upload_folder(repo_id=repo_id, folder_path=folder, commit_message="Attached priors")
    return str(commit)


def load_attached(name_or_path: str | Path, **options: Any) -> PreTrainedModel:
    """Load a model that ``save_pretrained`` saved with attached priors.

    ``from_pretrained`` would leave out the priors, with a warning.

    Args:
        name_or_path: a folder, or a repository on the Hugging Face Hub.
        options: options of ``from_pretrained``: ``dtype``, ``device_map``, ``revision``, ``subfolder``, ... Priors stay
            in float32.

    Raises:
        ValueError: the model has no attached priors, a file is damaged or incomplete, or an option is not supported.
        OSError: the folder does not exist and the model cannot be downloaded.
    """
    for name in ("variant", "output_loading_info"):
        if options.get(name):
            raise ValueError(f"load_attached() does not support {name}, got {options[name]!r}")
    inside = Path(name_or_path, options.get("subfolder") or "")
    adapters = [file for file in (DESCRIPTION, PEFT_DESCRIPTION) if (inside / file).is_file()]
    if adapters and not (inside / "config.json").is_file():
        raise ValueError(
            f"{name_or_path} holds an adapter ({', '.join(adapters)}) without a model; "
            f"load_model({str(inside)!r}) loads both"
        )
    for_files = {key: options[key] for key in FOR_FILES if key in options}
    with folder_or_repository("model", name_or_path):
        config = AutoConfig.from_pretrained(name_or_path, **for_files)
    if getattr(config, CONFIG_KEY, None) is None:
        raise ValueError(f"{name_or_path} has no attached priors: its config has no {CONFIG_KEY!r}")
    (name,) = config.architectures or ("",)
    model_class = getattr(transformers, name, None)
    if not (isinstance(model_class, type) and issubclass(model_class, PreTrainedModel)):
        raise ValueError(f"{name_or_path} is a {name or 'model without a name'}, which transformers does not have")
    arguments = arguments_of(getattr(config, CONFIG_KEY), f"the config of {name_or_path}")
    with folder_or_repository("model", name_or_path), damage_named(inside), _attached_keys_expected(model_class):
        model = model_class.from_pretrained(name_or_path, **options)
    attach(model, **arguments)
    wanted: dict[str, Tensor] = {
        name: parameter for name, parameter in model.named_parameters() if f".{ATTRIBUTE}." in name
    }
    _fill(wanted, dict(_saved_tensors(name_or_path, for_files)), str(name_or_path))
    return model


def _described(model: nn.Module) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Return the transformers model that has attached priors, and their description from its config."""
    for inside in model.modules():
        description = getattr(getattr(inside, "config", None), CONFIG_KEY, None)
        if isinstance(inside, PreTrainedModel) and description is not None and attached_priors(inside):
            return inside, description
    raise ValueError(f"this {type(model).__name__} has no attached priors; call attach(model, prior) first")


def arguments_of(description: Any, place: str | Path) -> dict[str, Any]:
    """Return the arguments of :func:`attach` from a description of attached priors.

    Args:
        description: description in the format of this version.
        place: file or object that holds the description, for the error message.

    Raises:
        ValueError: the description has another format, or is not a description.
    """
    known = {"prior", "logit_scale", "layers", "heads", "share_prior", "drop_positions", "layer_pattern", "layer_kinds"}
    if isinstance(description, dict):
        check_format(description.get("format"), place)
        arguments = {name: value for name, value in description.items() if name != "format"}
        if set(arguments) == known:
            return arguments
    got = sorted(description) if isinstance(description, dict) else description
    raise ValueError(f"{place}: the description of attached priors must hold {sorted(known)}, got {got}")


@torch.no_grad()
def _fill(wanted: dict[str, Tensor], found: dict[str, Tensor], source: str) -> None:
    missing, unknown = sorted(set(wanted) - set(found)), sorted(set(found) - set(wanted))
    if missing or unknown:
        raise ValueError(
            f"{source} does not match the attached priors: missing {missing or 'nothing'}, unexpected "
            f"{unknown or 'nothing'}"
        )
    for name, parameter in wanted.items():
        if parameter.shape != found[name].shape:
            raise ValueError(
                f"{source}: {name} has shape {tuple(found[name].shape)}, expected {tuple(parameter.shape)}"
            )
    for name, parameter in wanted.items():
        parameter.copy_(found[name])


@contextmanager
def _attached_keys_expected(model_class: type[PreTrainedModel]) -> Iterator[None]:
    """Suppress transformers' warning about attached parameters, which are loaded afterwards."""
    before = model_class.__dict__.get("_keys_to_ignore_on_load_unexpected")
    known = model_class._keys_to_ignore_on_load_unexpected
    model_class._keys_to_ignore_on_load_unexpected = [*(known or ()), rf"\.{re.escape(ATTRIBUTE)}\."]
    try:
        yield
    finally:
        if before is None:
            del model_class._keys_to_ignore_on_load_unexpected
        else:
            model_class._keys_to_ignore_on_load_unexpected = before


def _saved_tensors(name_or_path: str | Path, options: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield the attached tensors of a checkpoint, sharded or not."""
    index = cached_file(name_or_path, SAFE_WEIGHTS_INDEX_NAME, _raise_exceptions_for_missing_entries=False, **options)
    if index is None:
        names = {SAFE_WEIGHTS_NAME}
    else:
        files: dict[str, str] = read_json(Path(index))["weight_map"]
        names = {file for name, file in files.items() if f".{ATTRIBUTE}." in name}
    for name in sorted(names):
        path = cast(str, cached_file(name_or_path, name, **options))
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - not a mapping
                if f".{ATTRIBUTE}." in key:
                    yield key, file.get_tensor(key)


# ---- folders that hold an adapter, this package's or PEFT's, without a model


@dataclass(frozen=True)
class AdapterFolder:
    """Folder with an adapter of :func:`save_adapter`, of PEFT, or of both, and without a model's ``config.json``."""

    folder: Path
    base: str
    """Folder or Hugging Face name of the base model, from the adapter's files."""

    @property
    def has_tokenizer(self) -> bool:
        """Whether the folder also holds a tokenizer."""
        return (self.folder / "tokenizer_config.json").is_file()

    def put_on(self, base: PreTrainedModel) -> PreTrainedModel:
        """Attach the adapter's priors to the base model, and merge PEFT's weights.

        Raises:
            ValueError: the adapter does not fit the model, PEFT is not installed, or PEFT cannot merge this kind of
                adapter.
        """
        if (self.folder / DESCRIPTION).is_file():
            load_adapter(base, self.folder)
        return _merged(base, self.folder) if (self.folder / PEFT_DESCRIPTION).is_file() else base


def adapter_folder(name: str | Path) -> AdapterFolder | None:
    """Return the adapter in a folder, or None if the folder holds a model, holds no adapter, or does not exist.

    Raises:
        ValueError: the adapter does not name its base model, or the folder's two adapters name different base models.
    """
    folder = Path(name)
    if (folder / "config.json").is_file():
        return None
    found = {file: _base_of(folder / file) for file in (DESCRIPTION, PEFT_DESCRIPTION) if (folder / file).is_file()}
    if not found:
        return None
    bases = {base for base in found.values() if base}
    if len(bases) != 1:
        named = f"names two base models, {' and '.join(map(repr, sorted(bases)))}" if bases else "names no base model"
        raise ValueError(f"the adapter {str(name)!r} {named}; {TOGETHER}")
    return AdapterFolder(folder, bases.pop())


def _base_of(file: Path) -> str | None:
    description = read_json(file)
    return description.get("base_model_name_or_path") if isinstance(description, dict) else None


def _merged(base: PreTrainedModel, folder: Path) -> PreTrainedModel:
    try:
        from peft import PeftModel
    except ModuleNotFoundError as error:
        raise ValueError(f"loading the PEFT adapter {str(folder)!r} needs peft: pip install peft") from error
    wrapped = PeftModel.from_pretrained(base, str(folder))
    merge: Any = getattr(wrapped.base_model, "merge_and_unload", None)
    if merge is None:
        kind = wrapped.active_peft_config.peft_type
        raise ValueError(f"PEFT cannot merge the adapter {str(folder)!r} of type {kind} into the model's weights")
    return merge()
