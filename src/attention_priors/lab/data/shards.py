"""Tokens on disk: memory-mapped shards with checksums and document boundaries.

A folder holds the tokenizer, ``manifest.json``, and the shards of the parts ``train`` and ``held_out``. A shard has two
files: ``PART-00000.tokens.npy`` (unsigned integers) and ``PART-00000.starts.npy`` (index of each document's first
token). The manifest is written last; files that it does not name are not read.

Hugging Face's ``datasets`` stores rows instead of one sequence of documents, and no checksums.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attention_priors._io import checksum, read_json
from attention_priors.lab.data.packing import EpochOrder, Rows, packed_row

MANIFEST = "manifest.json"
PARTS = ("held_out", "train")
FORMAT = 1


class ShardError(ValueError):
    """Error of damaged or missing prepared tokens. The message names the file."""


@dataclass(frozen=True)
class Shard:
    """Manifest entry of a file of tokens and the file of its document starts."""

    name: str
    tokens: int
    documents: int
    sha256: dict[str, str] = field(default_factory=dict)
    """Checksums of the two files, by kind: ``tokens`` and ``starts``."""
    state: Any = None
    """State of the documents' source after the shard."""

    def paths(self, folder: Path) -> dict[str, Path]:
        """Return the paths of the two files, by kind."""
        return {kind: folder / f"{self.name}.{kind}.npy" for kind in ("tokens", "starts")}

    def open(self, folder: Path) -> dict[str, np.ndarray]:
        """Check both files against their checksums and map them into memory.

        Raises:
            ShardError: A file is missing or damaged.
        """
        arrays = {}
        for kind, path in self.paths(folder).items():
            if not path.is_file():
                raise ShardError(f"{path} is missing; {_CURE}")
            if checksum(path) != self.sha256[kind]:
                raise ShardError(f"{path} is corrupt: its checksum does not match the manifest; {_CURE}")
            arrays[kind] = np.load(path, mmap_mode="r", allow_pickle=False)
        return arrays


_CURE = "run attention-priors prepare to make it and the later shards again"


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of a folder of prepared tokens.

    Raises:
        ShardError: The manifest is missing or has another format.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise ShardError(f"{folder} holds no prepared tokens: {path} is missing")
    manifest = read_json(path)
    if manifest.get("format") != FORMAT:
        raise ShardError(f"{path} has format {manifest.get('format')!r}, expected {FORMAT}")
    return manifest


def shards_of(manifest: dict[str, Any], part: str) -> list[Shard]:
    """Return the shards of a part, in order."""
    return [Shard(**entry) for entry in manifest["parts"][part]]


class TokenShards:
    """Prepared tokens of one part, as one sequence over all shards.

    Args:
        folder: Folder of prepared tokens.
        part: ``train`` or ``held_out``.

    Raises:
        ShardError: ``folder`` holds no prepared tokens, the preparation has not finished, or the part is empty.
    """

    def __init__(self, folder: Path, part: str = "train") -> None:
        manifest = read_manifest(folder)
        if not manifest["complete"]:
            raise ShardError(f"the tokens in {folder} are not all prepared; run attention-priors prepare")
        self.folder, self.part = folder, part
        self.shards = shards_of(manifest, part)
        if not self.shards:
            raise ShardError(f"{folder} has no tokens in its part {part!r}")
        self._starts = np.cumsum([0, *(shard.tokens for shard in self.shards)]).tolist()
        self._documents_before = np.cumsum([0, *(shard.documents for shard in self.shards)]).tolist()
        self._open: dict[int, dict[str, np.ndarray]] = {}

    def __len__(self) -> int:
        return self._starts[-1]

    def __getstate__(self) -> dict[str, Any]:
        # Worker processes of a DataLoader map the files themselves.
        return self.__dict__ | {"_open": {}}

    def window(self, start: int, size: int) -> tuple[Tensor, Tensor]:
        """Return tokens ``start`` to ``start + size`` and their document ids, both int64, shape ``(size,)``.

        Raises:
            ShardError: A file is damaged or missing.
            IndexError: The window is empty or ends beyond the last token.
        """
        stop = start + size
        if not 0 <= start < stop <= len(self):
            raise IndexError(f"window {start} to {stop} is out of range; the part has {len(self)} tokens")
        tokens, documents = [], []
        for index in range(bisect_right(self._starts, start) - 1, bisect_right(self._starts, stop - 1)):
            arrays, first = self._arrays(index), self._starts[index]
            places = np.arange(max(start, first), min(stop, self._starts[index + 1])) - first
            tokens.append(arrays["tokens"][places[0] : places[-1] + 1].astype(np.int64))
            documents.append(
                np.searchsorted(arrays["starts"], places, side="right") - 1 + self._documents_before[index]
            )
        return torch.from_numpy(np.concatenate(tokens)), torch.from_numpy(np.concatenate(documents))

    def _arrays(self, index: int) -> dict[str, np.ndarray]:
        if index not in self._open:
            self._open[index] = self.shards[index].open(self.folder)
        return self._open[index]


class PackedRows(Rows):
    """Dataset of rows of consecutive prepared tokens, with the fields of :class:`TrainingMixture`.

    The tokens are cut into blocks of ``context_length``; a remainder at the end is not read. Without a seed, row ``i``
    is block ``i`` modulo the number of blocks. With a seed, each epoch reads every block once, in an order drawn from
    the seed and the epoch. Row ``i`` depends only on ``seed`` and ``i``, so workers, processes and interruptions do not
    change the rows.

    Args:
        tokens: Prepared tokens, at least ``context_length``.
        context_length: Number of tokens per row, at least 2.
        num_rows: Number of rows, which may exceed the number of blocks. The default is one row per block.
        seed: Seed of the shuffled order; ``None`` for the order of the tokens.

    Raises:
        ValueError: An argument is out of range.
    """

    def __init__(
        self, tokens: TokenShards, *, context_length: int, num_rows: int | None = None, seed: int | None = None
    ) -> None:
        super().__init__(context_length, 1 if num_rows is None else num_rows)
        self.blocks = len(tokens) // context_length
        if num_rows is None:
            self._num_rows = self.blocks
        if not self.blocks:
            raise ValueError(
                f"{tokens.folder} has {len(tokens)} tokens in its part {tokens.part!r}: expected at least "
                f"{context_length} (one row)"
            )
        self._tokens = tokens
        self._order = None if seed is None else EpochOrder(self.blocks, seed)

    @property
    def epochs(self) -> float:
        """Number of epochs: the number of rows divided by the number of blocks."""
        return len(self) / self.blocks

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self._check(index)
        block = index % self.blocks if self._order is None else self._order[index]
        tokens, documents = self._tokens.window(block * self._context_length, self._context_length)
        return packed_row(tokens, documents)
