"""Files of weights: read without running what is in them, written whole or not at all."""

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
    """What a pickle asks for beside tensors."""
    wanted = re.search(r"GLOBAL ([\w.]+)", str(error))
    if wanted is not None:
        return f"it asks for {wanted[1]}, which is neither a tensor nor a plain container"
    return "it holds something that is neither a tensor nor a plain container"
