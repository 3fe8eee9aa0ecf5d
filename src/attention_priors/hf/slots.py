"""Where the queries and keys of a transformers model stand, and what its masks hide, without a matrix.

A model of transformers makes its masks once per forward pass, by a function that is told everything: offsets, lengths,
padding, sliding windows, packed sequences. Attention is handed nothing but the result, a matrix of ``Lq × Lk`` numbers,
or ``None``. So the function registered here returns a tensor of that shape that has no memory, with all it was told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from inspect import getclosurevars
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from transformers import masking_utils
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask


@dataclass(frozen=True)
class Visibility:
    """What a query may see, of keys in slots counted from the start of the text."""

    causal: bool = True
    window: int | None = None
    """Only the last so many slots, its own included; None for all."""
    documents: Tensor | None = None
    """Numbers of the packed sequences, ``(B, L)``, which do not see each other; None for one."""


class _UnknownMaskError(Exception):
    """A mask function that is none of those known here: it is evaluated for every pair."""


def _read(mask_function: Callable[..., Tensor]) -> Visibility:
    """What a mask function of transformers stands for, told by which function it is and what it closes over."""
    if mask_function is causal_mask_function:
        return Visibility()
    if mask_function is bidirectional_mask_function:
        return Visibility(causal=False)
    maker = getattr(mask_function, "__qualname__", "").partition(".<locals>")[0]
    if getattr(mask_function, "__module__", None) != masking_utils.__name__:
        raise _UnknownMaskError
    known: Mapping[str, Any] = getclosurevars(mask_function).nonlocals
    if maker == "sliding_window_overlay":
        return Visibility(causal=False, window=int(known["sliding_window"]))
    if maker == "packed_sequence_mask_function":
        return Visibility(causal=False, documents=known["packed_sequence_mask"])
    if maker == "remap_positions_for_packed_sequence":
        # Within a sequence, positions differ as slots do.
        return _read(known["mask_function"])
    if maker == "and_masks":
        return _all_of(map(_read, known["mask_functions"]))
    raise _UnknownMaskError


def _all_of(parts: Iterable[Visibility]) -> Visibility:
    causal, window, documents = False, None, None
    for part in parts:
        causal = causal or part.causal
        if part.window is not None:
            window = part.window if window is None else min(window, part.window)
        if part.documents is not None:
            if documents is not None:
                raise _UnknownMaskError
            documents = part.documents
    return Visibility(causal, window, documents)


@dataclass(frozen=True)
class Slots:
    """Which slots of a cache the queries and keys of one forward pass are in, and what queries may see."""

    query_offset: int | Tensor
    """The first query's. A tensor with a static cache."""
    key_offset: int | Tensor
    """The first key's: above 0 where a cache has dropped the ones before."""
    num_queries: int
    num_keys: int
    """Slots there are, filled or not."""
    visibility: Visibility | None
    """None if it is known as a matrix only: see :meth:`matrix`."""
    attention_mask: Tensor | None
    """``(B, at most key_offset + num_keys)``, boolean, False = padding; what is missing at the end is padding."""
    arguments: Mapping[str, Any] = field(repr=False, default_factory=dict)
    """What transformers' own mask function takes."""
    remarks: set[str] = field(repr=False, compare=False, default_factory=set)
    """What has been said about this forward pass."""
    _matrices: dict[bool, Tensor | None] = field(repr=False, compare=False, default_factory=dict)

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Slots:
        """From what transformers hands to a mask function."""
        mask_function = arguments.get("mask_function", causal_mask_function)
        visibility = None
        if not arguments.get("use_vmap", False):
            try:
                visibility = _read(mask_function)
            except _UnknownMaskError:
                visibility = None
        mask = arguments.get("attention_mask")
        offsets = {name: _as_it_is_now(arguments.get(name, 0)) for name in ("q_offset", "kv_offset")}
        return cls(
            query_offset=offsets["q_offset"],
            key_offset=offsets["kv_offset"],
            num_queries=arguments["q_length"],
            num_keys=arguments["kv_length"],
            visibility=visibility,
            attention_mask=None if mask is None else mask.to(torch.bool),
            # The matrix may be made after a static cache has counted on.
            arguments={**arguments, **offsets},
        )

    @cached_property
    def is_padded(self) -> bool:
        """Whether any slot is padding: asked by every layer, looked at once."""
        return self.attention_mask is not None and not bool(self.attention_mask.all())

    def matrix(self, skip: bool) -> Tensor | None:
        """The boolean mask ``(B, 1, Lq, Lk)``, True = visible, that transformers makes for SDPA.

        Args:
            skip: whether it may be None where SDPA's causal flag says the same.
        """
        if skip not in self._matrices:
            skips = {} if skip else {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
            arguments: dict[str, Any] = dict(self.arguments) | skips
            self._matrices[skip] = sdpa_mask(**arguments)
        return self._matrices[skip]

    def last_queries(self, number: int) -> Slots:
        """The same of the last queries alone."""
        offset = self.query_offset + self.num_queries - number
        arguments = {**self.arguments, "q_offset": offset, "q_length": number}
        return replace(self, query_offset=offset, num_queries=number, arguments=arguments, _matrices={})

    def to(self, device: torch.device) -> Slots:
        """The same on another device."""

        def moved(value: Any) -> Any:
            return value.to(device) if isinstance(value, Tensor) else value

        visibility = self.visibility
        if visibility is not None:
            visibility = replace(visibility, documents=moved(visibility.documents))
        arguments = {name: moved(value) for name, value in self.arguments.items()}
        return replace(
            self,
            query_offset=moved(self.query_offset),
            key_offset=moved(self.key_offset),
            visibility=visibility,
            attention_mask=moved(self.attention_mask),
            arguments=arguments | {"device": device},
            _matrices={skip: moved(matrix) for skip, matrix in self._matrices.items()},
        )


def _as_it_is_now(offset: int | Tensor) -> int | Tensor:
    """An offset as a number, but where values may not be looked at. A static cache counts on in the same tensor."""
    if not isinstance(offset, Tensor):
        return offset
    return offset.clone() if torch.compiler.is_compiling() else int(offset)


_SAME_SLOTS = frozenset({Tensor.detach, Tensor.contiguous, Tensor.clone, Tensor.requires_grad_})
"""Functions whose result stands for the same."""
_ABOUT = frozenset(
    {
        Tensor.size,
        Tensor.dim,
        Tensor.numel,
        Tensor.stride,
        Tensor.is_floating_point,
        Tensor.is_contiguous,
        Tensor.untyped_storage,
        Tensor.data_ptr,
        Tensor.element_size,
        Tensor.__len__,
    }
)
"""Functions that ask for no number of the matrix."""


class SlotMask(Tensor):
    """A mask ``(B, 1, Lq, Lk)`` without memory that knows its :class:`Slots`.

    Whoever computes with it gets the matrix it stands for.
    """

    slots: Slots

    @classmethod
    def of(cls, slots: Slots, batch: int, device: torch.device) -> SlotMask:
        """The mask of these slots."""
        one = torch.zeros(1, dtype=torch.bool, device=device)
        mask = one.expand(batch, 1, slots.num_queries, slots.num_keys).as_subclass(cls)
        mask.slots = slots
        return mask

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Keep the slots where the result stands for the same; compute with the matrix elsewhere."""
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in ("__get__", "__set__") or func in _ABOUT:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        itself = args[0] if args and isinstance(args[0], SlotMask) else None
        if itself is not None and func is Tensor.to:
            device = torch._C._nn._parse_to(*args[1:], **kwargs)[0]  # pyright: ignore[reportAttributeAccessIssue]
            if device is not None:
                return cls.of(itself.slots.to(device), itself.shape[0], device)
        elif itself is not None and func in _SAME_SLOTS:
            return cls.of(itself.slots, itself.shape[0], itself.device)
        elif itself is not None and func is Tensor.__getitem__:
            last = _last_rows(args[1], itself.slots.num_queries)
            if last is not None:
                return cls.of(itself.slots.last_queries(last), itself.shape[0], itself.device)
        plain = tree_map(_matrix_of, args)
        return func(*plain, **{name: _matrix_of(value) for name, value in kwargs.items()})


def _last_rows(index: Any, rows: int) -> int | None:
    """How many of the last rows an index takes, where it takes nothing else: ``[:, :, -8:, :]`` does."""
    everything = slice(None)
    if not isinstance(index, tuple) or len(index) not in (3, 4) or any(not isinstance(each, slice) for each in index):
        return None
    if any(each != everything for place, each in enumerate(index) if place != 2):
        return None
    start, stop, step = index[2].indices(rows)
    return stop - start if (stop, step) == (rows, 1) and start < rows else None


def _matrix_of(value: Any) -> Any:
    return value.slots.matrix(skip=False) if isinstance(value, SlotMask) else value


def slot_mask(batch_size: int, device: torch.device | str = "cpu", **arguments: Any) -> SlotMask:
    """The mask function to register: takes what transformers' take, and remembers it."""
    device = torch.device(device)
    slots = Slots.of(arguments | {"batch_size": batch_size, "device": device})
    return SlotMask.of(slots, batch_size, device)
