"""Text to train on and to test on: documents, and the split into a training and a held-out part."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from attention_priors.lab.data.document import Document
from attention_priors.lab.data.genomes import FastaFile, is_fasta

EMBEDDED = "embedded"
PACKAGE = "package:"
"""Prefix of the name of an installed Python package whose files, or one file, are the text."""

_HELD_OUT_FRACTION = 0.05
# Of few documents of unlike sizes, whole ones may be nearly all of the text, or nearly nothing.
_HELD_OUT_LEAST, _HELD_OUT_MOST = 0.01, 0.2
# Of the text, what is trained on where a document is cut in two.
_UNCUT_FRACTION = 0.9
_CUT_MIN_CHARACTERS = 1000
_PARAGRAPH_GROUP_CHARACTERS = 2000

# Left out of the standard library: installed packages and tests; `encodings`, whose character tables are
# near copies of each other and would leak from the training part into the held-out one; `pydoc_data`, whose
# topics are documents of their own.
_STDLIB_EXCLUDED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "encodings", "pydoc_data"}
)
# Generated for one machine when Python was built there.
_STDLIB_EXCLUDED_PREFIXES = ("config-", "_sysconfigdata")


@dataclass(frozen=True)
class Corpus:
    """Documents, split into a part to train on and a part to test on.

    Attributes:
        name: Name in reports.
        train: Documents to train on, sorted as they were read.
        held_out: Documents that are never trained on.
        skipped: One line for each file that was not used, as ``"NAME: why"``.
    """

    name: str
    train: tuple[Document, ...]
    held_out: tuple[Document, ...]
    skipped: tuple[str, ...] = ()

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (64 hex digits) over the names and texts of both parts, in order."""
        digest = hashlib.sha256()
        for part, documents in (("train", self.train), ("held_out", self.held_out)):
            for document in documents:
                for field in (part, document.name, document.text):
                    data = field.encode()
                    digest.update(len(data).to_bytes(8, "big") + data)
        return digest.hexdigest()

    # ---- as a source of documents (sources.Documents)

    has_held_out_part: ClassVar[bool] = True

    @property
    def left_out(self) -> str | None:
        """Message about files that are not used."""
        return left_out(self.name, self.skipped)

    def identity(self) -> dict[str, Any]:
        """Return the corpus' name and fingerprint."""
        return {"corpus": self.name, "fingerprint": self.fingerprint}

    def read(self, part: str, state: Any = None) -> Iterator[tuple[str, Any]]:
        """Yield the texts of a part in their order, each with the number of texts up to it."""
        documents = self.train if part == "train" else self.held_out
        for index in range(state or 0, len(documents)):
            yield documents[index].text, index + 1


def left_out(corpus: str, skipped: Sequence[str]) -> str | None:
    """Return a message about files that are not used; None if there is nothing to say.

    Files of installed packages and the standard library that are no text are not meant to be, and need no message.

    Args:
        corpus: name of the corpus.
        skipped: as :attr:`Corpus.skipped`; the first three are named.
    """
    if not skipped or corpus == EMBEDDED or corpus.startswith(PACKAGE):
        return None
    more = f"; and {len(skipped) - 3} more" if len(skipped) > 3 else ""
    return f"left out: {'; '.join(skipped[:3])}{more}"


def load_corpus(source: str | Path, *, max_characters: int | None = None) -> Corpus:
    """Read a corpus and split it, by document, into about 95 % to train on and 5 % held out.

    The split depends on the documents' names and sizes alone, so it is the same on every run and machine. The held-out
    part is 5 % of the documents, by a hash of their names, and at least one. A document that would make it more than
    20 % of the characters is not held out. If the held-out part then has less than 1 % of the characters (one large
    document and some small ones), the end of the longest document is held out instead. That end has about 10 % of all
    characters and begins at a line's end if there is one. Of several documents that are all shorter than 1000
    characters, one is held out whole.

    Args:
        source: One of

            - the string ``"embedded"``: the sources of Python's standard library and the reference prose in
              ``pydoc_data.topics``; needs no network. The text differs between Python versions: record
              ``Corpus.fingerprint`` with every result.
            - a folder: every text file below it, but for hidden ones. Files that are binary (a NUL byte, or
              not UTF-8), blank, or exact copies of an earlier file are listed in ``Corpus.skipped``.
            - ``"package:NAME"``: the folder of an installed Python package, such as ``package:scipy``: another
              text that needs no network; or a file or folder in it, ``package:NAME/PATH``. Record the package's
              version.
            - a text file in UTF-8: its paragraphs, grouped into documents of 2000 characters or more.
            - a FASTA file (:class:`~attention_priors.lab.data.FastaFile`), by its name's end: its contigs.
        max_characters: Size of the training part to keep, in characters; the held-out part is always whole, so
            that what is tested on does not depend on it. Documents are kept in the order of a hash of their names,
            so that what is kept is a fair sample; the last is cut to make the size exact. ``None`` keeps
            everything.

    Raises:
        FileNotFoundError: ``source`` does not exist, or is a package that is not installed.
        ValueError: ``max_characters`` is below 1; the file is empty or binary, or a broken FASTA file; the folder has
            no text file; or its one document is too short to split.
    """
    if max_characters is not None and max_characters < 1:
        raise ValueError(f"max_characters must be at least 1, or None for everything; it is {max_characters}")
    name, documents, skipped = read_documents(source)
    if source != EMBEDDED and _place(source)[1].is_file():
        # Of one text a part is to be held out. Contigs of a FASTA file have no paragraphs, and stay as they are.
        copies: list[str] = []
        documents = tuple(_distinct((part for whole in documents for part in _paragraph_groups(whole)), copies))
        skipped += tuple(copies)
    train, held_out = _split(documents)
    if max_characters is not None and max_characters < _characters(train):
        train = _sample(train, max_characters)
    return Corpus(name, train, held_out, skipped)


def read_documents(source: str | Path) -> tuple[str, tuple[Document, ...], tuple[str, ...]]:
    """Read the documents of a corpus, whole and in order.

    Args:
        source: As for `load_corpus`, except that a text file is one document.

    Returns:
        The corpus' name, its documents, and a line for each file that was not used.

    Raises:
        FileNotFoundError: ``source`` does not exist, or is a package that is not installed.
        ValueError: the file is empty or binary, or a broken FASTA file; the folder has no text file.
    """
    skipped: list[str] = []
    if source == EMBEDDED:
        name, found = EMBEDDED, _embedded_documents(skipped)
    else:
        name, path = _place(source)
        if path.is_dir():
            excluded = ("__pycache__",) if name.startswith(PACKAGE) else ()
            found = _read_files(path, _walk(path, excluded), skipped)
        elif is_fasta(path):
            found = _contigs(path, "", skipped)
        else:
            try:
                found = [Document(path.name, _read_text(path))]
            except ValueError as error:
                raise ValueError(f"source {str(path)!r} cannot be used: {error}") from error
    documents = _distinct(found, skipped)
    if not documents:
        why = f"skipped {'; '.join(skipped[:5])}" if skipped else "it has no files"
        raise ValueError(f"source {str(source)!r} holds no text file ({why})")
    return name, tuple(documents), tuple(skipped)


def _embedded_documents(skipped: list[str]) -> Iterator[Document]:
    root = Path(sysconfig.get_path("stdlib")).resolve()
    found = _walk(root, _STDLIB_EXCLUDED_FOLDERS, _STDLIB_EXCLUDED_PREFIXES)
    # Some systems link files of their own into the standard library's folder.
    sources = [path for path in found if path.suffix == ".py" and path.resolve().is_relative_to(root)]
    yield from _read_files(root, sources, skipped)
    from pydoc_data.topics import topics  # half a million characters: loaded only when they are wanted

    for topic in sorted(topics):
        yield Document(f"pydoc_data.topics/{topic}", topics[topic])


def _place(source: str | Path) -> tuple[str, Path]:
    """Return the name and the path of a file or folder."""
    if str(source).startswith(PACKAGE):
        return str(source), _place_in_package(str(source))
    path = Path(source)
    if source == "" or not path.exists():  # an empty name would be the folder that the program runs in
        raise FileNotFoundError(
            f"source {str(source)!r} does not exist: expected a folder, a text or FASTA file, {EMBEDDED!r}, or "
            f"'{PACKAGE}NAME' of an installed package"
        )
    return path.resolve().name, path


def _place_in_package(source: str) -> Path:
    name, _, inner = source.removeprefix(PACKAGE).partition("/")
    # Of a package within another one, the other would be imported, and run, to find it.
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    if not folders:
        raise FileNotFoundError(f"source {source!r}: expected the name of an installed Python package that is a folder")
    path = Path(folders[0], inner)
    if not path.exists():
        raise FileNotFoundError(f"source {source!r}: the package {name!r} has no {inner!r}")
    return path


def _walk(root: Path, excluded_folders: Iterable[str] = (), excluded_prefixes: tuple[str, ...] = ()) -> list[Path]:
    """List the files below `root`, hidden ones left out, sorted by their path relative to it."""
    prefixes = (".", *excluded_prefixes)
    files = []
    for folder, subfolders, names in os.walk(root, onerror=_raise):
        subfolders[:] = [name for name in subfolders if name not in excluded_folders and not name.startswith(prefixes)]
        files += [path for name in names if not name.startswith(prefixes) and (path := Path(folder, name)).is_file()]
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())


def _raise(error: OSError) -> None:
    raise error  # os.walk would pass over a folder that it cannot list


def _read_files(root: Path, paths: Iterable[Path], skipped: list[str]) -> Iterator[Document]:
    for path in paths:
        # A name on the disk may be no text either; escapes can be written anywhere.
        name = os.fsencode(path.relative_to(root).as_posix()).decode(errors="backslashreplace")
        if is_fasta(path):
            # Its headers and line ends are no text.
            yield from _contigs(path, f"{name}/", skipped)
            continue
        try:
            yield Document(name, _read_text(path))
        except ValueError as error:
            skipped.append(f"{name}: {error}")


def _contigs(path: Path, prefix: str, skipped: list[str]) -> Iterator[Document]:
    genome = FastaFile(path)
    skipped += [f"{prefix}{line}" for line in genome.summary().left_out]
    for _, contig in genome.contigs():
        yield Document(f"{prefix}{contig.name}", contig.text)


def _read_text(path: Path) -> str:
    """Read a text file.

    Raises:
        ValueError: the file is not text; the message says why.
    """
    data = path.read_bytes()
    if b"\0" in data:
        raise ValueError("it is binary (it holds a NUL byte)")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 (byte {error.start})") from error
    if not text.strip():
        raise ValueError("it is empty or blank")
    return text


def _distinct(documents: Iterable[Document], skipped: list[str]) -> list[Document]:
    """Drop exact copies, which could put a training text into the held-out part."""
    first_with: dict[str, Document] = {}
    for document in documents:
        first = first_with.setdefault(document.text, document)
        if first is not document:
            skipped.append(f"{document.name}: it is a copy of {first.name}")
    return list(first_with.values())


def _cut(document: Document, start: int, end: int) -> Document:
    return Document(f"{document.name}[{start}:{end}]", document.text[start:end])


def _paragraph_groups(document: Document) -> list[Document]:
    """Cut at blank lines, into pieces of `_PARAGRAPH_GROUP_CHARACTERS` or more that lose no character."""
    cuts = [0]
    for blank in re.finditer(r"\n\s*\n", document.text):
        if blank.end() - cuts[-1] >= _PARAGRAPH_GROUP_CHARACTERS:
            cuts.append(blank.end())
    size = len(document.text)
    if len(cuts) > 1 and size - cuts[-1] < _PARAGRAPH_GROUP_CHARACTERS:
        cuts.pop()  # too short to stand alone: the last piece goes on to the end
    if len(cuts) == 1:
        return [document]
    return [_cut(document, start, end) for start, end in zip(cuts, [*cuts[1:], size], strict=True)]


def _name_hash(document: Document) -> bytes:
    return hashlib.sha256(document.name.encode()).digest()


def _characters(documents: Iterable[Document]) -> int:
    return sum(len(document.text) for document in documents)


def _split(documents: Sequence[Document]) -> tuple[tuple[Document, ...], tuple[Document, ...]]:
    """Split into training and held-out documents, neither part empty."""
    total = _characters(documents)
    held_out = _held_out(documents, int(_HELD_OUT_MOST * total))
    if _characters(held_out) < _HELD_OUT_LEAST * total:
        longest = max(documents, key=lambda document: len(document.text))
        size = len(longest.text)
        if len(documents) == 1 or size >= _CUT_MIN_CHARACTERS:
            # The end of the longest document, half of it at most.
            kept, rest = _cut_in_two(longest, max(size - (total - int(_UNCUT_FRACTION * total)), size // 2))
            return tuple(kept if document is longest else document for document in documents), (rest,)
        held_out = [min(documents, key=_name_hash)]
    names = {document.name for document in held_out}
    train = tuple(document for document in documents if document.name not in names)
    return train, tuple(document for document in documents if document.name in names)


def _held_out(documents: Sequence[Document], budget: int) -> list[Document]:
    """Choose a share of the documents that fit, at least one, in the order of their hashes."""
    threshold = int(_HELD_OUT_FRACTION * 2**64)
    wanted = max(1, sum(int.from_bytes(_name_hash(document)[:8], "big") < threshold for document in documents))
    chosen: list[Document] = []
    for document in sorted(documents, key=_name_hash):
        if len(chosen) < wanted and len(document.text) <= budget:
            chosen.append(document)
            budget -= len(document.text)
    return chosen


def _cut_in_two(document: Document, target: int) -> tuple[Document, Document]:
    """Cut at the line end that is nearest to `target`, if there is any."""
    size = len(document.text)
    if size < _CUT_MIN_CHARACTERS:
        raise ValueError(
            f"source has one document, {document.name!r}, of {size} characters: too short to split into a "
            f"training and a held-out part (expected {_CUT_MIN_CHARACTERS} or more)"
        )
    first, last = size - len(document.text.lstrip()), len(document.text.rstrip()) - 1  # characters not blank
    line_ends = (line_end.end() for line_end in re.finditer("\n", document.text))
    cuts = [position for position in line_ends if first < position <= last]
    # A genome is one line.
    cut = min(cuts, key=lambda position: abs(position - target)) if cuts else target
    return _cut(document, 0, cut), _cut(document, cut, size)


def _sample(documents: Sequence[Document], budget: int) -> tuple[Document, ...]:
    """Documents in hash order, up to exactly `budget` characters in all, put back in their own order."""
    kept: dict[str, Document] = {}
    for document in sorted(documents, key=_name_hash):
        if budget == 0:
            break
        size = min(budget, len(document.text))
        kept[document.name] = document if size == len(document.text) else _cut(document, 0, size)
        budget -= size
    return tuple(kept[document.name] for document in documents if document.name in kept)
