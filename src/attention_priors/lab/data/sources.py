"""Sources of training text: their settings in recipes, and resumable reading of their documents."""

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
"""Number of bytes at each end of a file that are hashed into its fingerprint."""

TokenizerSpec: TypeAlias = Annotated[Annotated[int, Field(gt=256)] | str | None, BeforeValidator(tokenizer_spec)]
"""Tokenizer of a recipe: vocabulary size of a new tokenizer (a number, also in quotes), or a path or name."""


class HubDataset(Strict):
    """Dataset that Hugging Face's ``datasets`` streams, so that data are downloaded only as they are read."""

    path: str = Field(min_length=1)
    """Name on the Hub (``HuggingFaceFW/fineweb``), or format of local files: ``json``, ``parquet``, ``text``."""
    name: str | None = None
    """Name of the dataset's configuration (``sample-10BT``, ``en``, ``20231101.en``)."""
    split: str = "train"
    """Split of the dataset."""
    text: str = "text"
    """Field that holds the text."""
    data_files: str | tuple[str, ...] | None = None
    """Paths of local files, or of files in the repository; may contain ``*``."""
    revision: str | None = None
    """Commit of the repository; it pins the data."""

    has_held_out_part: ClassVar[bool] = False
    left_out: ClassVar[None] = None

    def identity(self) -> dict[str, Any]:
        """Return the settings of the dataset, and a fingerprint of its files if they are local."""
        return {"dataset": self.model_dump(mode="json"), "files": _files_fingerprint(self)}

    def read(self, part: str, state: Any = None) -> Iterator[tuple[str, Any]]:
        """Yield the texts in the dataset's order, each with the state after it; blank texts are skipped.

        Raises:
            ValueError: The dataset cannot be loaded, or the field of a row is missing or not text.
        """
        assert part == "train"
        # The import takes more than a second.
        from datasets import IterableDataset, load_dataset

        options: dict[str, Any] = self.model_dump(include={"name", "split", "data_files", "revision"})
        if isinstance(self.data_files, tuple):
            options["data_files"] = list(self.data_files)
        try:
            dataset = load_dataset(self.path, **options, streaming=True)
        except Exception as error:
            # Mistakes raise different classes of errors, some without the dataset's name. A pattern that matches no
            # file raises an error without a message.
            reason = str(error) or f"no file matches data_files={self.data_files!r}"
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
    """Genome of any size, read with one record in memory at a time.

    The whole file is validated before use.
    """

    path: str = Field(min_length=1)
    """Path of the FASTA file, plain or compressed."""
    held_out: tuple[str, ...] | None = Field(default=None, min_length=1)
    """Names or patterns (``chr21*``) of held-out records. By default, the first contigs with ``held_out_tokens`` tokens
    in total are held out."""

    @cached_property
    def _file(self) -> FastaFile:
        return FastaFile(self.path)

    @property
    def has_held_out_part(self) -> bool:
        """Whether the settings name held-out records."""
        return bool(self.held_out)

    @property
    def left_out(self) -> str | None:
        """Message about records without a known base; None if there are none.

        Raises:
            FastaError: The file is broken.
        """
        return left_out(str(self._file.path), self._file.summary().left_out)

    def identity(self) -> dict[str, Any]:
        """Return the hash of the file, and the names of held-out records."""
        return {"fasta": self._file.sha256, "held_out": list(self.held_out or ())}

    def read(self, part: str, state: Any = None) -> Iterator[tuple[str, Any]]:
        """Yield the contigs of a part in the file's order, each with the number of contigs read so far.

        Raises:
            FastaError: The file is broken.
            ValueError: A held-out name matches no record with a known base, or the names match all such records.
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
            # A name may contain the special characters of patterns.
            matching = {name for name in known if name == pattern or fnmatchcase(name, pattern)}
            if not matching:
                shown = ", ".join(known[:8]) + (", …" if len(known) > 8 else "")
                raise ValueError(
                    f"data.fasta.held_out: {self._file.path} has no record {pattern!r} with a known base; it has "
                    f"{shown}"
                )
            found |= matching
        if found == set(known):
            raise ValueError(
                f"data.fasta.held_out: all records of {self._file.path} are held out; leave at least one to train on"
            )
        return found


Documents: TypeAlias = Corpus | FastaSettings | HubDataset
"""Source of texts in a fixed order, whose reading can be resumed.

- ``identity()`` returns all inputs that determine the texts, in plain JSON; None stands for an unknown input.
- ``left_out`` is None, or a message about unused files or records.
- ``read(part, state)`` yields the texts of ``held_out`` or ``train``, each with the state after it in plain JSON.
  Reading starts after ``state`` if it is given.
- ``has_held_out_part`` is whether the held-out part is separate. Otherwise, the beginning of ``train`` is held out.
"""


class DataSettings(Strict):
    """Source of the tokens: exactly one of ``text``, ``fasta``, ``dataset``, ``shards``."""

    text: str | None = None
    """Corpus: ``embedded`` (the Python standard library), a text file, a folder of text files, ``package:NAME`` (the
    files of an installed Python package), or a small FASTA file. About 5 % is held out: whole documents, or the end of
    the longest if documents are few and unequal."""
    fasta: FastaSettings | None = None
    dataset: HubDataset | None = None
    shards: str | None = None
    """Folder that ``attention-priors prepare`` wrote."""
    max_tokens: int | None = Field(default=None, gt=0)
    """Largest number of training tokens; the last document is cut. By default, all tokens, and of a dataset as many as
    the training reads. Not allowed with ``shards``."""
    held_out_tokens: int = Field(default=1_000_000, gt=0)
    """Number of held-out tokens, in the first documents of a dataset or of a genome without ``held_out``."""
    shard_tokens: int = Field(default=2**25, gt=0)
    """Size of a file in tokens. The file ends with the document that reaches this size. Not allowed with ``shards``."""
    order: Literal["shuffled", "as_read"] = "shuffled"
    """Order of rows: a permutation for each epoch, drawn from the seed, or the order of the documents."""

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
            why = "the held-out part of a text is fixed"
        elif self.fasta is not None and self.fasta.held_out is not None:
            why = "fasta.held_out names the held-out records"
        else:
            return self
        values = {name: getattr(self, name) for name in idle if name in self.model_fields_set}
        given = [f"{name}={value}" for name, value in values.items() if value is not None]
        if given:
            raise ValueError(f"{why}: remove the settings without an effect, got {' and '.join(given)}")
        return self

    def documents(self) -> Documents:
        """Return the documents to prepare.

        Raises:
            FileNotFoundError: The text does not exist.
            ValueError: The text cannot be read, or the tokens are prepared already.
        """
        documents = self.dataset or self.fasta or (None if self.text is None else load_corpus(self.text))
        if documents is not None:
            return documents
        if not Path(str(self.shards)).is_dir():
            raise FileNotFoundError(f"data.shards: folder {self.shards!r} does not exist")
        raise ValueError(f"data.shards: {self.shards!r} is prepared already; expected a recipe without data.shards")


def _files_fingerprint(source: HubDataset) -> str | None:
    """Return the SHA-256 (64 hex digits) of the names, sizes and ends of a dataset's local files; None without files.

    Large datasets are not read in full, so a change in the middle of a file that keeps its size goes unnoticed.
    """
    folder = Path(source.path)
    patterns = (source.data_files,) if isinstance(source.data_files, str) else source.data_files or ()
    if folder.is_dir():
        patterns = tuple(str(folder / pattern) for pattern in patterns) or (str(folder / "**"),)
    elif "/" in source.path:
        return None  # a repository on the Hub, which `revision` pins
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
