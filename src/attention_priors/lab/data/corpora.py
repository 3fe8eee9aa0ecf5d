"""Corpora: documents, split into a training and a held-out part."""

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
"""Prefix of a source that is an installed Python package, or a file or folder in it."""

_HELD_OUT_FRACTION = 0.05
# Bounds on the held-out share of characters: with few documents of unequal sizes, 5 % of the documents may be nearly
# all of the text, or nearly nothing.
_HELD_OUT_LEAST, _HELD_OUT_MOST = 0.01, 0.2
# Share of the text that is trained on if a document is cut in two.
_UNCUT_FRACTION = 0.9
_CUT_MIN_CHARACTERS = 1000
_PARAGRAPH_GROUP_CHARACTERS = 2000

# Folders of the standard library that are not read: installed packages and tests; `encodings`, because its character
# tables are near copies of each other and would leak into the held-out part; `pydoc_data`, because each of its topics
# is a separate document.
_STDLIB_EXCLUDED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "encodings", "pydoc_data"}
)
# Files that are generated for one machine when Python is built.
_STDLIB_EXCLUDED_PREFIXES = ("config-", "_sysconfigdata")


@dataclass(frozen=True)
class Corpus:
    """Documents, split into a training and a held-out part.

    Attributes:
        name: Name in reports.
        train: Training documents, in reading order.
        held_out: Documents that are never trained on.
        skipped: One line for each unused file, as ``"NAME: reason"``.
    """

    name: str
    train: tuple[Document, ...]
    held_out: tuple[Document, ...]
    skipped: tuple[str, ...] = ()

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (64 hex digits) of the names and texts of both parts, in order."""
        digest = hashlib.sha256()
        for part, documents in (("train", self.train), ("held_out", self.held_out)):
            for document in documents:
                for field in (part, document.name, document.text):
                    data = field.encode()
                    digest.update(len(data).to_bytes(8, "big") + data)
        return digest.hexdigest()

    # ---- interface of a source of documents (sources.Documents)

    has_held_out_part: ClassVar[bool] = True

    @property
    def left_out(self) -> str | None:
        """Message about unused files; None if there is nothing to report."""
        return left_out(self.name, self.skipped)

    def identity(self) -> dict[str, Any]:
        """Return the name and fingerprint of the corpus."""
        return {"corpus": self.name, "fingerprint": self.fingerprint}

    def read(self, part: str, state: Any = None) -> Iterator[tuple[str, Any]]:
        """Yield the texts of a part in order, each with the number of texts read so far.

        Args:
            part: ``train`` or ``held_out``.
            state: Number of texts to skip; 0 by default.
        """
        documents = self.train if part == "train" else self.held_out
        for index in range(state or 0, len(documents)):
            yield documents[index].text, index + 1


def left_out(corpus: str, skipped: Sequence[str]) -> str | None:
    """Return a message about unused files; None if there is nothing to report.

    Unused files of installed packages and of the standard library are not reported, because many are not text.

    Args:
        corpus: Name of the corpus.
        skipped: Lines of :attr:`Corpus.skipped`; the message has the first three.
    """
    if not skipped or corpus == EMBEDDED or corpus.startswith(PACKAGE):
        return None
    more = f"; and {len(skipped) - 3} more" if len(skipped) > 3 else ""
    return f"left out: {'; '.join(skipped[:3])}{more}"


def load_corpus(source: str | Path, *, max_characters: int | None = None) -> Corpus:
    """Read a corpus and split its documents: about 95 % for training, 5 % held out.

    The split depends only on the names and sizes of the documents, so it is equal in every run and on every machine.
    The held-out part is 5 % of the documents, chosen by a hash of their names, and at least one document. Documents
    that would raise the part above 20 % of the characters are not chosen.

    If the held-out part has less than 1 % of the characters, as with a single large document, the end of the longest
    document is held out instead. This end has about 10 % of all characters and begins after a line end if possible.
    If several documents are all shorter than 1000 characters, one whole document is held out.

    Args:
        source: One of

            - The string ``"embedded"``: the sources of Python's standard library and the reference prose in
              ``pydoc_data.topics``. No network is needed. The text differs between Python versions, so record
              ``Corpus.fingerprint`` with every result.
            - A folder: every text file below it, except hidden files. ``Corpus.skipped`` lists binary files (a NUL
              byte, or not UTF-8), blank files, and exact copies of an earlier file.
            - ``"package:NAME"``: the folder of an installed Python package, such as ``package:scipy``. Name a file or
              folder of the package by ``package:NAME/PATH``. No network is needed. Record the version of the package.
            - A text file in UTF-8: its paragraphs, grouped into documents of at least 2000 characters.
            - A FASTA file (:class:`~attention_priors.lab.data.genomes.FastaFile`), recognised by its file name: its
              contigs.
        max_characters: Size of the training part in characters; ``None`` keeps all documents. Documents are kept in
            the order of a hash of their names, so that the kept part is a fair sample. The last kept document is cut
            to make the size exact. The held-out part does not depend on this argument.

    Raises:
        FileNotFoundError: ``source`` does not exist, or is a package that is not installed.
        ValueError: ``max_characters`` is below 1. Or the file is empty, binary, or a broken FASTA file. Or the folder
            has no text file, or a single document that is too short to split.
    """
    if max_characters is not None and max_characters < 1:
        raise ValueError(f"max_characters must be at least 1, or None for everything; it is {max_characters}")
    name, documents, skipped = read_documents(source)
    if source != EMBEDDED and _place(source)[1].is_file():
        # A text file is grouped into documents so that some can be held out. Contigs have no paragraphs and stay whole.
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
        source: Source as in :func:`load_corpus`, except that a text file is one document.

    Returns:
        The name of the corpus, its documents, and one line for each unused file.

    Raises:
        FileNotFoundError: ``source`` does not exist, or is a package that is not installed.
        ValueError: The file is empty, binary, or a broken FASTA file; or the folder has no text file.
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
    # Some systems link unrelated files into the folder of the standard library.
    sources = [path for path in found if path.suffix == ".py" and path.resolve().is_relative_to(root)]
    yield from _read_files(root, sources, skipped)
    from pydoc_data.topics import topics  # half a million characters, so imported on demand

    for topic in sorted(topics):
        yield Document(f"pydoc_data.topics/{topic}", topics[topic])


def _place(source: str | Path) -> tuple[str, Path]:
    """Return the name and the path of a source that is a file or folder."""
    if str(source).startswith(PACKAGE):
        return str(source), _place_in_package(str(source))
    path = Path(source)
    if source == "" or not path.exists():  # an empty path would mean the working directory
        raise FileNotFoundError(
            f"source {str(source)!r} does not exist: expected a folder, a text or FASTA file, {EMBEDDED!r}, or "
            f"'{PACKAGE}NAME' of an installed package"
        )
    return path.resolve().name, path


def _place_in_package(source: str) -> Path:
    name, _, inner = source.removeprefix(PACKAGE).partition("/")
    # `find_spec` of a subpackage would import, and so run, its parent package.
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    if not folders:
        raise FileNotFoundError(f"source {source!r}: {name!r} is not an installed Python package that is a folder")
    path = Path(folders[0], inner)
    if not path.exists():
        raise FileNotFoundError(f"source {source!r}: the package {name!r} has no {inner!r}")
    return path


def _walk(root: Path, excluded_folders: Iterable[str] = (), excluded_prefixes: tuple[str, ...] = ()) -> list[Path]:
    """List the files below `root`, except hidden files, sorted by relative path."""
    prefixes = (".", *excluded_prefixes)
    files = []
    for folder, subfolders, names in os.walk(root, onerror=_raise):
        subfolders[:] = [name for name in subfolders if name not in excluded_folders and not name.startswith(prefixes)]
        files += [path for name in names if not name.startswith(prefixes) and (path := Path(folder, name)).is_file()]
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())


def _raise(error: OSError) -> None:
    raise error  # by default, os.walk silently skips folders that it cannot list


def _read_files(root: Path, paths: Iterable[Path], skipped: list[str]) -> Iterator[Document]:
    for path in paths:
        # File names may hold undecodable bytes, which are escaped so that they can be printed and encoded.
        name = os.fsencode(path.relative_to(root).as_posix()).decode(errors="backslashreplace")
        if is_fasta(path):
            # Headers and line ends of FASTA files are not part of the sequence.
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
        ValueError: The file is not text; the message names the reason.
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
    """Drop exact copies, because a copy could put a training text into the held-out part."""
    first_with: dict[str, Document] = {}
    for document in documents:
        first = first_with.setdefault(document.text, document)
        if first is not document:
            skipped.append(f"{document.name}: it is a copy of {first.name}")
    return list(first_with.values())


def _cut(document: Document, start: int, end: int) -> Document:
    return Document(f"{document.name}[{start}:{end}]", document.text[start:end])


def _paragraph_groups(document: Document) -> list[Document]:
    """Cut at blank lines into pieces of at least `_PARAGRAPH_GROUP_CHARACTERS` that keep all characters."""
    cuts = [0]
    for blank in re.finditer(r"\n\s*\n", document.text):
        if blank.end() - cuts[-1] >= _PARAGRAPH_GROUP_CHARACTERS:
            cuts.append(blank.end())
    size = len(document.text)
    if len(cuts) > 1 and size - cuts[-1] < _PARAGRAPH_GROUP_CHARACTERS:
        cuts.pop()  # a short last piece is merged with the one before
    if len(cuts) == 1:
        return [document]
    return [_cut(document, start, end) for start, end in zip(cuts, [*cuts[1:], size], strict=True)]


def _name_hash(document: Document) -> bytes:
    return hashlib.sha256(document.name.encode()).digest()


def _characters(documents: Iterable[Document]) -> int:
    return sum(len(document.text) for document in documents)


def _split(documents: Sequence[Document]) -> tuple[tuple[Document, ...], tuple[Document, ...]]:
    """Split into training and held-out documents; neither part is empty."""
    total = _characters(documents)
    held_out = _held_out(documents, int(_HELD_OUT_MOST * total))
    if _characters(held_out) < _HELD_OUT_LEAST * total:
        longest = max(documents, key=lambda document: len(document.text))
        size = len(longest.text)
        if len(documents) == 1 or size >= _CUT_MIN_CHARACTERS:
            # Hold out the end of the longest document, at most half of the document.
            kept, rest = _cut_in_two(longest, max(size - (total - int(_UNCUT_FRACTION * total)), size // 2))
            return tuple(kept if document is longest else document for document in documents), (rest,)
        held_out = [min(documents, key=_name_hash)]
    names = {document.name for document in held_out}
    train = tuple(document for document in documents if document.name not in names)
    return train, tuple(document for document in documents if document.name in names)


def _held_out(documents: Sequence[Document], budget: int) -> list[Document]:
    """Choose the share of documents to hold out, in hash order; documents over the budget of characters are skipped."""
    threshold = int(_HELD_OUT_FRACTION * 2**64)
    wanted = max(1, sum(int.from_bytes(_name_hash(document)[:8], "big") < threshold for document in documents))
    chosen: list[Document] = []
    for document in sorted(documents, key=_name_hash):
        if len(chosen) < wanted and len(document.text) <= budget:
            chosen.append(document)
            budget -= len(document.text)
    return chosen


def _cut_in_two(document: Document, target: int) -> tuple[Document, Document]:
    """Cut at the line end nearest to `target`, or at `target` in a text of a single line."""
    size = len(document.text)
    if size < _CUT_MIN_CHARACTERS:
        raise ValueError(
            f"source has one document, {document.name!r}, of {size} characters: too short to split into a "
            f"training and a held-out part (expected {_CUT_MIN_CHARACTERS} or more)"
        )
    first, last = size - len(document.text.lstrip()), len(document.text.rstrip()) - 1  # first and last non-blank
    line_ends = (line_end.end() for line_end in re.finditer("\n", document.text))
    cuts = [position for position in line_ends if first < position <= last]
    # A contig has no line ends.
    cut = min(cuts, key=lambda position: abs(position - target)) if cuts else target
    return _cut(document, 0, cut), _cut(document, cut, size)


def _sample(documents: Sequence[Document], budget: int) -> tuple[Document, ...]:
    """Keep documents in hash order, exactly `budget` characters in total, and return them in reading order."""
    kept: dict[str, Document] = {}
    for document in sorted(documents, key=_name_hash):
        if budget == 0:
            break
        size = min(budget, len(document.text))
        kept[document.name] = document if size == len(document.text) else _cut(document, 0, size)
        budget -= size
    return tuple(kept[document.name] for document in documents if document.name in kept)
