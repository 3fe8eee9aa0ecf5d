"""Model files in a folder or on the Hugging Face Hub, read without executing code from them."""

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
    """Read a state dict to the CPU.

    ``.safetensors`` files hold tensors only. ``.pt`` and ``.pth`` files are pickles, which may run arbitrary code, so
    PyTorch reads tensors and plain containers only (``weights_only=True``).

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file has another suffix or other content. The message says what was rejected.
    """
    if not path.is_file():
        raise FileNotFoundError(f"file {path} does not exist")
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path.name}: weights files must end in {', '.join(SUFFIXES)}, got {path.suffix!r}")
    if path.suffix == ".safetensors":
        try:
            return load_file(path)
        except SafetensorError as error:
            raise ValueError(f"{path} is not a valid safetensors file: {error}") from error
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path} was not read: {_refused(error)}. Reading it in full could run arbitrary code. If you trust its "
            "source, load it with torch.load(path, weights_only=False) and save its state dict with "
            "safetensors.torch.save_file"
        ) from error
    except Exception as error:
        # The exception depends on the damage: struct.error, RuntimeError, EOFError, KeyError, ...
        raise ValueError(f"{path} is not a valid PyTorch file: {error}") from error
    if not isinstance(content, Mapping):
        raise ValueError(f"{path} must hold a state dict, got {type(content).__name__}")
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise ValueError(
                f"{path} must hold a state dict of tensors, got {name!r}: {type(value).__name__}; if the state dict is "
                "an entry of it, save that entry alone"
            )
    return dict(content)


def write_weights(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a state dict atomically.

    Raises:
        ValueError: the suffix is neither that of safetensors nor of PyTorch files.
    """
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path.name}: weights files must end in {', '.join(SUFFIXES)}, got {path.suffix!r}")
    # Copy tensors: safetensors rejects shared memory, and pickle would save the whole storage of a view.
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
    """Wrap transformers' loading of a model to name the damaged file.

    Raises:
        ValueError: a file is damaged. The message names the file, or the model if its files are not in a local folder.
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
        return f"{path} is not a valid safetensors file: {error}"
    except ValueError as error:
        return str(error)
    return None


def _refused(error: pickle.UnpicklingError) -> str:
    """Return which object of a pickle was rejected, for the error message."""
    wanted = re.search(r"GLOBAL ([\w.]+)", str(error))
    if wanted is not None:
        return f"it contains {wanted[1]}, which is neither a tensor nor a plain container"
    return "it contains an object that is neither a tensor nor a plain container"


@contextmanager
def folder_or_repository(what: str, name: str | Path, *, first: str | None = None) -> Iterator[None]:
    """Wrap the loading of a model or tokenizer, so that errors name it and say what is missing.

    Args:
        what: kind of object, for messages: "model", "tokenizer", ...
        name: a folder, or ``repository`` or ``user/repository`` on the Hub.
        first: file of a repository that is loaded first. If the file is not cached and the Hub cannot be reached, the
            error comes at once.

    Raises:
        FileNotFoundError: ``name`` is a path, and the folder does not exist.
        OSError: loading from the folder or downloading fails.
    """
    # Import lazily, because it is slow.
    from huggingface_hub.errors import HFValidationError

    path, text = Path(name), str(name)
    if path.is_dir():
        try:
            yield
        except OSError as error:
            raise OSError(f"{what} {text!r} cannot be loaded: {error}") from error
        return
    if path.is_file():
        raise FileNotFoundError(f"{what} {text!r} must be a folder or a name on the Hugging Face Hub, got a file")
    if path.is_absolute() or text.startswith((".", "~")) or len(path.parts) > 2 or text.endswith("/"):
        raise FileNotFoundError(
            f"{what} {text!r} does not exist as a folder and is not a valid name on the Hugging Face Hub"
        )
    try:
        if first is not None:
            _ask_once(text, first)
        yield
    except (OSError, HFValidationError) as error:
        raise OSError(
            f"{what} {text!r} does not exist as a folder and cannot be downloaded from the Hugging Face Hub: {error}"
        ) from error


def _ask_once(repository: str, file: str) -> None:
    """Check that the Hub can be reached, unless the file is cached.

    Without a network, ``huggingface_hub`` would retry seven times, for 23 seconds.

    Raises:
        ConnectionError: the Hub cannot be reached.
    """
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache

    if try_to_load_from_cache(repository, file) is not None:
        return
    try:
        get_hf_file_metadata(hf_hub_url(repository, file))
    except Exception as error:
        # By name: the class is httpx's, or another HTTP library's in other versions of huggingface_hub. For other
        # errors (missing file, offline mode), the loading code has better messages.
        if type(error).__name__ in ("ConnectError", "ConnectTimeout"):
            raise ConnectionError(f"{constants.ENDPOINT} cannot be reached: {error}") from error
