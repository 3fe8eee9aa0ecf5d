"""Folders that hold an adapter, ours or PEFT's, and no model of their own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from attention_priors._io import read_json
from attention_priors.hf.adapter import DESCRIPTION, load_adapter

PEFT_DESCRIPTION = "adapter_config.json"
TOGETHER = "save both together: model.save_pretrained(OTHER) of the base model with the adapter in it"
"""Cure for an adapter whose base model is unknown or elsewhere."""


@dataclass(frozen=True)
class AdapterFolder:
    """A folder of :func:`save_adapter`, of PEFT, or of both; ``config.json`` of a model is not in it."""

    folder: Path
    base: str
    """Folder or Hugging Face name of the model that the adapter belongs to, as the adapter's files give it."""

    @property
    def has_tokenizer(self) -> bool:
        """Whether a tokenizer is beside the adapter."""
        return (self.folder / "tokenizer_config.json").is_file()

    def put_on(self, base: PreTrainedModel) -> PreTrainedModel:
        """Attach our priors to the base model, and merge PEFT's weights into it.

        Raises:
            ValueError: the adapter does not fit the model, PEFT is missing, or its adapter is of a kind that cannot be
                merged into the model's weights.
        """
        if (self.folder / DESCRIPTION).is_file():
            load_adapter(base, self.folder)
        return _merged(base, self.folder) if (self.folder / PEFT_DESCRIPTION).is_file() else base


def adapter_folder(name: str | Path) -> AdapterFolder | None:
    """Return the adapter in a folder; None if the folder holds a model, neither, or is none.

    Raises:
        ValueError: the adapter does not name its base model, or two adapters in the folder name different ones.
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
        raise ValueError(f"model {str(name)!r} is an adapter that {named}; {TOGETHER}")
    return AdapterFolder(folder, bases.pop())


def _base_of(file: Path) -> str | None:
    description = read_json(file)
    return description.get("base_model_name_or_path") if isinstance(description, dict) else None


def _merged(base: PreTrainedModel, folder: Path) -> PreTrainedModel:
    try:
        from peft import PeftModel
    except ModuleNotFoundError as error:
        raise ValueError(f"model {str(folder)!r} is an adapter of PEFT: pip install peft") from error
    wrapped = PeftModel.from_pretrained(base, str(folder))
    merge: Any = getattr(wrapped.base_model, "merge_and_unload", None)
    if merge is None:
        kind = wrapped.active_peft_config.peft_type
        raise ValueError(f"model {str(folder)!r} is an adapter of the kind {kind}: expected weights that can be merged")
    return merge()
