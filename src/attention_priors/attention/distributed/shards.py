"""Distribution of the tokens of a sequence over processes, and the plan of which shards each process reads."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from attention_priors.attention.geometry import positions_in_documents
from attention_priors.attention.operator import geometry_from
from attention_priors.attention.problem import Options
from attention_priors.checks import check_choice, check_positive_integers
from attention_priors.priors.base import check_positions

Layout = Literal["zigzag", "contiguous"]


def shard_index(length: int, rank: int, size: int, layout: Layout = "zigzag") -> Tensor:
    """Return the places of one process's tokens in a sequence, in ascending order.

    ``contiguous`` cuts the sequence into ``size`` runs; process ``r`` holds run ``r``. Under a causal mask, the last
    process then has ``2 size - 1`` times the work of the first process, and all processes wait for it. ``zigzag`` cuts
    the sequence into ``2 size`` runs; process ``r`` holds runs ``r`` and ``2 size - 1 - r``, which balances the work.

    Args:
        length: Length of the sequence in tokens, at least one per run. Lengths of runs differ by at most one token.
        rank: Rank of the process in its group.
        size: Number of processes in the group.
        layout: ``zigzag`` for causal attention, ``contiguous`` for bidirectional attention and windows.

    Returns:
        Places, int64, shape ``(L_r,)``.

    Raises:
        ValueError: An argument is out of range.
    """
    check_positive_integers(length=length, size=size)
    check_choice("layout", layout, get_args(Layout))
    if not 0 <= rank < size:
        raise ValueError(f"rank must be from 0 to {size - 1} (size - 1), got {rank!r}")
    number = size if layout == "contiguous" else 2 * size
    if length < number:
        raise ValueError(f"length must be at least {number}, a token for each run of the {layout} layout, got {length}")
    runs = torch.arange(length).tensor_split(number)
    return runs[rank] if layout == "contiguous" else torch.cat([runs[rank], runs[number - 1 - rank]])


class Run(NamedTuple):
    """Tokens that are consecutive both in the sequence and in the shard of a process."""

    start: int
    """Slot of the first token in the shard."""
    first: int
    """Place of the first token in the sequence."""
    length: int
    documents: list[set[int]]
    """Documents of the tokens in each example of the batch."""
    visible_documents: list[set[int]]
    """Documents of the non-padding tokens in each example of the batch."""

    @property
    def last(self) -> int:
        """Place after the last token."""
        return self.first + self.length

    @property
    def slots(self) -> slice:
        """Slots of the tokens in the shard."""
        return slice(self.start, self.start + self.length)


class Piece(NamedTuple):
    """Queries and keys of one call of attention. Documents hide no keys, except if ``own`` is true."""

    batches: slice
    rows: slice | Tensor
    """Slots of the queries in the reader's shard."""
    keys: slice | Tensor
    """Slots of the keys in the owner's shard."""
    own: bool = False
    """Whether queries and keys belong to the same tokens."""


class Plan(NamedTuple):
    """Computations of one process, and travel distances of all shards."""

    pieces: list[list[Piece]]
    """Pieces of each owner of keys."""
    hops: list[int]
    """Number of processes after its owner to which each shard travels."""


class ShardedSequence:
    """Places, documents and padding of a batch of sequences whose tokens are distributed over processes.

    The constructor is a collective operation, which all processes of the group must call. An instance can serve all
    layers of a model, forward and backward. Every process stores the positions, documents and padding of all tokens,
    at most 17 bytes per token. Queries, keys and values stay in their processes.

    Args:
        index: Place of each token of this process in the whole sequence, integers of shape ``(L_r,)``. Over all
            processes, each place from 0 on occurs once. Each run of consecutive places is a separate call of
            attention. Layouts of :func:`shard_index` have one or two runs.
        group: Process group. None is the group of all processes.
        document_ids: Document of each token, integers of shape ``(B, L_r)``. Packed documents do not see each other.
            Contiguous documents add no cost. Tokens of interleaved documents are gathered document by document.
        key_padding_mask: Boolean, shape ``(B, L_r)``. True marks padding, which no query sees.
        positions: Integers of shape ``(L_r,)`` or ``(B, L_r)``, for encodings and for priors that depend on more than
            distances. The default is the place in the sequence, or in the document. Positions must rise by one from
            token to token of a document.

    Raises:
        ValueError: The arguments of a process are invalid or incompatible with other processes. All processes raise an
            error.
        RuntimeError: torch.distributed is not initialised, or another process does not respond.
    """

    length: int
    """Length of the whole sequence in tokens."""

    def __init__(
        self,
        index: Tensor,
        *,
        group: dist.ProcessGroup | None = None,
        document_ids: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(
                "torch.distributed is not initialised; start the program with torchrun and call torch.distributed."
                "init_process_group() first"
            )
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        given = {"document_ids": document_ids, "key_padding_mask": key_padding_mask, "positions": positions}

        def check() -> dict[str, Any]:
            _check(index, given)
            return {name: None if x is None else x.detach().cpu() for name, x in {"index": index, **given}.items()}

        every = self.exchange("ShardedSequence", check)
        places = [found["index"] for found in every]
        self.device = index.device
        self.lengths = [len(place) for place in places]
        self.length = sum(self.lengths)
        order = torch.cat(places)
        if not torch.equal(order.sort().values, torch.arange(self.length)):
            raise ValueError(
                f"index: over all {self.size} processes, each place from 0 to {self.length - 1} must occur once; they "
                f"hold {order.unique().numel()} distinct places, from {int(order.min())} to {int(order.max())}"
            )
        whole = {name: _join([found[name] for found in every], order, name) for name in given}
        batches = {len(x) for x in whole.values() if x is not None and len(x) > 1}
        if len(batches) > 1:
            raise ValueError(f"document_ids, key_padding_mask and positions must have equal batch sizes, got {batches}")
        self.batch = batches.pop() if batches else 1
        """Batch size of documents, padding and positions; 1 if all examples share them or there are none."""
        documents, padding = whole["document_ids"], whole["key_padding_mask"]
        self._has_documents = documents is not None
        # Without documents, all tokens belong to document 0.
        self._documents = torch.zeros(1, self.length, dtype=torch.int64) if documents is None else documents
        self._padding = (
            torch.zeros(1, self.length, dtype=torch.bool) if padding is None or not padding.any() else padding
        )
        self._positions = self._whole_positions(whole["positions"])
        self._places = places
        self._runs = [self._find_runs(place) for place in places]
        self._plans: dict[Any, Plan] = {}
        self._visible_keys: dict[bool, Tensor] = {}

    def exchange(self, what: str, check: Callable[[], Any]) -> list[Any]:
        """Return the results of ``check()`` in all processes of the group. This is a collective operation.

        An error of this process's ``check`` is raised unchanged.

        Raises:
            ValueError: ``check`` raised an error in another process.
            RuntimeError: Another process does not respond.
        """
        mine, error = {}, None
        try:
            mine = check()
        except Exception as refused:  # any error, because the other processes must not wait for this process
            error = refused
        every: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(every, (mine, None if error is None else str(error)), group=self.group)
        except RuntimeError as failed:
            raise RuntimeError(
                f"{what}: process {self.rank} of {self.size} got no answer from another process of its group, which "
                "has stopped or did not make the same call"
            ) from failed
        if error is not None:
            raise error
        for rank, (_, message) in enumerate(every):
            if message is not None:
                raise ValueError(f"{what}: process {rank} of the group refused its arguments: {message}")
        return [found for found, _ in every]

    # ---- data of all tokens

    def _whole_positions(self, given: Tensor | None) -> Tensor:
        """Return the position of each place, ``(1 or B, N)``."""
        if given is None:
            return positions_in_documents(self._documents) if self._has_documents else torch.arange(self.length)[None]
        documents, positions = torch.broadcast_tensors(self._documents, given.long())
        order = documents.argsort(dim=-1, stable=True)
        rises, starts = positions.gather(1, order).diff() == 1, documents.gather(1, order).diff() != 0
        if not bool((rises | starts).all()):
            raise ValueError("positions must rise by one from token to token of the sequence, or of each document")
        return given

    def _find_runs(self, places: Tensor) -> list[Run]:
        """Split the places of one process into runs."""
        cuts = (places.diff() != 1).nonzero().flatten() + 1
        runs = []
        for start, run in zip([0, *cuts.tolist()], places.tensor_split(cuts), strict=True):
            first, last = int(run[0]), int(run[-1]) + 1
            ids, padded = (x[:, first:last].expand(self.batch, -1) for x in (self._documents, self._padding))
            documents = [set(own.unique().tolist()) for own in ids]
            visible = [set(own[~hidden].unique().tolist()) for own, hidden in zip(ids, padded, strict=True)]
            runs.append(Run(start, first, last - first, documents, visible))
        return runs

    @cached_property
    def positions(self) -> Tensor:
        """Positions of this process's tokens, shape ``(1 or B, L_r)``."""
        return self._positions[:, self._places[self.rank]].to(self.device)

    def keys_of(self, owner: int, piece: Piece, batch: int) -> Options:
        """Return the arguments of :func:`attend` for the positions, documents and padding of a piece's keys.

        Documents are None unless ``piece.own``, because documents hide no keys of other pieces.
        Padding is None if the piece has no padding.

        Args:
            owner: Process that owns the keys.
            piece: Queries and keys.
            batch: Number of examples in the piece.
        """

        def cut(whole: Tensor) -> Tensor:
            part = whole[piece.batches] if len(whole) > 1 else whole
            return part[:, self._places[owner][piece.keys]]

        padding = cut(self._padding)
        return {
            "key_positions": cut(self._positions),
            "document_ids": cut(self._documents).expand(batch, -1) if piece.own and self._has_documents else None,
            "key_padding_mask": padding.expand(batch, -1) if bool(padding.any()) else None,
        }

    def visible_keys(self, causal: bool) -> Tensor:
        """Return each query's number of visible keys in the whole sequence, shape ``(1 or B, 1, L_r)``."""
        if causal not in self._visible_keys:
            documents, padding = torch.broadcast_tensors(self._documents, self._padding)
            # Sort interleaved documents, so that the visible keys of each query are contiguous.
            order = documents.argsort(dim=-1, stable=True)
            documents = documents.gather(1, order)
            sizes, masks = (len(documents), 1, self.length, self.length), (documents, padding.gather(1, order), None)
            geometry = geometry_from(sizes, documents.device, (None, None, *masks, causal))
            counts = torch.empty_like(order).scatter_(1, order, geometry.visible_keys.squeeze(1))
            self._visible_keys[causal] = counts[:, None, self._places[self.rank]].to(self.device)
        return self._visible_keys[causal]

    # ---- plans

    def plan(self, causal: bool, reach: tuple[int, int] | None) -> Plan:
        """Return the pieces that this process computes, and the travel distances of all shards.

        Args:
            causal: Whether a query sees only keys at places up to its own.
            reach: Smallest and largest distance that the prior leaves visible; None for all distances.
        """
        if (causal, reach) in self._plans:
            return self._plans[causal, reach]

        def pairs(reader: int, owner: int) -> Iterator[tuple[Run, Run]]:
            """Yield the runs of queries and of keys of two processes that may see each other."""
            every = itertools.product(self._runs[reader], self._runs[owner])
            return ((queries, keys) for queries, keys in every if self._may_see(queries, keys, causal, reach))

        pieces = [
            [piece for queries, keys in pairs(self.rank, owner) for piece in self._pieces(queries, keys)]
            for owner in range(self.size)
        ]
        # Own keys first: their log-sum-exp may show that other keys have no weight.
        pieces[self.rank].sort(key=lambda piece: not piece.own)
        farthest_first = range(self.size - 1, 0, -1)
        hops = [
            next((hop for hop in farthest_first if any(pairs((owner + hop) % self.size, owner))), 0)
            for owner in range(self.size)
        ]
        self._plans[causal, reach] = plan = Plan(pieces, hops)
        return plan

    def _may_see(self, queries: Run, keys: Run, causal: bool, reach: tuple[int, int] | None) -> bool:
        """Return whether a query may see a non-padding key in any example."""
        nearest, farthest = queries.first - (keys.last - 1), queries.last - 1 - keys.first
        if causal and farthest < 0:
            return False
        if self._is_interleaved:
            # Positions within an interleaved document are closer than places, but have the order of places.
            nearest, farthest = min(nearest, 1), max(farthest, -1)
        if reach is not None and (nearest > reach[1] or farthest < reach[0]):
            return False
        examples = zip(queries.documents, keys.visible_documents, strict=True)
        return any(not here.isdisjoint(there) for here, there in examples)

    @cached_property
    def _is_interleaved(self) -> bool:
        """Whether any document is not contiguous."""
        return self._has_documents and any(len(ids.unique_consecutive()) > len(ids.unique()) for ids in self._documents)

    def _pieces(self, queries: Run, keys: Run) -> list[Piece]:
        everyone, own = slice(None), queries is keys
        if own or not self._has_documents:
            return [Piece(everyone, queries.slots, keys.slots, own)]
        examples = zip(self._documents.expand(self.batch, -1), queries.documents, keys.visible_documents, strict=True)
        found = [
            [(_slots(ids, document, queries), _slots(ids, document, keys)) for document in sorted(here & there)]
            for ids, here, there in examples
        ]
        # Only slices can be compared; tensors of slots always get a piece per example.
        are_runs = all(len(parts) == 1 and all(isinstance(x, slice) for x in parts[0]) for parts in found)
        if are_runs and all(parts == found[0] for parts in found):
            return [Piece(everyone, *found[0][0])]
        one_by_one = [slice(b, b + 1) for b in range(self.batch)] if self.batch > 1 else [everyone]
        return [Piece(batches, *part) for batches, parts in zip(one_by_one, found, strict=True) for part in parts]


def _slots(ids: Tensor, document: int, run: Run) -> slice | Tensor:
    """Return the slots of a document's tokens in a run, as a slice if they are contiguous."""
    slots = (ids[run.first : run.last] == document).nonzero().flatten() + run.start
    first, last = int(slots[0]), int(slots[-1]) + 1
    return slice(first, last) if last - first == len(slots) else slots


def _join(parts: list[Tensor | None], order: Tensor, name: str) -> Tensor | None:
    """Join shards in the order of places, shape ``(1 or B, N)``; None if no process has a tensor."""
    given = [x for x in parts if x is not None]
    if not given:
        return None
    if len(given) < len(parts):
        without = [rank for rank, x in enumerate(parts) if x is None]
        raise ValueError(f"{name} must be given by all processes of the group or by none; missing in ranks {without}")
    shards = [x if x.dim() == 2 else x.unsqueeze(0) for x in given]
    batches = [len(x) for x in shards]
    if len(set(batches)) > 1:
        raise ValueError(f"{name} must have equal batch sizes in all processes of the group, got {batches}")
    joined = torch.cat(shards, dim=1)
    whole = torch.empty_like(joined)
    whole[:, order] = joined
    return whole


def _check(index: Tensor, given: Mapping[str, Tensor | None]) -> None:
    check_positions("index", index)
    if index.dim() != 1 or not len(index):
        raise ValueError(f"index must have shape (L_r,) with at least one token, got {tuple(index.shape)}")
    for name, tensor in given.items():
        if tensor is None:
            continue
        dimensions = (1, 2) if name == "positions" else (2,)
        if not isinstance(tensor, Tensor) or tensor.shape[-1:] != index.shape or tensor.dim() not in dimensions:
            got = tuple(tensor.shape) if isinstance(tensor, Tensor) else tensor
            raise ValueError(
                f"{name} must have shape (B, {len(index)}), with a number for each token of the process, got {got}"
            )
        if name != "key_padding_mask":
            check_positions(name, tensor)
        elif tensor.dtype != torch.bool:
            raise ValueError(f"{name} must be boolean (True = ignore), got {tensor.dtype}")
