"""One attention problem, checked and put into a single form that every backend reads."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from attention_priors.attention.logit_scale import SSMax
from attention_priors.encodings import ShawVectors
from attention_priors.priors import Prior
from attention_priors.priors.base import check_positions

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Problem:
    """What :func:`attend` was asked, after checking.

    ``B`` batch, ``H`` query heads, ``Hkv`` key heads, ``Lq`` queries, ``Lk`` keys. Tensors over positions
    have a leading dimension of 1 or ``B``.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    prior: Prior | None
    causal: bool
    logit_scale: SSMax | None
    softmax_scale: float
    query_positions: Tensor
    key_positions: Tensor
    offset: int | None
    """If not None: query slot ``i`` lies ``i + offset - j`` after key slot ``j`` for every pair of slots that
    may see each other. Then the bias is a view of a table, and what a query may see is a range of slots."""
    query_documents: Tensor | None
    key_documents: Tensor | None
    key_padding_mask: Tensor | None
    attn_mask: Tensor | None
    """``(B or 1, H or 1, Lq, Lk)``, boolean (True = forbidden) or added to the scaled logits."""
    relative: ShawVectors | None
    dropout_p: float

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of biases, logits and log-sum-exps: float32, or float64 for float64 queries."""
        return torch.float64 if self.query.dtype == torch.float64 else torch.float32

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.query.device

    def rows(self, rows: slice) -> Problem:
        """The same problem for some of the queries."""

        def cut(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor[..., rows]

        start = rows.indices(self.query.shape[2])[0]
        attn_mask = self.attn_mask
        if attn_mask is not None and attn_mask.shape[2] > 1:
            attn_mask = attn_mask[:, :, rows]
        return replace(
            self,
            query=self.query[:, :, rows],
            query_positions=self.query_positions[:, rows],
            offset=None if self.offset is None else self.offset + start,
            query_documents=cut(self.query_documents),
            attn_mask=attn_mask,
        )

    # ---- what a query may see

    def visible(self, rows: slice = slice(None), keys: slice = slice(None)) -> Tensor | None:
        """Same document, not padding, not in the future, not forbidden by ``attn_mask``.

        ``(B or 1, H or 1, n, e)``, True = visible; None if everything is. A prior's window is not in it.
        """
        visible = self.allowed(rows, keys)
        if self.causal:
            past = self.key_positions[:, None, None, keys] <= self.query_positions[:, None, rows, None]
            visible = past if visible is None else visible & past
        return visible

    def allowed(self, rows: slice, keys: slice) -> Tensor | None:
        """:meth:`visible`, but for the causal mask."""
        allowed = None

        def also(mask: Tensor) -> None:
            nonlocal allowed
            allowed = mask if allowed is None else allowed & mask

        if self.query_documents is not None and self.key_documents is not None:
            also(self.query_documents[:, None, rows, None] == self.key_documents[:, None, None, keys])
        if self.key_padding_mask is not None:
            also(~self.key_padding_mask[:, None, None, keys])
        if self.attn_mask is not None:
            mask = self.attn_mask[:, :, rows, keys] if self.attn_mask.shape[2] > 1 else self.attn_mask[..., keys]
            also(~mask if mask.dtype == torch.bool else mask != float("-inf"))
        return allowed

    @cached_property
    def visible_keys(self) -> Tensor:
        """``n_i``: how many keys each query may see; ``(B or 1, H or 1, Lq)``, integers."""
        num_queries, num_keys = self.query.shape[2], self.key.shape[2]
        if self.attn_mask is None and self.offset is not None:
            first, last = self.slot_range
            if self.key_padding_mask is None:
                return (last - first).unsqueeze(1)
            batch = max(first.shape[0], self.key_padding_mask.shape[0])
            seen = torch.nn.functional.pad((~self.key_padding_mask).cumsum(-1), (1, 0)).expand(batch, -1)
            count = seen.gather(1, last.expand(batch, -1)) - seen.gather(1, first.expand(batch, -1))
            return count.unsqueeze(1)
        counts = []
        step = block_length(num_keys * self.query.shape[0])
        for start in range(0, num_queries, step):
            rows = slice(start, min(start + step, num_queries))
            visible = self.visible(rows)
            if visible is None:
                return torch.full((1, 1, num_queries), num_keys, device=self.device)
            # A mask that is the same for all queries has but one row.
            counts.append(visible.sum(-1).expand(-1, -1, rows.stop - rows.start))
        return torch.cat(counts, dim=-1)

    @cached_property
    def slot_range(self) -> tuple[Tensor, Tensor]:
        """First and one-past-last key slot that each query may see, ``(B or 1, Lq)``; needs ``offset``."""
        assert self.offset is not None
        num_queries, num_keys = self.query.shape[2], self.key.shape[2]
        own = torch.arange(num_queries, device=self.device).unsqueeze(0) + self.offset
        first = torch.zeros_like(own)
        last = (own + 1).clamp(0, num_keys) if self.causal else torch.full_like(own, num_keys)
        if self.query_documents is not None and self.key_documents is not None:
            start, end = document_bounds(self.key_documents)
            # Documents imply as many query slots as there are last key slots, so `own` is a key slot.
            start, end = start[:, own[0]], end[:, own[0]]
            first, last = torch.maximum(first, start), torch.minimum(last.expand_as(end), end)
        return first, torch.maximum(first, last)

    @cached_property
    def scale_per_query(self) -> Tensor | None:
        """The logit scale ``c``, ``(B or 1, H, Lq)``, or None."""
        return None if self.logit_scale is None else self.logit_scale(self.visible_keys, self.compute_dtype)

    @property
    def scales_prior(self) -> bool:
        """Whether the logit scale multiplies the prior too."""
        return self.logit_scale is not None and self.logit_scale.include_prior


def block_length(row_size: int, budget: int = 2**21) -> int:
    """How many rows of ``row_size`` numbers fit a working buffer of ``budget`` numbers; at least one."""
    return max(1, budget // max(1, row_size))


def document_bounds(documents: Tensor) -> tuple[Tensor, Tensor]:
    """First and one-past-last slot of each slot's run of equal ids; ``(B, L)`` each."""
    length = documents.shape[-1]
    slots = torch.arange(length, device=documents.device).expand_as(documents)
    changes = torch.nn.functional.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
    start = torch.where(changes, slots, 0).cummax(-1).values
    ends = torch.nn.functional.pad(changes[:, 1:], (0, 1), value=True)
    end = torch.where(ends, slots + 1, length).flip(-1).cummin(-1).values.flip(-1)
    return start, end


def positions_in_documents(documents: Tensor) -> Tensor:
    """Each token's place among the tokens of its document, from 0; ``(B, L)``.

    Documents need not be contiguous.
    """
    order = documents.argsort(dim=-1, stable=True)
    start, _ = document_bounds(documents.gather(-1, order))
    rank = torch.arange(documents.shape[-1], device=documents.device) - start
    return torch.empty_like(order).scatter_(-1, order, rank)


# ---- checking


def make_problem(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    prior: Prior | None,
    *,
    causal: bool,
    logit_scale: SSMax | None,
    softmax_scale: float | None,
    query_positions: Tensor | None,
    key_positions: Tensor | None,
    document_ids: Tensor | None,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
    relative: ShawVectors | None,
    dropout_p: float,
) -> Problem:
    """Check every argument of :func:`attend` against the others and fill in the defaults.

    Raises:
        ValueError: naming the argument, its shape or value, and what was expected.
    """
    _check_tensors(query, key, value)
    batch, heads, num_queries, head_dim = query.shape
    num_keys = key.shape[2]
    for name, module in (("prior", prior), ("logit_scale", logit_scale)):
        if module is not None and module.num_heads != heads:
            raise ValueError(f"{name} has num_heads={module.num_heads}, but query has {heads} heads")
    if prior is not None:
        prior.check(causal=causal)
    if relative is not None and (head_dim != relative.head_dim or value.shape[-1] != head_dim):
        raise ValueError(f"relative has head_dim={relative.head_dim}; query has {head_dim} and value {value.shape[-1]}")
    if not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p must be in [0, 1), got {dropout_p!r}")
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    if not (isinstance(scale, int | float) and 0 < scale < float("inf")):
        raise ValueError(f"softmax_scale must be a positive finite number, got {softmax_scale!r}")

    if key_padding_mask is not None:
        _check_shape("key_padding_mask", key_padding_mask, (batch, num_keys))
        if key_padding_mask.dtype != torch.bool:
            raise ValueError(f"key_padding_mask must be boolean (True = ignore), got {key_padding_mask.dtype}")
    if attn_mask is not None:
        attn_mask = _check_attn_mask(attn_mask, (batch, heads, num_queries, num_keys))
    query_documents = None
    if document_ids is not None:
        _check_shape("document_ids", document_ids, (batch, num_keys))
        check_positions("document_ids", document_ids)
        if num_queries > num_keys:
            raise ValueError(
                f"document_ids {tuple(document_ids.shape)} belong to the keys, and queries are the last of "
                f"them; there are {num_queries} queries for {num_keys} keys"
            )
        query_documents = document_ids[:, num_keys - num_queries :]

    given = query_positions is not None or key_positions is not None
    query_positions, key_positions = _fill_positions(
        query_positions, key_positions, document_ids, batch, num_queries, num_keys, query.device
    )
    problem = Problem(
        query=query,
        key=key,
        value=value,
        prior=prior,
        causal=causal,
        logit_scale=logit_scale,
        softmax_scale=float(scale),
        query_positions=query_positions,
        key_positions=key_positions,
        offset=None,
        query_documents=query_documents,
        key_documents=document_ids,
        key_padding_mask=key_padding_mask,
        attn_mask=attn_mask,
        relative=relative,
        dropout_p=dropout_p,
    )
    plain = not given and document_ids is None
    return replace(problem, offset=num_keys - num_queries if plain else _slot_offset(problem))


def _check_tensors(query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 4:
            raise ValueError(
                f"{name} must have 4 dimensions (batch, heads, length, head_dim), got shape {tuple(tensor.shape)}"
            )
        if tensor.dtype not in DTYPES or tensor.dtype != query.dtype:
            raise ValueError(
                f"{name} must have the query's dtype, one of {', '.join(map(str, DTYPES))}; got {tensor.dtype} "
                f"with a query of {query.dtype}"
            )
        if tensor.device != query.device:
            raise ValueError(f"{name} is on {tensor.device}, but query is on {query.device}")
    batch, heads, _, head_dim = query.shape
    if key.shape[0] != batch or key.shape[3] != head_dim:
        raise ValueError(
            f"key must have the query's batch {batch} and head_dim {head_dim}, got shape {tuple(key.shape)}"
        )
    if value.shape[:3] != key.shape[:3]:
        raise ValueError(
            f"value must match key in batch, heads and length {tuple(key.shape[:3])}, got {tuple(value.shape)}"
        )
    if key.shape[1] < 1 or heads % key.shape[1]:
        raise ValueError(
            f"query has {heads} heads, which is not a multiple of the {key.shape[1]} heads of key and value"
        )
    for name, size in (("query", query.shape[2]), ("key", key.shape[2]), ("head_dim", head_dim)):
        if size < 1:
            raise ValueError(f"{name} is empty: query {tuple(query.shape)}, key {tuple(key.shape)}")


def _check_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if not isinstance(tensor, Tensor) or tuple(tensor.shape) != shape:
        got = tuple(tensor.shape) if isinstance(tensor, Tensor) else tensor
        raise ValueError(f"{name} must have shape {shape}, got {got}")


def _check_attn_mask(mask: Tensor, shape: tuple[int, int, int, int]) -> Tensor:
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(f"attn_mask must be boolean (True = forbidden) or floating point, got {mask.dtype}")
    expanded = mask if mask.dim() == 4 else mask[None, None] if mask.dim() == 2 else None
    if expanded is None or any(size not in (1, full) for size, full in zip(expanded.shape, shape, strict=True)):
        raise ValueError(f"attn_mask must have shape (Lq, Lk) or one that expands to {shape}, got {tuple(mask.shape)}")
    # Keys are cut into ranges, so that dimension is made whole; the others may stay 1.
    return expanded.expand(-1, -1, -1, shape[3])


def _fill_positions(
    query_positions: Tensor | None,
    key_positions: Tensor | None,
    document_ids: Tensor | None,
    batch: int,
    num_queries: int,
    num_keys: int,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    def check(name: str, positions: Tensor, length: int) -> Tensor:
        check_positions(name, positions)
        if tuple(positions.shape) not in ((length,), (1, length), (batch, length)):
            raise ValueError(f"{name} must have shape ({length},) or ({batch}, {length}), got {tuple(positions.shape)}")
        return positions.to(device, torch.int64).reshape(-1, length)

    if key_positions is not None:
        keys = check("key_positions", key_positions, num_keys)
    elif document_ids is not None:
        keys = positions_in_documents(document_ids)
    else:
        keys = torch.arange(num_keys, device=device).unsqueeze(0)
    if query_positions is not None:
        return check("query_positions", query_positions, num_queries), keys
    if num_queries <= num_keys:
        return keys[:, num_keys - num_queries :], keys
    # More queries than keys: they still end at the last key, so the first ones lie before it.
    return keys[:, -1:] + torch.arange(1 - num_queries, 1, device=device), keys


def _slot_offset(problem: Problem) -> int | None:
    """The offset of :attr:`Problem.offset`, read off the positions; None if there is no single one."""
    num_queries, num_keys = problem.query.shape[2], problem.key.shape[2]
    slots = torch.arange(max(num_queries, num_keys), device=problem.device)
    query_shift = problem.query_positions - slots[:num_queries]
    key_shift = problem.key_positions - slots[:num_keys]
    documents = problem.key_documents
    if documents is None:
        offset = query_shift - key_shift[:, :1]
        regular = (offset == offset[:1, :1]).all() & (key_shift == key_shift[:, :1]).all()
        return int(offset[0, 0]) if regular else None
    # Each document must be one run of slots with unit-stride positions, and queries must be the last keys.
    start, _ = document_bounds(documents)
    in_document = positions_in_documents(documents)
    behind = num_keys - num_queries
    contiguous = (in_document == slots[:num_keys] - start).all()
    unit_stride = (key_shift == key_shift.expand(len(start), -1).gather(1, start)).all()
    same = (query_shift + slots[:num_queries] == (key_shift + slots[:num_keys])[:, behind:]).all()
    return behind if contiguous & unit_stride & same else None
