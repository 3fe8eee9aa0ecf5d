"""What people write on the command line, as values."""

from __future__ import annotations

from pathlib import Path


def head_of_layer(name: str) -> tuple[int, int]:
    """``3.0`` is the first head of the fourth layer.

    Raises:
        ValueError: it is no such name.
    """
    layer, _, head = name.partition(".")
    if not (layer.isdecimal() and head.isdecimal()):
        raise ValueError(f"heads: {name!r} is no head; expected its layer and its number, both from 0, such as 3.0")
    return int(layer), int(head)


def name_of_model(model: str) -> Path:
    """What stands for a model in a path: where every model's folder is called ``model``, what it was trained as."""
    folder = Path(model)
    if not folder.exists():
        # A repository's; a path that leads nowhere must not become one that does.
        return folder if not folder.is_absolute() and ".." not in folder.parts else Path(folder.name)
    folder = folder.resolve()
    return _name_of_run(folder.parent) if folder.name == "model" else Path(folder.name)


def _name_of_run(run: Path) -> Path:
    """A seed's after its scheme's, an extension's after that of what was extended."""
    if run.name.startswith("seed-"):
        return Path(run.parent.name, run.name)
    if run.parent.name == "extended":
        return _name_of_run(run.parent.parent) / run.name
    if run.name.startswith("extended-"):
        return _name_of_run(run.parent) / run.name
    return Path(run.name)


def number_of_tokens(length: str, option: str = "lengths") -> int:
    """A number of tokens, of an option; ``64k`` is 65536, ``1m`` is 1048576.

    Raises:
        ValueError: it is none.
    """
    number, unit = (length[:-1], length[-1].lower()) if length[-1:].lower() in ("k", "m") else (length, "")
    if not number.isdecimal():
        raise ValueError(f"{option}: {length!r} is no number of tokens; expected one such as 4096, 64k or 1m")
    return int(number) * {"": 1, "k": 2**10, "m": 2**20}[unit]


def listed(*texts: str) -> list[str]:
    """What stands between commas, in all of the texts: those of an option that may be repeated."""
    return [part.strip() for text in texts for part in text.split(",") if part.strip()]
