"""Which tokens of a sequence each process of a group holds, and which of them may see each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from attention_priors.attention.geometry import Geometry, positions_in_documents
from attention_priors.checks import check_choice, check_positive_integers
from attention_priors.priors.base import check_positions

Layout = Literal["zigzag", "contiguous"]


def shard_index(length: int, rank: int, size: int, layout: Layout = "zigzag") -> Tensor:
    """The places in a sequence of the tokens that one process of several holds, rising.

    ``contiguous``: the sequence is cut into ``size`` runs, and process ``r`` holds run ``r``. Under a causal mask the
    last process then has ``2 size - 1`` times the first one's work, and all wait for it. ``zigzag``: it is cut into
    ``2 size`` runs, and process ``r`` holds runs ``r`` and ``2 size - 1 - r``: all have the same work.

    Args:
        length: of the sequence, in tokens; at least one per run. Runs differ in length by one token at most.
        rank: of the process in its group.
        size: of the group.
        layout: ``zigzag`` for causal attention, ``contiguous`` for bidirectional attention and windows.

    Returns:
        int64 ``(L_r,)``.
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
    """Tokens that follow each other, in the sequence and in the shard of the process that holds them."""

    start: int
    """Its first token's slot in the shard."""
    first: int
    """Its first token's place in the sequence."""
    length: int

    @property
    def last(self) -> int:
        """One past its last token's place."""
        return self.first + self.length


class Piece(NamedTuple):
    """Queries and keys for one call of attention: apart from ``own``, documents hide none of the keys."""

    batches: slice
    rows: slice | Tensor
    """Slots of queries in the shard of the process that reads."""
    keys: slice | Tensor
    """Slots of keys in the shard of the process that owns them."""
    own: bool = False
    """Whether queries and keys are the same tokens."""


class Plan(NamedTuple):
    """What one process computes, and how far each shard travels."""

    pieces: list[list[Piece]]
    """For each owner of keys."""
    hops: list[int]
    """To how many of the processes after its owner each shard is handed on."""


class ShardedSequence:
    """A batch of sequences whose tokens are spread over the processes of a group: what attention needs to know of all.

    To make one is a collective operation: every process of the group does it at the same time. It can then serve all
    layers of a model, forward and backward. Every process keeps the positions, documents and padding of all tokens,
    17 bytes per token at most; queries, keys and values stay where they are.

    Args:
        index: integers ``(L_r,)``: at which place of the whole sequence each token of this process stands. Over all
            processes, each place from 0 on occurs once. Each run of consecutive places is a call of attention of its
            own: see :func:`shard_index` for layouts with one or two.
        group: the process group; None for all processes.
        document_ids: integers ``(B, L_r)``: packed documents do not see each other. Those that are runs of tokens
            cost nothing; tokens of interleaved ones are picked out one document at a time.
        key_padding_mask: boolean ``(B, L_r)``, True = ignore.
        positions: integers ``(L_r,)`` or ``(B, L_r)``, for priors that look at more than distances, and for
            encodings: by default the place in the sequence, or in the document. They must rise by one from token to
            token of a document.

    Raises:
        ValueError: in every process, if the arguments of one of them are impossible or do not fit the others'.
        RuntimeError: if torch.distributed is not initialised, or another process does not answer.
    """

    length: int
    """Of the whole sequence, in tokens."""

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
                "torch.distributed is not initialised: start with torchrun and call torch.distributed."
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
                f"hold {order.unique().numel()} different ones, from {int(order.min())} to {int(order.max())}"
            )
        self._places = places
        self._runs = [_runs(place) for place in places]
        whole = {name: _join([found[name] for found in every], order, name) for name in given}
        batches = {len(x) for x in whole.values() if x is not None and len(x) > 1}
        if len(batches) > 1:
            raise ValueError(
                f"document_ids, key_padding_mask and positions are of batches of different sizes, {batches}"
            )
        self.batch = batches.pop() if batches else 1
        """Of documents, padding and positions: 1 if they have none, or all examples share them."""
        self._documents, padding = whole["document_ids"], whole["key_padding_mask"]
        self._padding = padding if padding is not None and bool(padding.any()) else None
        self._positions = self._whole_positions(whole["positions"])
        self._plans: dict[Any, Plan] = {}

    def exchange(self, what: str, check: Callable[[], Any]) -> list[Any]:
        """What ``check()`` returns in each process of the group; a collective operation.

        Raises:
            ValueError: in every process, if ``check`` raises one in any of them, or anything else in another one.
            RuntimeError: if another process does not answer.
        """
        mine, error = {}, None
        try:
            mine = check()
        except Exception as refused:  # of any kind: the others must not wait for this process
            error = refused
        every: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(every, (mine, None if error is None else str(error)), group=self.group)
        except RuntimeError as failed:
            raise RuntimeError(
                f"{what}: process {self.rank} of {self.size} waited for the others of its group in vain; one of them "
                "has stopped, or did not make the same call"
            ) from failed
        if error is not None:
            raise error
        for rank, (_, message) in enumerate(every):
            if message is not None:
                raise ValueError(f"{what}: process {rank} of the group refused its arguments: {message}")
        return [found for found, _ in every]

    # ---- what is known of all tokens

    def _whole_positions(self, given: Tensor | None) -> Tensor:
        """``(1 or B, N)``, in the order of places."""
        places = torch.arange(self.length).unsqueeze(0)
        documents = self._documents
        if given is None:
            return places if documents is None else positions_in_documents(documents)
        if documents is None:
            shift = given - places
            steady = bool((shift == shift[:, :1]).all())
        else:
            shift, first = _by_document(given.expand_as(documents) - positions_in_documents(documents), documents)
            steady = torch.equal(shift, shift.gather(1, first))
        if not steady:
            raise ValueError("positions must rise by one from token to token of a sequence, or of each document")
        return given

    @cached_property
    def positions(self) -> Tensor:
        """Of this process's tokens, ``(1 or B, L_r)``."""
        return self._positions[:, self._places[self.rank]].to(self.device)

    def positions_of(self, owner: int, piece: Piece) -> Tensor:
        """Of the keys of a piece, ``(1 or b, e)``."""
        return self._of_keys(self._positions, owner, piece)

    def documents_of(self, piece: Piece) -> Tensor | None:
        """Of the tokens of a piece of own ones, ``(b, e)``."""
        documents = self._documents
        return None if documents is None else self._of_keys(documents, self.rank, piece)

    def padding_of(self, owner: int, piece: Piece) -> Tensor | None:
        """Which keys of a piece are padding, ``(1 or b, e)``; None for none of them."""
        padding = None if self._padding is None else self._of_keys(self._padding, owner, piece)
        return padding if padding is not None and bool(padding.any()) else None

    def _of_keys(self, whole: Tensor, owner: int, piece: Piece) -> Tensor:
        part = whole[piece.batches] if len(whole) > 1 else whole
        return part[:, self._places[owner][piece.keys]].to(self.device)

    def visible_keys(self, causal: bool) -> Tensor:
        """How many keys of the whole sequence each query of this process may see, ``(1 or B, 1, L_r)``."""
        return self._visible_keys[causal].to(self.device)

    @cached_property
    def _visible_keys(self) -> dict[bool, Tensor]:
        return {causal: self._count(causal)[:, None, self._places[self.rank]] for causal in (False, True)}

    def _count(self, causal: bool) -> Tensor:
        documents, padding = self._documents, self._padding
        batch = max(1 if x is None else len(x) for x in (documents, padding))
        documents, padding = (None if x is None else x.expand(batch, -1) for x in (documents, padding))
        # Interleaved documents one after another: the keys of each query are then a run.
        order = None if documents is None else documents.argsort(dim=-1, stable=True)
        if documents is not None and order is not None:
            documents = documents.gather(1, order)
            padding = None if padding is None else padding.gather(1, order)
        geometry = Geometry(
            batch=batch,
            heads=1,
            num_queries=self.length,
            num_keys=self.length,
            device=torch.device("cpu"),
            causal=causal,
            query_documents=documents,
            key_documents=documents,
            key_padding_mask=padding,
        )
        counts = geometry.visible_keys.squeeze(1)
        return counts if order is None else torch.empty_like(counts).scatter_(1, order, counts)

    # ---- who reads whose keys

    def plan(self, causal: bool, reach: tuple[int, int] | None) -> Plan:
        """What to compute.

        Args:
            causal: whether a query sees only keys at places up to its own.
            reach: the smallest and the largest distance that the prior lets a query see; None for all.
        """
        if (causal, reach) not in self._plans:
            self._plans[causal, reach] = self._make_plan(causal, reach)
        return self._plans[causal, reach]

    def _make_plan(self, causal: bool, reach: tuple[int, int] | None) -> Plan:
        hops = []
        for owner in range(self.size):
            readers = [
                hop for hop in range(1, self.size) if self._reads((owner + hop) % self.size, owner, causal, reach)
            ]
            hops.append(max(readers, default=0))
        pieces = [
            [
                piece
                for queries in self._runs[self.rank]
                for keys in self._runs[owner]
                if self._may_see(queries, keys, causal, reach)
                for piece in self._pieces(queries, keys, owner)
            ]
            for owner in range(self.size)
        ]
        # Queries' own keys first: beside them others may turn out to weigh nothing.
        pieces[self.rank].sort(key=lambda piece: not piece.own)
        return Plan(pieces, hops)

    def _reads(self, reader: int, owner: int, causal: bool, reach: tuple[int, int] | None) -> bool:
        return any(
            self._may_see(queries, keys, causal, reach) and self._share_documents(queries, keys)
            for queries in self._runs[reader]
            for keys in self._runs[owner]
        )

    def _may_see(self, queries: Run, keys: Run, causal: bool, reach: tuple[int, int] | None) -> bool:
        nearest, farthest = queries.first - (keys.last - 1), queries.last - 1 - keys.first
        if causal and farthest < 0:
            return False
        if self._is_interleaved:
            # Within a document tokens are nearer to each other than their places are, but in the same order.
            nearest, farthest = min(nearest, 1), max(farthest, -1)
        return reach is None or (nearest <= reach[1] and farthest >= reach[0])

    @cached_property
    def _is_interleaved(self) -> bool:
        """Whether some document is no run of places."""
        return self._documents is not None and any(
            len(ids.unique_consecutive()) > len(ids.unique()) for ids in self._documents
        )

    def _share_documents(self, queries: Run, keys: Run) -> bool:
        """Whether some example has a document in both, with a key that is no padding."""
        return any(here & there for here, there in zip(self._ids(queries, False), self._ids(keys, True), strict=True))

    def _ids(self, run: Run, as_keys: bool) -> list[set[int]]:
        """The documents of a run, for each example; one for all where there are none."""
        if (run, as_keys) not in self._ids_of:
            here = slice(run.first, run.last)
            documents = torch.zeros(1, run.length) if self._documents is None else self._documents[:, here]
            found = []
            for example in range(self.batch):
                ids = documents[example if len(documents) > 1 else 0]
                if as_keys and self._padding is not None:
                    ids = ids[~self._padding[example if len(self._padding) > 1 else 0, here]]
                found.append(set(ids.tolist()) if self._documents is None else set(ids.unique().tolist()))
            self._ids_of[run, as_keys] = found
        return self._ids_of[run, as_keys]

    @cached_property
    def _ids_of(self) -> dict[tuple[Run, bool], list[set[int]]]:
        return {}

    def _pieces(self, queries: Run, keys: Run, owner: int) -> list[Piece]:
        rows, columns = (slice(run.start, run.start + run.length) for run in (queries, keys))
        everyone = slice(0, None)
        if owner == self.rank and queries == keys:
            return [Piece(everyone, rows, columns, own=True)]
        if not self._share_documents(queries, keys):
            return []
        documents = self._documents
        if documents is None:
            return [Piece(everyone, rows, columns)]
        found: list[list[tuple[slice | Tensor, slice | Tensor]]] = []
        for example, (here, there) in enumerate(zip(self._ids(queries, False), self._ids(keys, True), strict=True)):
            ids = documents[example if len(documents) > 1 else 0]
            found.append(
                [(_slots(ids, document, queries), _slots(ids, document, keys)) for document in sorted(here & there)]
            )
        # Tensors of slots are compared with nothing: they are never the same for all.
        are_runs = all(len(parts) == 1 and all(isinstance(x, slice) for x in parts[0]) for parts in found)
        if are_runs and all(parts == found[0] for parts in found):
            return [Piece(everyone, *found[0][0])]
        one_by_one = [slice(b, b + 1) for b in range(self.batch)] if self.batch > 1 else [everyone]
        return [Piece(batches, *part) for batches, parts in zip(one_by_one, found, strict=True) for part in parts]


def _slots(ids: Tensor, document: int, run: Run) -> slice | Tensor:
    """The slots of a document's tokens in a run: a slice if they follow each other."""
    slots = (ids[run.first : run.last] == document).nonzero().flatten() + run.start
    first, last = int(slots[0]), int(slots[-1]) + 1
    return slice(first, last) if last - first == len(slots) else slots


def _runs(places: Tensor) -> list[Run]:
    starts = [0, *((places[1:] != places[:-1] + 1).nonzero().flatten() + 1).tolist()]
    ends = [*starts[1:], len(places)]
    return [Run(start, int(places[start]), end - start) for start, end in zip(starts, ends, strict=True)]


def _join(parts: list[Tensor | None], order: Tensor, name: str) -> Tensor | None:
    """Shards put together, in the order of places; ``(1 or B, N)``."""
    given = [x for x in parts if x is not None]
    if not given:
        return None
    if len(given) < len(parts):
        without = [rank for rank, x in enumerate(parts) if x is None]
        raise ValueError(f"{name} must be given by every process of the group or by none, and is not by {without}")
    shards = [x if x.dim() == 2 else x.unsqueeze(0) for x in given]
    batches = [len(x) for x in shards]
    if len(set(batches)) > 1:
        raise ValueError(f"{name} must have the same batch in every process of the group, got {batches}")
    joined = torch.cat(shards, dim=1)
    whole = torch.empty_like(joined)
    whole[:, order] = joined
    return whole


def _by_document(values: Tensor, documents: Tensor) -> tuple[Tensor, Tensor]:
    """Values sorted by document, and the slot of the first one of each one's document."""
    order = documents.argsort(dim=-1, stable=True)
    ids = documents.gather(1, order)
    return values.gather(1, order), torch.searchsorted(ids.contiguous(), ids.contiguous())


def _check(index: Tensor, given: Mapping[str, Tensor | None]) -> None:
    check_positions("index", index)
    if index.dim() != 1 or not len(index):
        raise ValueError(f"index must have shape (L_r,) with at least one token, got {tuple(index.shape)}")
    for name, tensor in given.items():
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor) or tensor.shape[-1:] != index.shape or tensor.dim() not in _DIMENSIONS[name]:
            got = tuple(tensor.shape) if isinstance(tensor, Tensor) else tensor
            raise ValueError(
                f"{name} must have shape (B, {len(index)}), a number for each of the process's tokens, got {got}"
            )
        if name == "key_padding_mask":
            if tensor.dtype != torch.bool:
                raise ValueError(f"{name} must be boolean (True = ignore), got {tensor.dtype}")
        else:
            check_positions(name, tensor)


_DIMENSIONS = {"document_ids": (2,), "key_padding_mask": (2,), "positions": (1, 2)}
