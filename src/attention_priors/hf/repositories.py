"""Names of models, adapters and tokenizers: a folder on this machine, or a repository on the Hugging Face Hub."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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
