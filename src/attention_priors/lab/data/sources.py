"""Documents one after another, from a place that can be gone back to."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from glob import glob
from pathlib import Path
from typing import Any, Protocol

from attention_priors.lab.data.corpora import Corpus, left_out
from attention_priors.lab.data.fasta import FastaFile
from attention_priors.lab.data.settings import FastaSettings, HubDataset

_ENDS = 2**20
"""Bytes of each end of a file that are looked at to tell it from others."""


@dataclass(frozen=True)
class Place:
    """A text, and where to go on after it."""

    text: str
    state: Any
    """Plain JSON."""


class Documents(Protocol):
    """Texts in an order that is always the same."""

    def identity(self) -> dict[str, Any]:
        """What determines the texts; plain JSON. What cannot be known is None."""
        ...

    @property
    def left_out(self) -> str | None:
        """What a user should know of files or records that are not used (:func:`left_out`)."""
        ...

    def read(self, part: str, state: Any = None) -> Iterator[Place]:
        """Texts of a part, ``held_out`` or ``train``, from the start or after a :attr:`Place.state`."""
        ...

    @property
    def has_held_out_part(self) -> bool:
        """Whether what is held out is a part of its own; else it is the beginning of ``train``."""
        ...


@dataclass(frozen=True)
class CorpusDocuments:
    """The documents of a corpus, which is split already."""

    corpus: Corpus
    has_held_out_part: bool = True

    @property
    def left_out(self) -> str | None:
        """Of the corpus' files."""
        return left_out(self.corpus.name, self.corpus.skipped)

    def identity(self) -> dict[str, Any]:
        """The corpus and its fingerprint."""
        return {"corpus": self.corpus.name, "fingerprint": self.corpus.fingerprint}

    def read(self, part: str, state: Any = None) -> Iterator[Place]:
        """Texts in the corpus' order."""
        documents = self.corpus.train if part == "train" else self.corpus.held_out
        for index in range(state or 0, len(documents)):
            yield Place(documents[index].text, index + 1)


class FastaDocuments:
    """The contigs of a FASTA file, one record in memory at a time; all of it is read once before anything is used.

    Raises:
        FileNotFoundError: there is no such file.
    """

    def __init__(self, settings: FastaSettings) -> None:
        self._settings = settings
        self._file = FastaFile(settings.path)

    @property
    def has_held_out_part(self) -> bool:
        """Whether records are named that are held out."""
        return bool(self._settings.held_out)

    @property
    def left_out(self) -> str | None:
        """Records without a known base.

        Raises:
            FastaError: the file is broken.
        """
        return left_out(str(self._file.path), self._file.summary().left_out)

    def identity(self) -> dict[str, Any]:
        """The file's hash, and which records are held out."""
        return {"fasta": self._file.sha256, "held_out": list(self._settings.held_out or ())}

    def read(self, part: str, state: Any = None) -> Iterator[Place]:
        """Contigs in the file's order.

        Raises:
            FastaError: the file is broken.
            ValueError: it has no record with a known base of a name that is to be held out, or no other.
        """
        held_out = self._held_out()
        chosen = (contig for record, contig in self._file.contigs() if (record in held_out) == (part == "held_out"))
        for number, contig in enumerate(chosen, start=1):
            if number > (state or 0):
                yield Place(contig.text, number)

    def _held_out(self) -> frozenset[str]:
        summary = self._file.summary()
        known = [name for name in summary.records if name not in summary.unknown]
        found: set[str] = set()
        for pattern in self._settings.held_out or ():
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
        return frozenset(found)


@dataclass(frozen=True)
class HubDocuments:
    """A Hugging Face dataset, streamed: nothing is downloaded before it is read."""

    settings: HubDataset
    has_held_out_part: bool = False
    left_out: str | None = None

    def identity(self) -> dict[str, Any]:
        """The dataset's description, and what tells its files from others, where they are on this machine."""
        return {"dataset": self.settings.model_dump(mode="json"), "files": _files_fingerprint(self.settings)}

    def read(self, part: str, state: Any = None) -> Iterator[Place]:
        """Texts in the dataset's own order; blank ones are left out.

        Raises:
            ValueError: the dataset cannot be loaded, or a row has no such field, or another thing than text in it.
        """
        assert part == "train"
        # It takes more than a second to import.
        from datasets import IterableDataset, load_dataset

        source = self.settings
        files = list(source.data_files) if isinstance(source.data_files, tuple) else source.data_files
        try:
            dataset = load_dataset(
                source.path,
                name=source.name,
                split=source.split,
                data_files=files,
                revision=source.revision,
                streaming=True,
            )
        except Exception as error:
            # What is raised, and whether it names the dataset, depends on what is wrong.
            # Of a pattern that matches nothing it says nothing.
            reason = str(error) or f"no file is found with data_files={source.data_files!r}"
            raise ValueError(f"data.dataset: {source.path!r} cannot be loaded: {reason}") from error
        assert isinstance(dataset, IterableDataset)
        if state is not None:
            dataset.load_state_dict(state)
        for row in dataset:
            text = row.get(source.text)
            if not isinstance(text, str):
                raise ValueError(
                    f"data.dataset.text: a row of {source.path!r} has {type(text).__name__} under {source.text!r}, "
                    f"not text; its fields are {', '.join(row)}"
                )
            if text.strip():
                yield Place(text, dataset.state_dict())


def _files_fingerprint(source: HubDataset) -> str | None:
    """SHA-256 (64 hex digits) of the names, sizes, beginnings and ends of a dataset's local files; None without any.

    All of a large dataset is not read for it: what changes neither its size nor its ends is not noticed.
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
        digest.update(f"{os.path.basename(path)}\0{os.path.getsize(path)}\0".encode(errors="surrogateescape"))
        with open(path, "rb") as file:
            digest.update(file.read(_ENDS))
            file.seek(max(0, os.path.getsize(path) - _ENDS))
            digest.update(file.read(_ENDS))
    return digest.hexdigest() if found else None
