"""The text that a training reads: its settings in recipes, and its documents, from a place that can be resumed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import cached_property
from glob import glob
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import BeforeValidator, Field, model_validator

from attention_priors.lab.data.corpora import Corpus, left_out, load_corpus
from attention_priors.lab.data.genomes import FastaFile
from attention_priors.lab.data.tokenizer import tokenizer_spec
from attention_priors.lab.strict_yaml import Strict, check_one_of

_ENDS = 2**20
"""Bytes of each end of a file that are hashed to tell it from others."""

TokenizerSpec: TypeAlias = Annotated[Annotated[int, Field(gt=256)] | str | None, BeforeValidator(tokenizer_spec)]
"""A tokenizer in a recipe: entries of a new one, which may stand in quotes, or a path or name."""


class HubDataset(Strict):
    """A dataset that Hugging Face's ``datasets`` can stream: nothing is downloaded before it is read."""

    path: str = Field(min_length=1)
    """A name on the Hub (``HuggingFaceFW/fineweb``), or a format of local files: ``json``, ``parquet``, ``text``."""
    name: str | None = None
    """Name of its configuration (``sample-10BT``, ``en``, ``20231101.en``)."""
    split: str = "train"
    text: str = "text"
    """Field that holds the text."""
    data_files: str | tuple[str, ...] | None = None
    """Local files, or some of the repository's; may hold ``*``."""
    revision: str | None = None
    """A commit of the repository, so that the data stay what they were."""

    has_held_out_part: ClassVar[bool] = False
    left_out: ClassVar[None] = None

    def identity(self) -> dict[str, Any]:
        """Return the dataset's description, and a fingerprint of its files, where they are on this machine."""
        return {"dataset": self.model_dump(mode="json"), "files": _files_fingerprint(self)}

    def read(self, part: str, state: Any = None) -> Iterator[tuple[str, Any]]:
        """Yield texts in the dataset's own order, without blank ones, each with the state after it.

        Raises:
            ValueError: the dataset cannot be loaded, or a row has no such field, or another thing than text in it.
        """
        assert part == "train"
        # It takes more than a second to import.
        from datasets import IterableDataset, load_dataset

        options: dict[str, Any] = self.model_dump(include={"name", "split", "data_files", "revision"})
        if isinstance(self.data_files, tuple):
            options["data_files"] = list(self.data_files)
        try:
            dataset = load_dataset(self.path, **options, streaming=True)
        except Exception as error:
            # The kind of error, and whether it names the dataset, depends on the mistake. A pattern that matches
            # nothing has no message.
            reason = str(error) or f"no file is found with data_files={self.data_files!r}"
            raise ValueError(f"data.dataset: {self.path!r} cannot be loaded: {reason}") from error
        assert isinstance(dataset, IterableDataset)
        if state is not None:
            dataset.load_state_dict(state)
        for row in dataset:
            text = row.get(self.text)
            if not isinstance(text, str):
                raise ValueError(
                    f"data.dataset.text: a row of {self.path!r} has {type(text).__name__} under {self.text!r}, "
                    f"not text; its fields are {', '.join(row)}"
                )
            if text.strip():
                yield text, dataset.state_dict()


class FastaSettings(Strict):
    """A genome (:class:`~attention_priors.lab.data.FastaFile`), one record in memory at a time.

    All of the file is read once before anything is used.
    """

    path: str = Field(min_length=1)
    """Path of the FASTA file, plain or compressed."""
    held_out: tuple[str, ...] | None = Field(default=None, min_length=1)
    """Names of the records that are not trained on, or patterns (``chr21*``); by default the first contigs that have
    ``held_out_tokens`` together are held out."""

    @cached_property
    def _file(self) -> FastaFile:
        return FastaFile(self.path)

    @property
    def has_held_out_part(self) -> bool:
        """Whether records are named that are held out."""
        return bool(self.held_out)

    @property
    def left_out(self) -> str | None:
        """Message about records without a known base.

        Raises:
            FastaError: the file is broken.
        """
        return left_out(str(self._file.path), self._file.summary().left_out)

    def identity(self) -> dict[str, Any]:
        """Return the file's hash, and the records that are held out."""
        return {"fasta": self._file.sha256, "held_out": list(self.held_out or ())}

    def read(self, part: str, state: Any = None) -> Iterator[tuple[str, Any]]:
        """Yield contigs in the file's order, each with the number of contigs up to it.

        Raises:
            FastaError: the file is broken.
            ValueError: a name to hold out matches no record with a known base, or they match all of them.
        """
        held_out = self._records()
        chosen = (contig for record, contig in self._file.contigs() if (record in held_out) == (part == "held_out"))
        for number, contig in enumerate(chosen, start=1):
            if number > (state or 0):
                yield contig.text, number

    def _records(self) -> set[str]:
        summary = self._file.summary()
        known = [name for name in summary.records if name not in summary.unknown]
        found: set[str] = set()
        for pattern in self.held_out or ():
            # A name may itself hold what patterns are made of.
            matching = {name for name in known if name == pattern or fnmatchcase(name, pattern)}
            if not matching:
                shown = ", ".join(known[:8]) + (", …" if len(known) > 8 else "")
                raise ValueError(
                    f"data.fasta.held_out: {self._file.path} has no record {pattern!r} with a known base; it has "
                    f"{shown}"
                )
            found |= matching
        if found == set(known):
            raise ValueError(f"data.fasta.held_out: nothing else is left of {self._file.path} to train on")
        return found


Documents: TypeAlias = Corpus | FastaSettings | HubDataset
"""Texts in an order that is always the same, from a source that can be resumed.

- ``identity()`` describes what determines the texts, in plain JSON; None stands for what cannot be known.
- ``left_out`` is a message about files or records that are not used, or None.
- ``read(part, state)`` yields the texts of ``held_out`` or ``train``, each with the state after it, in plain JSON; from
  the start, or after a state.
- ``has_held_out_part`` tells whether the held-out part is separate; else it is the beginning of ``train``.
"""


class DataSettings(Strict):
    """Source of the tokens: exactly one of ``text``, ``fasta``, ``dataset``, ``shards``."""

    text: str | None = None
    """``embedded`` (the Python standard library), a text file, a folder of text files, ``package:NAME``, or a small
    FASTA file."""
    fasta: FastaSettings | None = None
    """A genome of any size."""
    dataset: HubDataset | None = None
    shards: str | None = None
    """A folder that ``attention-priors prepare`` has made."""
    max_tokens: int | None = Field(default=None, gt=0)
    """Tokens to train on, at most."""
    held_out_tokens: int = Field(default=1_000_000, gt=0)
    """Tokens of a dataset, or of a genome without ``held_out``, that are not trained on: its first documents."""
    shard_tokens: int = Field(default=2**25, gt=0)
    """A file of prepared tokens ends with the document that brings it to this size."""
    order: Literal["shuffled", "as_read"] = "shuffled"
    """Whether rows are drawn from all over the tokens, each once an epoch, or read one after the other."""

    @model_validator(mode="after")
    def _one_source(self) -> DataSettings:
        check_one_of(self, "text", "fasta", "dataset", "shards")
        return self

    @model_validator(mode="after")
    def _all_has_an_effect(self) -> DataSettings:
        idle: tuple[str, ...] = ("held_out_tokens",)
        if self.shards is not None:
            idle, why = ("max_tokens", "held_out_tokens", "shard_tokens"), "the tokens of shards are prepared already"
        elif self.text is not None:
            why = "a text has a held-out part of its own"
        elif self.fasta is not None and self.fasta.held_out is not None:
            why = "fasta.held_out names what is held out"
        else:
            return self
        values = {name: getattr(self, name) for name in idle if name in self.model_fields_set}
        given = [f"{name}={value}" for name, value in values.items() if value is not None]
        if given:
            raise ValueError(f"{why}: leave out what changes nothing, got {' and '.join(given)}")
        return self

    def documents(self) -> Documents:
        """Return the documents that are to be prepared.

        Raises:
            FileNotFoundError: the text does not exist.
            ValueError: the text cannot be read, or the tokens are prepared already.
        """
        documents = self.dataset or self.fasta or (None if self.text is None else load_corpus(self.text))
        if documents is not None:
            return documents
        if not Path(str(self.shards)).is_dir():
            raise FileNotFoundError(f"data.shards: there is no folder {self.shards!r}")
        raise ValueError(f"data.shards: {self.shards!r} is prepared already")


def _files_fingerprint(source: HubDataset) -> str | None:
    """SHA-256 (64 hex digits) of the names, sizes, beginnings and ends of a dataset's local files; None without any.

    It does not read all of a large dataset, and does not notice a change of neither the size nor the ends.
    """
    folder = Path(source.path)
    patterns = (source.data_files,) if isinstance(source.data_files, str) else source.data_files or ()
    if folder.is_dir():
        patterns = tuple(str(folder / pattern) for pattern in patterns) or (str(folder / "**"),)
    elif "/" in source.path:
        return None  # a repository's; `revision` says which
    found = sorted({path for pattern in patterns for path in glob(pattern, recursive=True) if os.path.isfile(path)})
    digest = hashlib.sha256()
    for path in found:
        size = os.path.getsize(path)
        digest.update(f"{os.path.basename(path)}\0{size}\0".encode(errors="surrogateescape"))
        with open(path, "rb") as file:
            digest.update(file.read(_ENDS))
            file.seek(max(0, size - _ENDS))
            digest.update(file.read(_ENDS))
    return digest.hexdigest() if found else None
