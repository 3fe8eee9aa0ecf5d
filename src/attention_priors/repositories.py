"""Names of models, adapters and tokenizers: a folder on this machine, or a repository on the Hugging Face Hub."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def folder_or_repository(what: str, name: str | Path) -> Iterator[None]:
    """Around the loading of what has this name: an error names it, and says what is missing.

    Args:
        what: is loaded, for messages: "model", "tokenizer", ...
        name: a folder, or ``repository`` or ``user/repository`` on the Hub.

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
        yield
    except (OSError, HFValidationError) as error:
        raise OSError(
            f"{what} {text!r}: there is no such folder, and it cannot be fetched from the Hugging Face Hub: {error}"
        ) from error
