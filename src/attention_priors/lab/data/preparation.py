"""Resumable preparation of token shards from documents; an interruption loses at most one shard's work."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.lib.format import write_array

from attention_priors._io import checksum, remove_temporaries, replacing, write_json
from attention_priors.lab.data.document import Document
from attention_priors.lab.data.shards import FORMAT, MANIFEST, PARTS, Shard, ShardError, read_manifest, shards_of
from attention_priors.lab.data.sources import Documents
from attention_priors.lab.data.tokenizer import (
    DOCUMENTS_PER_BATCH,
    encode_documents,
    pretrained_tokenizer,
    tokenizer_fingerprint,
    train_tokenizer,
)
from attention_priors.lab.output_folder import undone_if_refused
from attention_priors.lab.strict_yaml import RecipeError, differences

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENIZER_CHARACTERS = 20_000_000
"""Approximate number of characters of the first documents, on which a tokenizer is trained."""

CHARACTERS_PER_BATCH = 2**24

TOKENIZER = "tokenizer"


@dataclass(frozen=True)
class Preparation:
    """Description of the tokens to prepare.

    Args:
        documents: Source of the texts.
        tokenizer: Path or Hugging Face name of a tokenizer. A number is the vocabulary size of a byte-level BPE,
            which is trained on the documents.
        held_out_tokens: Number of held-out tokens, if the source has no held-out part. They come from its first
            documents.
        max_tokens: Largest number of training tokens. The last document is cut to it. None keeps all tokens.
        shard_tokens: Size of a shard in tokens. The shard ends with the document that reaches this size.
    """

    documents: Documents
    tokenizer: int | str
    held_out_tokens: int
    max_tokens: int | None
    shard_tokens: int

    def identity(self) -> dict[str, Any]:
        """Return all inputs that determine the tokens, except library versions; None stands for an unknown input.

        Raises:
            ValueError: The tokenizer's folder holds no tokenizer.
        """
        fingerprint = None
        if isinstance(self.tokenizer, str) and Path(self.tokenizer).is_dir():
            fingerprint = tokenizer_fingerprint(pretrained_tokenizer(self.tokenizer))
        return self.documents.identity() | {
            "tokenizer": self.tokenizer,
            "tokenizer_fingerprint": fingerprint,
            "held_out_tokens": None if self.documents.has_held_out_part else self.held_out_tokens,
            "max_tokens": self.max_tokens,
            "shard_tokens": self.shard_tokens,
        }


def prepare(
    preparation: Preparation,
    folder: Path,
    *,
    repair: bool = False,
    on_tokens: Callable[[str, int], None] = lambda part, tokens: None,
    on_message: Callable[[str], None] = lambda message: None,
) -> None:
    """Tokenise documents into shards in ``folder``; existing shards are reused.

    If several processes call this function with one folder, the first prepares the tokens and the others wait.

    Args:
        preparation: Documents, tokenizer and sizes.
        folder: Folder for the tokens.
        repair: Whether to check every existing file against its checksum, and replace damaged files.
        on_tokens: Callback for progress. Its arguments are the name of a part and its number of tokens.
        on_message: Callback for messages to the user.

    Raises:
        RecipeError: ``folder`` holds tokens of another preparation.
        ValueError: The documents or the tokenizer cannot be read, or no tokens are left to train on.
        OSError: ``folder`` cannot be written.
    """
    has_tokens = lambda: any(folder.glob("*.tokens.npy"))  # noqa: E731
    with undone_if_refused(folder, (MANIFEST, TOKENIZER), keep=has_tokens, wait=math.inf):
        remove_temporaries(folder)
        manifest = _begin(preparation, folder)
        if repair:
            _drop_damaged(manifest, folder, on_message)
        if manifest["complete"]:
            return
        if preparation.documents.left_out is not None:
            on_message(f"data: {preparation.documents.left_out}")
        tokenizer = _tokenizer(preparation, folder)
        manifest["tokenizer_fingerprint"] = tokenizer_fingerprint(tokenizer)
        for part in PARTS:
            if part not in manifest["finished"]:
                _prepare_part(preparation, tokenizer, part, manifest, folder, on_tokens)
        if not manifest["parts"]["train"]:
            raise ValueError(
                f"nothing is left to train on: the documents have {_tokens(manifest, 'held_out')} tokens, and "
                f"held_out_tokens is {preparation.held_out_tokens}; use more text or a smaller held_out_tokens"
            )
        manifest["complete"] = True
        write_json(folder / MANIFEST, manifest)


def prepared_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of prepared tokens.

    Raises:
        ShardError: The tokenizer has changed since the preparation.
    """
    manifest = read_manifest(folder)
    tokenizer = pretrained_tokenizer(folder / TOKENIZER)
    if tokenizer_fingerprint(tokenizer) != manifest["tokenizer_fingerprint"]:
        raise ShardError(
            f"{folder / TOKENIZER} is not the tokenizer that made the tokens in {folder}; restore it, or prepare the "
            "tokens in another folder"
        )
    return tokenizer


def _begin(preparation: Preparation, folder: Path) -> dict[str, Any]:
    """Read the manifest of a folder, or write a new manifest."""
    wanted = preparation.identity()
    if (folder / MANIFEST).is_file():
        manifest = read_manifest(folder)
        known = manifest["identity"]
        # Tokens stay valid when their source files or tokenizer have been removed.
        gone = {key for key in ("tokenizer_fingerprint", "files") if known.get(key) is None or wanted.get(key) is None}
        there, here = ({key: x[key] for key in x if key not in gone} for x in (known, wanted))
        differing = differences(there, here)
        if differing:
            raise RecipeError(
                f"{folder} holds other tokens; they differ in {'; '.join(differing)}. Use another folder, or delete "
                "this folder"
            )
        return manifest
    manifest = {
        "format": FORMAT,
        "identity": wanted,
        "versions": {name: version(name) for name in ("attention-priors", "tokenizers", "transformers")},
        "tokenizer_fingerprint": None,
        "complete": False,
        "finished": [],
        "parts": {part: [] for part in PARTS},
    }
    write_json(folder / MANIFEST, manifest)
    return manifest


def _drop_damaged(manifest: dict[str, Any], folder: Path, on_message: Callable[[str], None]) -> None:
    """Drop the first damaged shard and all later shards, which are made again from the last intact shard on."""
    for index, part in enumerate(PARTS):
        for number, shard in enumerate(shards_of(manifest, part)):
            try:
                shard.open(folder)
            except ShardError as error:
                on_message(str(error))
                del manifest["parts"][part][number:]
                manifest["parts"] |= {later: [] for later in PARTS[index + 1 :]}
                manifest["finished"] = [name for name in manifest["finished"] if name in PARTS[:index]]
                manifest["complete"] = False
                write_json(folder / MANIFEST, manifest)
                return


def _tokenizer(preparation: Preparation, folder: Path) -> PreTrainedTokenizerBase:
    saved, spec = folder / TOKENIZER, preparation.tokenizer
    if not saved.is_dir():
        if isinstance(spec, int):
            tokenizer = train_tokenizer(_first_documents(preparation.documents), spec)
        else:
            tokenizer = pretrained_tokenizer(spec)
        with replacing(saved) as unfinished:
            tokenizer.save_pretrained(unfinished)
    # Always use the saved tokenizer, because saving and loading may change details.
    return pretrained_tokenizer(saved)


def _first_documents(documents: Documents) -> Iterator[Document]:
    read = 0
    for text, _ in documents.read("train"):
        yield Document(str(read), text)
        read += len(text)
        if read >= TOKENIZER_CHARACTERS:
            return


def _prepare_part(
    preparation: Preparation,
    tokenizer: PreTrainedTokenizerBase,
    part: str,
    manifest: dict[str, Any],
    folder: Path,
    on_tokens: Callable[[str, int], None],
) -> None:
    documents, before, source = preparation.documents, manifest["parts"][part], part
    limit = preparation.max_tokens if part == "train" else preparation.held_out_tokens
    if not documents.has_held_out_part:
        # The held-out part is the beginning of the documents; training tokens follow.
        before, source = [entry for name in PARTS for entry in manifest["parts"][name]], "train"
    elif part == "held_out":
        limit = None
    texts = documents.read(source, before[-1]["state"] if before else None)
    total = _tokens(manifest, part)
    tokens: list[np.ndarray] = []
    state: Any = None
    on_tokens(part, total)
    while (limit is None or total < limit) and (batch := _batch(texts)):
        for (_, after), ids in zip(batch, encode_documents(tokenizer, [text for text, _ in batch]), strict=True):
            if limit is not None and total >= limit:
                break
            # Held-out documents are never cut: the rest of a cut document would belong to neither part.
            tokens.append(ids if limit is None or part != "train" else ids[: limit - total])
            total += len(tokens[-1])
            state = after
            if total - _tokens(manifest, part) >= preparation.shard_tokens:
                _write_shard(tokens, state, part, manifest, folder)
                tokens = []
        on_tokens(part, total)
    if tokens:
        _write_shard(tokens, state, part, manifest, folder)
    manifest["finished"].append(part)
    write_json(folder / MANIFEST, manifest)


def _batch(texts: Iterator[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Read the next batch of documents, small enough to fit into memory with its tokens."""
    batch: list[tuple[str, Any]] = []
    characters = 0
    while len(batch) < DOCUMENTS_PER_BATCH and characters < CHARACTERS_PER_BATCH and (read := next(texts, None)):
        batch.append(read)
        characters += len(read[0])
    return batch


def _tokens(manifest: dict[str, Any], part: str) -> int:
    return sum(entry["tokens"] for entry in manifest["parts"][part])


def _write_shard(tokens: list[np.ndarray], state: Any, part: str, manifest: dict[str, Any], folder: Path) -> None:
    ends = np.cumsum([len(ids) for ids in tokens], dtype=np.int64)
    arrays = {"tokens": np.concatenate(tokens), "starts": np.concatenate([[0], ends[:-1]])}
    number = len(manifest["parts"][part])
    shard = Shard(f"{part}-{number:05}", tokens=int(ends[-1]), documents=len(tokens), state=state)
    for kind, path in shard.paths(folder).items():
        with replacing(path) as temporary, temporary.open("wb") as file:
            write_array(file, arrays[kind], allow_pickle=False)
        shard.sha256[kind] = checksum(path)
    manifest["parts"][part].append(asdict(shard))
    write_json(folder / MANIFEST, manifest)
