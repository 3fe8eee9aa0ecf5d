"""Tokens on disk: memory-mapped files with checksums, in which documents are kept apart.

A folder holds, for each of the parts ``train`` and ``held_out``, files ``PART-00000.tokens.npy`` (unsigned integers)
and ``PART-00000.starts.npy`` (where each document begins), the tokenizer, and ``manifest.json``, which is written last:
a file that it does not name is not read. ``datasets`` would keep rows, not documents in one sequence, and no checksums.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from attention_priors._io import checksum, read_json
from attention_priors.lab.data.packing import EpochOrder, packed_row

MANIFEST = "manifest.json"
PARTS = ("held_out", "train")
FORMAT = 1


class ShardError(ValueError):
    """Prepared tokens are damaged or missing. The message names the file."""


@dataclass(frozen=True)
class Shard:
    """One file of tokens and the file of its documents' beginnings: an entry of the manifest."""

    name: str
    tokens: int
    documents: int
    sha256: dict[str, str] = field(default_factory=dict)
    """Checksums of its two files."""
    state: Any = None
    """State of the documents' source after the shard."""

    def paths(self, folder: Path) -> dict[str, Path]:
        """Return its two files."""
        return {kind: folder / f"{self.name}.{kind}.npy" for kind in ("tokens", "starts")}

    def open(self, folder: Path) -> dict[str, np.ndarray]:
        """Map both files into memory, after comparing their checksums.

        Raises:
            ShardError: a file is missing or not what was written.
        """
        arrays = {}
        for kind, path in self.paths(folder).items():
            if not path.is_file():
                raise ShardError(f"{path} is missing; {_CURE}")
            if checksum(path) != self.sha256[kind]:
                raise ShardError(f"{path} is corrupt: its checksum is not the one it was written with; {_CURE}")
            arrays[kind] = np.load(path, mmap_mode="r", allow_pickle=False)
        return arrays


_CURE = "attention-priors prepare makes it, and what follows it, anew"


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of a folder of prepared tokens.

    Raises:
        ShardError: there is none, or it is of another format.
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
    """The tokens of one part, as one long row.

    Args:
        folder: Prepared tokens.
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
        # Processes that read ahead map the files themselves.
        return self.__dict__ | {"_open": {}}

    def window(self, start: int, size: int) -> tuple[Tensor, Tensor]:
        """Return tokens ``start`` to ``start + size`` and the numbers of their documents, both int64, ``(size,)``.

        Raises:
            ShardError: a file that is needed is damaged or missing.
            IndexError: the window ends beyond the tokens.
        """
        stop = start + size
        if not 0 <= start < stop <= len(self):
            raise IndexError(f"tokens {start} to {stop} of {len(self)}")
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


class PackedRows(Dataset[dict[str, Tensor]]):
    """Rows of consecutive tokens, cut from prepared ones; the fields are those of :class:`TrainingMixture`.

    The tokens are cut into blocks of ``context_length``; what is left over at the end is not read. Row ``i`` is
    block ``i`` modulo the number of blocks, or, shuffled, the block that a permutation drawn from the seed and the
    epoch puts there: every block is read once an epoch. So row ``i`` is a function of ``seed`` and ``i`` alone, and
    neither workers nor processes nor interruptions change what is read.

    Args:
        tokens: Prepared tokens, ``context_length`` of them at least.
        context_length: Tokens of a row, at least 2.
        num_rows: Rows of the dataset; there may be more than blocks. All blocks by default.
        seed: Selects the permutations; ``None`` for the tokens' own order.

    Raises:
        ValueError: an argument is outside the range given above.
    """

    def __init__(
        self, tokens: TokenShards, *, context_length: int, num_rows: int | None = None, seed: int | None = None
    ) -> None:
        if context_length < 2:
            raise ValueError(f"context_length must be at least 2 tokens; it is {context_length}")
        if len(tokens) < context_length:
            raise ValueError(
                f"{tokens.folder} has {len(tokens)} tokens in its part {tokens.part!r}: expected at least "
                f"{context_length} (one row)"
            )
        self.blocks = len(tokens) // context_length
        self._rows = self.blocks if num_rows is None else num_rows
        if self._rows < 1:
            raise ValueError(f"num_rows must be at least 1; it is {num_rows}")
        self._tokens = tokens
        self._context_length = context_length
        self._order = None if seed is None else EpochOrder(self.blocks, seed)

    def __len__(self) -> int:
        return self._rows

    @property
    def epochs(self) -> float:
        """Mean number of times that all rows read each block."""
        return self._rows / self.blocks

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < self._rows:
            raise IndexError(f"index must be from 0 to {self._rows - 1}; it is {index}")
        block = index % self.blocks if self._order is None else self._order[index]
        tokens, documents = self._tokens.window(block * self._context_length, self._context_length)
        return packed_row(tokens, documents)
