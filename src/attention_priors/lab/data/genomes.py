"""Genomes: FASTA files, plain or compressed, which are validated in full before use, and their tokenizer."""

from __future__ import annotations

import bz2
import io
import json
import lzma
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from attention_priors._io import checksum
from attention_priors.lab.data.document import END_OF_TEXT, Document, document_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast


SUFFIXES = (".fa", ".fasta", ".fas", ".fsa", ".fna", ".ffn", ".frn")
"""Extensions of FASTA files; an extension of :data:`COMPRESSIONS` may follow."""
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")

GAP = 10
"""Number of consecutive unknown bases that end a contig."""

_AMBIGUOUS = "RYSWKMBDHVN"
"""IUPAC's letters for ambiguous bases."""

_UNKNOWN = re.compile(b"N{%d,}" % GAP)

_STREAMS: dict[bytes, Any] = {b"BZh": bz2.BZ2Decompressor, b"\xfd7zXZ\0": lzma.LZMADecompressor}
"""First bytes of bzip2 and xz files, and their decompressors."""
_BLOCK = 2**16
"""Number of compressed bytes per read."""

_BGZF_END = bytes.fromhex("1f8b08040000000000ff0600424302001b0003000000000000000000")
"""The empty block that ends a BGZF file (SAM specification, section 4.1.2)."""


_BASES = dict(zip("ACGTU" + _AMBIGUOUS, "ACGTT" + "N" * len(_AMBIGUOUS), strict=True))
_BASE_OF = bytes(ord(_BASES.get(chr(byte).upper(), "\0")) for byte in range(256))
"""Base of each byte: A, C, G, T, N, or 0 for a byte that is not a base."""


class FastaError(ValueError):
    """Error of a broken FASTA file. The message names the file, the record and the mistake."""


def is_fasta(path: Path) -> bool:
    """Return whether a file name has an extension of FASTA files, plain or compressed."""
    name = path.name.lower()
    return name.endswith((*SUFFIXES, *(suffix + end for suffix in SUFFIXES for end in COMPRESSIONS)))


@dataclass(frozen=True)
class FastaSummary:
    """Summary of a FASTA file."""

    records: tuple[str, ...]
    """Names of all records, each the first word of a header."""
    contigs: int
    bases: int
    """Number of bases in contigs, including unknown bases in runs that are too short to end a contig."""
    unknown: tuple[str, ...]
    """Names of records without a known base, which have no contig."""

    @property
    def left_out(self) -> list[str]:
        """One line for each record without a known base."""
        return [f"{record}: none of its bases is known" for record in self.unknown]


class FastaFile:
    """FASTA file whose contigs are documents in upper case.

    Bases are A, C, G, T and N. Lower case, which marks repeats ("soft-masked"), becomes upper case. U becomes T, and
    IUPAC's ambiguous letters (R, Y, S, W, K, M, B, D, H, V) become N. A run of 10 or more N is a gap: it is left out
    and separates two contigs. Contigs are named like samtools regions, ``chr1:10001-177417``, with the first and the
    last base counted from 1.

    Truncation exactly between two parts of a file of several compressed parts (``cat a.gz b.gz``) cannot be detected.
    For bgzip files it is detected, because their end-of-file block is required.

    Args:
        path: Path of the file, plain or compressed (gzip including bgzip's BGZF, bzip2, xz, Zstandard).

    Raises:
        FileNotFoundError: The file does not exist.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise FileNotFoundError(f"FASTA file {str(path)!r} does not exist")
        self._summary: FastaSummary | None = None
        self._state = self._state_now()

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of the file, without decompression."""
        return checksum(self.path)

    def summary(self) -> FastaSummary:
        """Read the whole file on the first call, and return its summary.

        Raises:
            FastaError: The file is broken, truncated or empty; or a record lacks a name or a sequence, has a duplicate
                name, or has a character that is not a nucleotide.
        """
        if self._summary is None:
            if _lacks_bgzf_end(self.path):
                raise FastaError(
                    f"{self.path} is truncated: it is a BGZF file without an end-of-file block; expected the complete "
                    "output of bgzip"
                )
            names, contigs, bases, unknown = [], 0, 0, []
            for name, sequence in self._records():
                spans = list(_contig_spans(sequence))
                names.append(name)
                contigs += len(spans)
                bases += sum(end - start for start, end in spans)
                if not spans:
                    unknown.append(name)
            if not contigs:
                raise FastaError(f"{self.path}: no record has a known base" if names else f"{self.path}: no records")
            self._summary = FastaSummary(tuple(names), contigs, bases, tuple(unknown))
        return self._summary

    def contigs(self) -> Iterator[tuple[str, Document]]:
        """Yield the record name and the document of each contig, in the file's order, after validating the file.

        Raises:
            FastaError: The file is broken (see :meth:`summary`).
        """
        self.summary()
        for name, sequence in self._records():
            for start, end in _contig_spans(sequence):
                yield name, Document(f"{name}:{start + 1}-{end}", sequence[start:end].decode())

    def _records(self) -> Iterator[tuple[str, bytes]]:
        """Yield names and sequences; sequences consist of A, C, G, T and N."""
        # Only genomes need dnaio.
        import dnaio

        names: set[str] = set()
        last = "at its beginning"
        try:
            with dnaio.open(self.path, fileformat="fasta", opener=_opened) as reader:
                for number, record in enumerate(reader, start=1):
                    name = record.name.split(maxsplit=1)[0] if record.name.strip() else ""
                    place = f"{self.path}: record {name!r}" if name else f"{self.path}: record number {number}"
                    if not name:
                        raise FastaError(f"{place} has no name after its '>'")
                    if name in names:
                        raise FastaError(f"{place} is a duplicate: expected distinct names")
                    names.add(name)
                    bases = _bases(place, record.sequence)
                    self._check_unchanged()
                    yield name, bases
                    last = f"after record {name!r}"
        except FastaError:
            raise
        except Exception as error:
            # Errors of decompressors have no common base class.
            raise FastaError(f"{self.path} cannot be read further {last}: {error}") from error
        self._check_unchanged()

    def _state_now(self) -> tuple[int, int, int]:
        status = self.path.stat()
        return status.st_ino, status.st_size, status.st_mtime_ns

    def _check_unchanged(self) -> None:
        """Check that the file is unchanged since this object was made."""
        if self._state_now() != self._state:
            raise FastaError(f"{self.path} has changed while it was being read; expected a file that stays unchanged")


def _opened(path: str, mode: Literal["rb"]) -> BinaryIO:
    """Open a file for reading its decompressed bytes."""
    from xopen import xopen

    with open(path, "rb") as file:
        head = file.read(6)
    for magic, decompressor in _STREAMS.items():
        if head.startswith(magic):
            return io.BufferedReader(_Streams(Path(path), decompressor))
    return xopen(path, mode, threads=0)


class _Streams(io.RawIOBase):
    """Reader of the decompressed bytes of all streams of a bzip2 or xz file, which raises an error if one is damaged.

    Python's readers, and so xopen, treat a damaged stream or other bytes after a complete stream as the end of the
    file.
    """

    def __init__(self, path: Path, decompressor: Any) -> None:
        self._file = path.open("rb")
        self._new = decompressor
        self._stream = decompressor()
        # xz allows zero padding after a stream.
        self._padding = b"\0" if decompressor is lzma.LZMADecompressor else b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = b""
        while not data:
            block = b""
            if self._stream.eof:
                blocks = chain([self._stream.unused_data], iter(partial(self._file.read, _BLOCK), b""))
                block = next(filter(None, (block.lstrip(self._padding) for block in blocks)), None)
                if block is None:
                    return 0
                self._stream = self._new()
            elif self._stream.needs_input:
                block = self._file.read(_BLOCK)
                if not block:
                    raise EOFError("Compressed file ended before the end-of-stream marker was reached")
            data = self._stream.decompress(block, len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._file.close()
        super().close()


def _lacks_bgzf_end(path: Path) -> bool:
    """Return whether a file is BGZF (blocked gzip) and lacks the block that marks the end of the file."""
    with path.open("rb") as file:
        head = file.read(12)
        has_extra_fields = len(head) == 12 and head.startswith(b"\x1f\x8b") and head[3] & 4
        fields = file.read(int.from_bytes(head[10:], "little")) if has_extra_fields else b""
        while fields and not fields.startswith(b"BC\x02\x00"):
            fields = fields[4 + int.from_bytes(fields[2:4], "little") :]
        if not fields:
            return False
        file.seek(max(0, path.stat().st_size - len(_BGZF_END)))
        return file.read() != _BGZF_END


def _bases(place: str, sequence: str) -> bytes:
    if not sequence:
        raise FastaError(f"{place} has no sequence")
    folded = sequence.encode("ascii").translate(_BASE_OF)
    wrong = folded.find(0)
    if wrong >= 0:
        raise FastaError(
            f"{place} has {sequence[wrong]!r} at base {wrong + 1} of {len(sequence)}: expected nucleotides "
            f"(A, C, G, T, U, N and IUPAC's {_AMBIGUOUS[:-1]}, of either case)"
        )
    return folded


def _contig_spans(sequence: bytes) -> Iterator[tuple[int, int]]:
    start = 0
    for gap in _UNKNOWN.finditer(sequence):
        if gap.start() > start:
            yield start, gap.start()
        start = gap.end()
    if start < len(sequence) and sequence.count(b"N", start) < len(sequence) - start:
        yield start, len(sequence)


NUCLEOTIDES = "nucleotides"
"""Name of :func:`nucleotide_tokenizer` in recipes."""

BASES = "ACGT"
UNKNOWN_BASE = "N"


def nucleotide_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of six tokens: ``<|endoftext|>``, A, C, G, T, and N for every other character.

    Lower case is read as upper case, and U as T. Decoding restores the text except for these replacements.
    ``<|endoftext|>`` begins, ends and pads sequences.
    """
    return document_tokenizer(_backend())


def is_nucleotide_tokenizer(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether a tokenizer gives every text the same tokens as :func:`nucleotide_tokenizer`."""
    backend: Tokenizer | None = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.get_vocab_size() != _backend().get_vocab_size():
        return False  # fast path: serialising a large tokenizer takes a second
    return _meaning(backend) == _meaning(_backend())


def encode_nucleotides(texts: Sequence[str]) -> list[np.ndarray]:
    """Return the tokens of each text in uint8, as ``nucleotide_tokenizer()`` does but a hundred times as fast.

    Chromosomes have hundreds of millions of bases.
    """
    table = _token_of_byte()
    return [table[np.frombuffer(text.encode("ascii", "replace"), dtype=np.uint8)] for text in texts]


def check_nucleotides(text: str) -> None:
    """Check that a text consists of bases, because the tokenizer would read any other text as bases too.

    Raises:
        ValueError: Fewer than half of the first 4096 characters are A, C, G, T, U or N, of either case. Or these
            characters include a FASTA header or line ends, which would be read as bases.
    """
    beginning = text[:4096]
    reads_bases = f"the tokenizer {NUCLEOTIDES!r} reads bases"
    expected = (
        f"expected a file that is read as FASTA, whose name ends with {', '.join(SUFFIXES)} (and .gz or another "
        "compression)"
    )
    header = re.search(r"^>.*", beginning, re.MULTILINE)
    if header is not None:
        raise ValueError(f"{reads_bases}, and the text holds a header of FASTA, {header[0][:40]!r}: {expected}")
    if "\n" in beginning.rstrip():
        raise ValueError(f"{reads_bases}, and the text holds line ends, which would be read as N: {expected}")
    known = sum(map(beginning.upper().count, "ACGTUN"))
    if known < len(beginning) / 2:
        raise ValueError(
            f"{reads_bases}, but only {100 * known / len(beginning):.0f} % of the text's first {len(beginning)} "
            f"characters are bases; they begin {beginning[:40]!r}: expected a genome, such as a FASTA file"
        )


@cache
def _token_of_byte() -> np.ndarray:
    return np.array([_backend().encode(chr(byte)).ids[0] for byte in range(128)], dtype=np.uint8)


@cache
def _backend() -> Tokenizer:
    tokens = [END_OF_TEXT, *BASES, UNKNOWN_BASE]
    tokenizer = Tokenizer(models.WordLevel({token: index for index, token in enumerate(tokens)}, UNKNOWN_BASE))
    letters = {**{base.lower(): base for base in BASES}, "u": "T", "U": "T"}
    tokenizer.normalizer = normalizers.Sequence([normalizers.Replace(*pair) for pair in letters.items()])
    # One token for each character, including line ends.
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([END_OF_TEXT])
    return tokenizer


def _meaning(tokenizer: Tokenizer) -> dict[str, object]:
    """Return the parts of a tokenizer that determine the tokens of a text: all except padding and truncation."""
    content = json.loads(tokenizer.to_str())
    return {part: content[part] for part in ("added_tokens", "normalizer", "pre_tokenizer", "model")}
