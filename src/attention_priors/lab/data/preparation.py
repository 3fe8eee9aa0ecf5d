"""Turning documents into token shards, once, so that an interruption costs no more than one shard's work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.lib.format import write_array

from attention_priors._io import checksum, remove_temporaries, replacing, write_json
from attention_priors.lab.data.document import Document
from attention_priors.lab.data.shards import FORMAT, MANIFEST, PARTS, Shard, ShardError, read_manifest, shards_of
from attention_priors.lab.data.sources import Documents, Place
from attention_priors.lab.data.stream import DOCUMENTS_PER_BATCH, encode_documents
from attention_priors.lab.data.tokenizer import pretrained_tokenizer, tokenizer_fingerprint, train_tokenizer
from attention_priors.lab.output_folder import undone_if_refused
from attention_priors.lab.strict_yaml import RecipeError, differences

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENIZER_CHARACTERS = 20_000_000
"""A tokenizer is trained on the first documents with about so many characters."""

CHARACTERS_PER_BATCH = 2**24

TOKENIZER = "tokenizer"


@dataclass(frozen=True)
class Preparation:
    """What is prepared.

    Args:
        documents: the texts.
        tokenizer: entries of a byte-level BPE trained on the documents, or a tokenizer's path or Hugging Face name.
        held_out_tokens: of documents without a held-out part, the first ones that have so many tokens together.
        max_tokens: of the part to train on, so many tokens at most; None for all. The last document is cut to that.
        shard_tokens: a file ends with the document that brings it to so many tokens.
    """

    documents: Documents
    tokenizer: int | str
    held_out_tokens: int
    max_tokens: int | None
    shard_tokens: int

    def identity(self) -> dict[str, Any]:
        """What determines the tokens, but for the versions of the libraries; what cannot be known is None.

        Raises:
            ValueError: the tokenizer's folder holds none.
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
    """Tokenise documents into ``folder``, going on from whatever it holds; nothing is done if all is there.

    Of several processes that are asked to do the same, one does it and the others wait.

    Args:
        preparation: what.
        folder: where.
        repair: compare every file with its checksum first, and make anew what is damaged.
        on_tokens: called with a part's name and how many tokens of it there are.
        on_message: called with what a user should know.

    Raises:
        RecipeError: ``folder`` holds tokens of another preparation.
        ValueError: the documents or the tokenizer cannot be read, or there is nothing to train on.
        OSError: ``folder`` cannot be written.
    """
    made = (MANIFEST, TOKENIZER, f"{TOKENIZER}.unfinished")
    with undone_if_refused(folder, made, keep=lambda: _has_tokens(folder), wait=True):
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
                f"held_out_tokens is {preparation.held_out_tokens}"
            )
        manifest["complete"] = True
        write_json(folder / MANIFEST, manifest)


def _has_tokens(folder: Path) -> bool:
    return any(folder.glob("*.tokens.npy"))


def prepared_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer that tokens were prepared with.

    Raises:
        ShardError: it is not the one any more.
    """
    manifest = read_manifest(folder)
    tokenizer = pretrained_tokenizer(folder / TOKENIZER)
    if tokenizer_fingerprint(tokenizer) != manifest["tokenizer_fingerprint"]:
        raise ShardError(f"{folder / TOKENIZER} is not the tokenizer that the tokens beside it were made with")
    return tokenizer


def _begin(preparation: Preparation, folder: Path) -> dict[str, Any]:
    wanted = preparation.identity()
    if (folder / MANIFEST).is_file():
        manifest = read_manifest(folder)
        known = manifest["identity"]
        # What is not there any more says nothing against the tokens.
        gone = {key for key in ("tokenizer_fingerprint", "files") if known.get(key) is None or wanted.get(key) is None}
        there, here = ({key: x[key] for key in x if key not in gone} for x in (known, wanted))
        differing = differences(there, here)
        if differing:
            raise RecipeError(
                f"{folder} holds other tokens; they differ in {'; '.join(differing)}. Use another folder, or delete "
                "that one"
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
    """Forget the first damaged shard and all that follow it: they can be made again from the one before."""
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
    saved = folder / TOKENIZER
    if not saved.is_dir():
        spec = preparation.tokenizer
        if isinstance(spec, int):
            tokenizer = train_tokenizer(_first_documents(preparation.documents), spec)
        else:
            tokenizer = pretrained_tokenizer(spec)
        unfinished = folder / f"{TOKENIZER}.unfinished"
        tokenizer.save_pretrained(unfinished)
        unfinished.rename(saved)
    # Always the saved one: what is saved and loaded may differ in details from what was there before.
    return pretrained_tokenizer(saved)


def _first_documents(documents: Documents) -> Iterator[Document]:
    read = 0
    for place in documents.read("train"):
        yield Document(str(read), place.text)
        read += len(place.text)
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
    documents, done = preparation.documents, manifest["parts"][part]
    limit = preparation.max_tokens if part == "train" else preparation.held_out_tokens
    if documents.has_held_out_part:
        before = done
        source = part
        limit = limit if part == "train" else None
    else:
        # What is held out is the beginning of what there is.
        before = [entry for name in PARTS for entry in manifest["parts"][name]]
        source = "train"
    places = documents.read(source, before[-1]["state"] if before else None)
    tokens: list[np.ndarray] = []
    starts, count, total = [0], 0, _tokens(manifest, part)
    state: Any = None
    on_tokens(part, total)
    while limit is None or total + count < limit:
        batch = list(_batch(places))
        if not batch:
            break
        for place, ids in zip(batch, encode_documents(tokenizer, [place.text for place in batch]), strict=True):
            if limit is not None and total + count >= limit:
                break
            # What is held out is whole documents: the rest of the last one would be neither held out nor trained on.
            used = ids if limit is None or part != "train" else ids[: limit - total - count]
            tokens.append(used)
            count += len(used)
            starts.append(count)
            state = place.state
            if count >= preparation.shard_tokens:
                _write_shard(tokens, starts, state, part, manifest, folder)
                total += count
                tokens, starts, count = [], [0], 0
        on_tokens(part, total + count)
    if count:
        _write_shard(tokens, starts, state, part, manifest, folder)
    manifest["finished"].append(part)
    write_json(folder / MANIFEST, manifest)


def _batch(places: Iterator[Place]) -> Iterator[Place]:
    """The next documents, few enough to be in memory with their tokens."""
    characters = 0
    for place in islice(places, DOCUMENTS_PER_BATCH):
        yield place
        characters += len(place.text)
        if characters >= CHARACTERS_PER_BATCH:
            return


def _tokens(manifest: dict[str, Any], part: str) -> int:
    return sum(entry["tokens"] for entry in manifest["parts"][part])


def _write_shard(
    tokens: list[np.ndarray], starts: list[int], state: Any, part: str, manifest: dict[str, Any], folder: Path
) -> None:
    name = f"{part}-{len(manifest['parts'][part]):05}"
    arrays = {"tokens": np.concatenate(tokens), "starts": np.array(starts[:-1], dtype=np.int64)}
    shard = Shard(name, tokens=starts[-1], documents=len(starts) - 1, sha256={})
    for kind, path in shard.paths(folder).items():
        with replacing(path) as temporary, temporary.open("wb") as file:
            write_array(file, arrays[kind], allow_pickle=False)
        shard.sha256[kind] = checksum(path)
    manifest["parts"][part].append(
        {"name": name, "tokens": shard.tokens, "documents": shard.documents, "sha256": shard.sha256, "state": state}
    )
    write_json(folder / MANIFEST, manifest)
