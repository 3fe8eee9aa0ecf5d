"""Files of models: in a folder or a repository of the Hugging Face Hub, read without running what is in them."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from attention_priors._io import read_json, replacing

SUFFIXES = (".safetensors", ".pt", ".pth")


def read_weights(path: Path) -> dict[str, Tensor]:
    """A state dict, on the CPU.

    ``.safetensors`` holds nothing but tensors. ``.pt`` and ``.pth`` are pickles, of which PyTorch reads tensors and
    plain containers alone (``weights_only=True``): a pickle may run any code when it is read in full.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if its name or content is something else; it says what was refused.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path.name}: files of weights end in {', '.join(SUFFIXES)}, not {path.suffix!r}")
    if path.suffix == ".safetensors":
        try:
            return load_file(path)
        except SafetensorError as error:
            raise ValueError(f"{path} is not a whole safetensors file: {error}") from error
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path} was not read: {_refused(error)}. Reading it in full could run any code that its author put there. "
            "If you trust where it comes from, load it yourself with torch.load(path, weights_only=False), take the "
            "state dict out of it and save that with safetensors.torch.save_file"
        ) from error
    except Exception as error:
        # What is raised depends on where the damage is: struct.error, RuntimeError, EOFError, KeyError, ...
        raise ValueError(f"{path} cannot be read; it is not a whole file of PyTorch's: {error}") from error
    if not isinstance(content, Mapping):
        raise ValueError(f"{path} holds a {type(content).__name__}, expected a state dict, names with their tensors")
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise ValueError(
                f"{path} holds {name!r}: {type(value).__name__}, expected names with their tensors; if the state dict "
                "is a part of it, save that part on its own"
            )
    return dict(content)


def write_weights(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a state dict to a temporary name beside ``path`` and move it into place.

    Raises:
        ValueError: if the name says neither safetensors nor a file of PyTorch's.
    """
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path.name}: files of weights end in {', '.join(SUFFIXES)}, not {path.suffix!r}")
    # Copies, where tensors share memory: a file would refuse them, or keep all of what they are views of.
    whole = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()
    }
    with replacing(path) as temporary:
        if path.suffix == ".safetensors":
            save_file(whole, temporary, metadata={"format": "pt"})
        else:
            torch.save(whole, temporary)


@contextmanager
def damage_named(name_or_path: str | Path) -> Iterator[None]:
    """Around transformers' loading of a model: it does not say which file is damaged.

    Raises:
        ValueError: naming the file, or the model where its files are not in a folder of this name.
    """
    try:
        yield
    except (SafetensorError, json.JSONDecodeError) as error:
        for path in sorted(Path(name_or_path).glob("*")):
            problem = _damage(path)
            if problem is not None:
                raise ValueError(problem) from error
        raise ValueError(f"a file of {name_or_path} is damaged: {error}") from error


def _damage(path: Path) -> str | None:
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt"):
                pass
        elif path.suffix == ".json":
            read_json(path)
    except SafetensorError as error:
        return f"{path} is not a whole safetensors file: {error}"
    except ValueError as error:
        return str(error)
    return None


def _refused(error: pickle.UnpicklingError) -> str:
    """Say which object of a pickle, other than tensors, is refused."""
    wanted = re.search(r"GLOBAL ([\w.]+)", str(error))
    if wanted is not None:
        return f"it asks for {wanted[1]}, which is neither a tensor nor a plain container"
    return "it holds something that is neither a tensor nor a plain container"


@contextmanager
def folder_or_repository(what: str, name: str | Path, *, first: str | None = None) -> Iterator[None]:
    """Around the loading of what has this name: an error names it, and says what is missing.

    Args:
        what: is loaded, for messages: "model", "tokenizer", ...
        name: a folder, or ``repository`` or ``user/repository`` on the Hub.
        first: the file of a repository that is loaded first; where it has not been fetched before and there is no way
            to the Hub, the error comes at once.

    Raises:
        FileNotFoundError: at once, if the name is a path and there is no folder.
        OSError: if it cannot be loaded from the folder, or is none and cannot be fetched from the Hub.
    """
    # It takes a while to import.
    from huggingface_hub.errors import HFValidationError

    path, text = Path(name), str(name)
    if path.is_dir():
        try:
            yield
        except OSError as error:
            raise OSError(f"{what} {text!r} cannot be loaded: {error}") from error
        return
    if path.is_file():
        raise FileNotFoundError(f"{what} {text!r} is a file; expected a folder, or a name on the Hugging Face Hub")
    if path.is_absolute() or text.startswith((".", "~")) or len(path.parts) > 2 or text.endswith("/"):
        raise FileNotFoundError(
            f"{what} {text!r}: there is no such folder, and it is no name of the Hugging Face Hub's"
        )
    try:
        if first is not None:
            _ask_once(text, first)
        yield
    except (OSError, HFValidationError) as error:
        raise OSError(
            f"{what} {text!r}: there is no such folder, and it cannot be fetched from the Hugging Face Hub: {error}"
        ) from error


def _ask_once(repository: str, file: str) -> None:
    """Make sure that the Hub answers, whatever it says, where a file must come from there.

    ``huggingface_hub`` asks seven times for what is not in its cache, and waits 23 seconds, where there is no network.

    Raises:
        ConnectionError: there is no way to it.
    """
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache

    if try_to_load_from_cache(repository, file) is not None:
        return
    try:
        get_hf_file_metadata(hf_hub_url(repository, file))
    except Exception as error:
        # By name: it is httpx's, or what a version of huggingface_hub has in its place. Of answers, such as that there
        # is no such file, and of the offline mode, what loads the file says more.
        if type(error).__name__ in ("ConnectError", "ConnectTimeout"):
            raise ConnectionError(f"{constants.ENDPOINT} cannot be reached: {error}") from error
