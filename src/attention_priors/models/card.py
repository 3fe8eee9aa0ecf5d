"""Model cards: the README.md of a saved model or adapter, made from what its config knows."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from attention_priors._io import write_bytes

CARD = "README.md"
TRAINING_KEY = "attention_priors_training"
"""Attribute of a model's config: settings of the recipe that trained the model, by their names on the card."""
_MARK = "\n<!-- Written by attention-priors, which never replaces a card that was edited. Checksum: "


def write_card(
    folder: Path,
    title: str,
    layers: Mapping[int, Mapping[str, Any]],
    load: str,
    *,
    base: str | None = None,
    notes: tuple[str, ...] = (),
    training: Mapping[str, Any] | None = None,
) -> None:
    """Write the card of a model into its folder. A card that a person wrote or edited stays.

    Args:
        folder: Folder of the model or adapter.
        title: Heading of the card.
        layers: Descriptions of each layer's parts. Keys are the index of the layer and the name of the part.
        load: Python code that loads the model.
        base: Name of the base model on the Hugging Face Hub. None omits it.
        notes: Sentences about the priors.
        training: Settings of the recipe that trained the model. None omits them.
    """
    path = folder / CARD
    if path.exists() and not _is_unedited(path.read_bytes()):
        return
    data = ModelCardData(base_model=base, library_name="attention-priors", tags=["attention-priors"])
    parts = [
        f"---\n{data.to_yaml()}\n---",
        f"# {title}",
        *([f"Base model: `{base}`."] if base else []),
        "## Priors",
        f"Attention adds the log-prior of each layer to its logits. attention-priors {version('attention-priors')} "
        "wrote this card; its page on priors explains the names and arguments.",
        _table(layers),
        *notes,
        *(["## Training", "\n".join(f"- {name}: {value}" for name, value in training.items())] if training else []),
        "## Load",
        "Run `pip install 'attention-priors[lab]'` first.",
        f"```python\n{load}\n```",
    ]
    card = "\n\n".join(parts).encode() + b"\n"
    write_bytes(path, card + f"{_MARK}{hashlib.sha256(card).hexdigest()} -->\n".encode())


def _is_unedited(card: bytes) -> bool:
    """Return whether a card is exactly as :func:`write_card` wrote it."""
    text, mark, end = card.rpartition(_MARK.encode())
    return bool(mark) and end.decode(errors="replace") == f"{hashlib.sha256(text).hexdigest()} -->\n"


def name_on_hub(name_or_path: str | None) -> str | None:
    """Return a model's name on the Hugging Face Hub, or None if the model has no name or is in a local folder."""
    if not name_or_path or Path(name_or_path).exists():
        return None
    try:
        validate_repo_id(name_or_path)
    except HFValidationError:
        return None
    return name_or_path


def _table(layers: Mapping[int, Mapping[str, Any]]) -> str:
    """Return a Markdown table of the parts, one line for neighbouring layers with equal parts."""
    names = [name for name in next(iter(layers.values())) if name == "prior" or any(x[name] for x in layers.values())]
    lines = [f"| layers | {' | '.join(names)} |", "|---" * (1 + len(names)) + "|"]
    # Neighbours have equal differences of index and rank.
    ranked = [(index, index - rank, parts) for rank, (index, parts) in enumerate(sorted(layers.items()))]
    for (_, parts), run in groupby(ranked, key=lambda each: each[1:]):
        indices = [index for index, *_ in run]
        which = str(indices[0]) if len(indices) == 1 else f"{indices[0]} to {indices[-1]}"
        lines.append(f"| {which} | {' | '.join(_described(parts[name]) for name in names)} |")
    return "\n".join(lines)


def _described(part: Any) -> str:
    """Return a part's description as code: ``laplace(learn=True)``."""
    if part is None or part is False:
        return "none"
    if part is True:
        return "yes"
    if isinstance(part, Mapping) and part["name"] == "sum":
        part = part["priors"]
    return " + ".join(f"`{_call(each)}`" for each in (part if isinstance(part, list | tuple) else [part]))


def _call(part: Mapping[str, Any] | str) -> str:
    if isinstance(part, str):
        return part
    arguments = ", ".join(f"{key}={value!r}" for key, value in part.items() if key not in ("name", "num_heads"))
    return f"{part['name']}({arguments})" if arguments else part["name"]
