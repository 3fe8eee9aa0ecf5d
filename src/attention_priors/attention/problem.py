"""Checked attention problems, in the one form that every backend reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, TypedDict

import torch
from torch import Tensor

from attention_priors.attention.geometry import Geometry
from attention_priors.attention.key_bias import checked_key_bias
from attention_priors.attention.logit_scale import SSMax
from attention_priors.attention.null_key import NullKey, checked_null_logit
from attention_priors.attention.operator import count_visible_keys, geometry_from
from attention_priors.attention.pruning.bounds import KeyBounds
from attention_priors.checks import check_share
from attention_priors.encodings import ShawVectors
from attention_priors.precision import can_be_read, compute_dtype_of, is_traced
from attention_priors.priors import Prior
from attention_priors.priors.base import check_in_use, check_positions

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Problem:
    """Checked arguments of one call of :func:`attend`."""

    query: Tensor
    """``(B, H, Lq, D)``."""
    key: Tensor
    """``(B, Hkv, Lk, D)``."""
    value: Tensor
    """``(B, Hkv, Lk, Dv)``."""
    prior: Prior | None
    terms: tuple[Prior, ...]
    """Summands of ``prior``. A term that is 0 for every pair of the call is left out."""
    key_bias: Tensor | None
    """Bias of each key, added to the log-prior, ``(B, H, Lk)``; None for no biases."""
    geometry: Geometry
    row_scale: Tensor | None
    """Logit scale ``c``, ``(B, H, Lq)``; None for no scaling."""
    scales_prior: bool
    """Whether the logit scale multiplies the prior too."""
    softmax_scale: float
    relative: ShawVectors | None
    dropout_p: float
    tolerance: float
    """Share of its weight that a query may lose to pruning."""
    key_bounds: KeyBounds | None
    kept: Tensor | None = None
    """Which blocks of 256 keys each block of 256 queries looks at, ``(B, H, ⌈Lq / 256⌉, ⌈Lk / 256⌉)``; None for all.
    Other blocks are known to have no weight."""
    logit_scale: SSMax | None = None
    """Module that computed ``row_scale``, and that computes the scales of other lengths."""
    null_logit: Tensor | None = None
    """Logit of the null key, ``(1, H, 1)`` or ``(B, H, Lq)``; None for no null key. Backends ignore this field."""

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of biases, logits and log-sum-exps: float32, or float64 for float64 queries."""
        return compute_dtype_of(self.query)

    def rows(self, rows: slice) -> Problem:
        """Return the problem of some of the queries and all keys."""
        return replace(
            self,
            query=self.query[:, :, rows],
            geometry=self.geometry.rows(rows),
            row_scale=_of_rows(self.row_scale, rows),
            null_logit=_of_rows(self.null_logit, rows),
        )


def _of_rows(of_queries: Tensor | None, rows: slice) -> Tensor | None:
    return of_queries if of_queries is None or of_queries.shape[-1] == 1 else of_queries[..., rows]


class Options(TypedDict, total=False):
    """Options of :func:`attend` that define the result, besides query, key, value and prior."""

    causal: bool
    logit_scale: SSMax | None
    visible_keys: Tensor | None
    softmax_scale: float | None
    query_positions: Tensor | None
    key_positions: Tensor | None
    document_ids: Tensor | None
    key_padding_mask: Tensor | None
    attn_mask: Tensor | None
    relative: ShawVectors | None
    dropout_p: float
    tolerance: float
    key_bounds: KeyBounds | None
    key_bias: Tensor | None
    null_logit: NullKey | Tensor | None


# ---- checking


def make_problem(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    prior: Prior | None,
    *,
    causal: bool = True,
    logit_scale: SSMax | None = None,
    softmax_scale: float | None = None,
    query_positions: Tensor | None = None,
    key_positions: Tensor | None = None,
    document_ids: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    relative: ShawVectors | None = None,
    dropout_p: float = 0.0,
    tolerance: float = 0.0,
    key_bounds: KeyBounds | None = None,
    visible_keys: Tensor | None = None,
    key_bias: Tensor | None = None,
    null_logit: NullKey | Tensor | None = None,
) -> Problem:
    """Check every argument of :func:`attend` against the others and fill in the defaults.

    Raises:
        ValueError: an argument is invalid. The message names the argument, its shape or value, and the expected one.
        RuntimeError: the call is under ``torch.jit.trace``.
    """
    if torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage]
        raise RuntimeError(
            "torch.jit.trace does not support attend(): a trace records the sizes and masks of its example inputs; use "
            "torch.compile or torch.export"
        )
    _check_tensors(query, key, value)
    batch, heads, num_queries, head_dim = query.shape
    num_keys = key.shape[2]
    check_modules(prior, logit_scale)
    for name, module in (("prior", prior), ("logit_scale", logit_scale)):
        if module is not None and module.num_heads != heads:
            raise ValueError(f"{name} has num_heads={module.num_heads}, but query has {heads} heads")
    if relative is not None and not isinstance(relative, ShawVectors):
        raise ValueError(f"relative must be ShawVectors, got {relative!r}")
    if not isinstance(causal, bool):
        raise ValueError(f"causal must be True or False, got {causal!r}")
    terms = check_in_use(prior, causal=causal, key_positions=key_positions)
    if relative is not None and (head_dim != relative.head_dim or value.shape[-1] != head_dim):
        raise ValueError(
            f"relative has head_dim={relative.head_dim}, but query has {head_dim} and value {value.shape[-1]}"
        )
    if dropout_p != 0.0 or tolerance != 0.0:
        check_share(dropout_p=dropout_p, tolerance=tolerance)
    if key_bounds is not None:
        _check_key_bounds(key_bounds, key)
    scale = head_dim**-0.5 if softmax_scale is None else check_softmax_scale(softmax_scale)

    sizes, given = (batch, heads, num_queries, num_keys), (query_positions, key_positions, document_ids)
    geometry = make_geometry(sizes, query.device, causal, *given, key_padding_mask, attn_mask)
    # Reading positions may wait for a device, and comparing a symbolic size would fix it.
    if not geometry.has_given_positions and not is_traced():
        farthest = max(num_queries, num_keys) - 1
        terms = tuple(term for term in terms if not term.is_zero_within(farthest))
    row_scale = None
    if visible_keys is not None:
        visible_keys = check_visible_keys(visible_keys, logit_scale, heads, num_queries).to(query.device)
        if visible_keys.shape[0] not in (1, batch):
            raise ValueError(f"visible_keys has batch size {visible_keys.shape[0]}, but query has batch size {batch}")
        visible_keys = visible_keys.expand(batch, -1, -1)
    if logit_scale is not None:
        counts = count_visible_keys(geometry, query) if visible_keys is None else visible_keys
        row_scale = logit_scale(counts, compute_dtype_of(query))
    return Problem(
        query=query,
        key=key,
        value=value,
        prior=prior,
        terms=terms,
        key_bias=None if key_bias is None else checked_key_bias(key_bias, query, key),
        geometry=geometry,
        row_scale=row_scale,
        scales_prior=logit_scale is not None and logit_scale.include_prior,
        softmax_scale=float(scale),
        relative=relative,
        dropout_p=dropout_p,
        tolerance=float(tolerance),
        key_bounds=key_bounds,
        logit_scale=logit_scale,
        null_logit=None if null_logit is None else checked_null_logit(null_logit, tuple(query.shape[:3]), query.device),
    )


def check_visible_keys(visible_keys: Tensor, logit_scale: SSMax | None, heads: int, num_queries: int) -> Tensor:
    """Check a caller's visible-key counts and return them as ``(1 or B, H or 1, Lq)``.

    Raises:
        ValueError: the shape is wrong, the dtype is not an integer, a count is below 1 (checked only on the CPU in
            eager mode), or ``logit_scale`` is None.
    """
    check_positions("visible_keys", visible_keys)
    shape = tuple(visible_keys.shape)
    if not 0 < len(shape) <= 3 or shape[-1] != num_queries or (len(shape) == 3 and shape[1] not in (1, heads)):
        raise ValueError(
            f"visible_keys must have shape ({num_queries},), (B, {num_queries}) or (B, {heads} or 1, {num_queries}), "
            f"got {shape}"
        )
    if logit_scale is None:
        raise ValueError("visible_keys needs a logit_scale, but logit_scale is None")
    if can_be_read(visible_keys) and visible_keys.numel() and (lowest := int(visible_keys.min())) < 1:
        raise ValueError(
            f"visible_keys must be at least 1, got {lowest}; for queries that see no key pass visible_keys.clamp(min=1)"
        )
    return visible_keys if len(shape) == 3 else visible_keys.reshape(-1, 1, num_queries)


def make_geometry(
    sizes: tuple[int, int, int, int],
    device: torch.device,
    causal: bool,
    query_positions: Tensor | None = None,
    key_positions: Tensor | None = None,
    document_ids: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
) -> Geometry:
    """Check positions and masks against the sizes (batch, heads, queries, keys) and build the geometry.

    Raises:
        ValueError: an argument is invalid. The message names the argument, its shape or value, and the expected one.
    """
    batch, _, num_queries, num_keys = sizes
    if key_padding_mask is not None:
        _check_shape("key_padding_mask", key_padding_mask, (batch, num_keys))
        if key_padding_mask.dtype != torch.bool:
            raise ValueError(f"key_padding_mask must be boolean (True = ignore), got {key_padding_mask.dtype}")
        key_padding_mask = key_padding_mask.to(device)
    if attn_mask is not None:
        attn_mask = _check_attn_mask(attn_mask, sizes).to(device)
    if document_ids is not None:
        _check_shape("document_ids", document_ids, (batch, num_keys))
        check_positions("document_ids", document_ids)
        if num_queries > num_keys:
            raise ValueError(
                f"with document_ids {tuple(document_ids.shape)}, the queries are the last of the keys; got "
                f"{num_queries} queries for {num_keys} keys"
            )
        document_ids = document_ids.to(device)
    query_positions = _check_positions("query_positions", query_positions, batch, num_queries, device)
    key_positions = _check_positions("key_positions", key_positions, batch, num_keys, device)
    masks = (document_ids, key_padding_mask, attn_mask, causal)
    return geometry_from(sizes, device, (query_positions, key_positions, *masks))


def check_modules(prior: object, logit_scale: object) -> None:
    """Check that ``prior`` and ``logit_scale`` are modules or None. Only models and recipes accept configs.

    Raises:
        ValueError: an argument is a name, a config, a class, or another object.
    """
    if isinstance(prior, SSMax):
        raise ValueError(f"prior must be a Prior, got the logit scale {prior!r}; pass it as logit_scale=")
    if isinstance(logit_scale, Prior):
        raise ValueError(
            f"logit_scale must be a module such as SSMax, got the prior {logit_scale!r}; pass it as prior="
        )
    # Duck typing, because PEFT and other libraries wrap modules.
    if prior is not None and not (hasattr(prior, "num_heads") and hasattr(prior, "log_prior_at")):
        got, cure = type(prior).__name__, "build a prior from its class, such as Laplace(num_heads)"
        if isinstance(prior, type):
            got = f"the class {prior.__name__}"
        elif isinstance(prior, str | Mapping):
            got, cure = repr(prior), f"build a prior with prior_from_config({prior!r}, num_heads=...) or from its class"
        raise ValueError(f"prior must be a Prior, got {got}; {cure}")
    if logit_scale is not None and not (hasattr(logit_scale, "num_heads") and hasattr(logit_scale, "include_prior")):
        raise ValueError(f"logit_scale must be a module such as SSMax(num_heads), got {logit_scale!r}")


def check_softmax_scale(softmax_scale: object) -> float:
    """Return ``softmax_scale`` as a float. Any real number works, including NumPy's numbers and arrays of shape ``()``.

    Raises:
        ValueError: the scale is not a positive finite number.
    """
    scale: Any = softmax_scale
    if isinstance(scale, Tensor):
        raise ValueError(f"softmax_scale must be a number, got {scale!r}; multiply query by a tensor scale instead")
    if getattr(scale, "shape", None) == ():
        scale = scale.item()
    if not isinstance(scale, float | Real) or isinstance(scale, bool) or not 0 < float(scale) < float("inf"):
        raise ValueError(f"softmax_scale must be a positive finite number, got {softmax_scale!r}")
    return float(scale)


def _check_tensors(query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{name} must be a tensor, got {type(tensor).__name__}")
        if tensor.dim() != 4:
            raise ValueError(
                f"{name} must have 4 dimensions (batch, heads, length, head_dim), got shape {tuple(tensor.shape)}"
            )
        if tensor.dtype not in DTYPES:
            raise ValueError(f"{name} must have dtype {', '.join(map(str, DTYPES))}; got {tensor.dtype}")
        if tensor.dtype != query.dtype:
            raise ValueError(f"{name} must have the query's dtype, {query.dtype}; got {tensor.dtype}")
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


def _check_key_bounds(key_bounds: KeyBounds, key: Tensor) -> None:
    if not isinstance(key_bounds, KeyBounds):
        raise ValueError(f"key_bounds must be KeyBounds, got {type(key_bounds).__name__}")
    batch, heads, _, width = key_bounds.balls.means.shape
    if tuple(key.shape) != (batch, heads, key_bounds.length, width):
        raise ValueError(
            f"key_bounds belong to keys {(batch, heads, key_bounds.length, width)}, got key {tuple(key.shape)}; "
            "call key_bounds.update(key)"
        )
    if key_bounds.balls.means.device != key.device:
        raise ValueError(f"key_bounds are on {key_bounds.balls.means.device}, but key is on {key.device}")


def _check_attn_mask(mask: Tensor, shape: tuple[int, int, int, int]) -> Tensor:
    if not isinstance(mask, Tensor):
        raise ValueError(f"attn_mask must be a tensor, got {type(mask).__name__}")
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(f"attn_mask must be boolean (True = forbidden) or floating point, got {mask.dtype}")
    expanded = mask if mask.dim() == 4 else mask[None, None] if mask.dim() == 2 else None
    if expanded is None or any(size not in (1, full) for size, full in zip(expanded.shape, shape, strict=True)):
        raise ValueError(f"attn_mask must have shape (Lq, Lk) or one that expands to {shape}, got {tuple(mask.shape)}")
    # Tiles cut the key dimension, so it needs its full size. The other dimensions may stay 1.
    return expanded.expand(-1, -1, -1, shape[3])


def _check_positions(
    name: str, positions: Tensor | None, batch: int, length: int, device: torch.device
) -> Tensor | None:
    if positions is None:
        return None
    check_positions(name, positions)
    # Not as tuples, because symbolic sizes would be compared with the sizes of other dimensions.
    if (
        positions.dim() > 2
        or positions.shape[-1] != length
        or (positions.dim() == 2 and positions.shape[0] not in (1, batch))
    ):
        raise ValueError(f"{name} must have shape ({length},) or ({batch}, {length}), got {tuple(positions.shape)}")
    return positions.to(device, torch.int64).reshape(-1, length)
