"""Offsets, positions, padding and masks of transformers, converted to arguments of :func:`attend`.

The library receives masks in three ways. :class:`Keys` is the result of each.

- This package's decoder calls :func:`keys_of_call`. It passes ``attention_mask``, ``position_ids``, ``document_ids``
  and a cache.
- Other models call a mask function once per forward pass, with every offset and rule. Attention layers receive its
  result alone. So this package's mask function returns a tensor without memory that holds the :class:`Keys`
  (:class:`KeysMask`).
- BLOOM and MPT pass 4-D masks to their layers unchanged. They get a :class:`KeysMask` with the result of
  :func:`keys_of_call`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import getclosurevars
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils._pytree import tree_map
from transformers import masking_utils
from transformers.cache_utils import Cache
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask

from attention_priors.attention.geometry import positions_in_documents
from attention_priors.priors import Prior, Structure
from attention_priors.priors.base import check_positions


@dataclass(frozen=True)
class Keys:
    """Positions of the queries and keys of one forward pass, and which keys each query may see.

    A *slot* is an index among all tokens of a row, padding included. A cache may have dropped the first slots. A static
    cache has empty slots after the last token. Offsets are tensors in compiled code with a static cache, else integers.
    """

    device: torch.device
    query_offset: int | Tensor
    """Slot of the first query."""
    num_queries: int
    num_keys: int
    """Number of key slots, empty ones included."""
    key_offset: int | Tensor = 0
    """Slot of the first key; above 0 if a cache has dropped earlier keys."""
    causal: bool = True
    window: int | None = None
    """Size of the sliding window in slots, the query's own included; None for no window."""
    documents: Tensor | None = None
    """Document ids ``(B, num_keys)``; packed documents do not see each other."""
    padding: Tensor | None = None
    """Padding mask ``(B, num_keys)``, True for padding; None without padding."""
    start: int | Tensor = 0
    """Slot of the first real token, where positions start; ``(B, 1)`` with padding."""
    forbidden: Tensor | None = None
    """Mask of queries and keys, as the ``attn_mask`` of :func:`attend`."""
    query_positions: Tensor | None = None
    """Positions ``(1 or B, num_queries)``; None to count from ``start``, or within each document."""
    key_positions: Tensor | None = None
    """Positions ``(1 or B, num_keys)``; None to count from ``start``, or within each document."""

    @property
    def positions(self) -> Tensor:
        """Positions of the queries, ``(1 or B, num_queries)``."""
        if self.query_positions is not None:
            return self.query_positions
        if self.documents is not None:
            positions = self.of_queries(positions_in_documents(self.documents))
            assert positions is not None
            return positions
        return self._count(self.query_offset, self.num_queries)

    @property
    def positions_of_keys(self) -> Tensor:
        """Positions of the keys, ``(1 or B, num_keys)``."""
        if self.key_positions is not None:
            return self.key_positions
        if self.documents is not None:
            return positions_in_documents(self.documents)
        return self._count(self.key_offset, self.num_keys)

    def _count(self, offset: int | Tensor, number: int) -> Tensor:
        return torch.arange(number, device=self.device).unsqueeze(0) + offset - self.start

    @property
    def end(self) -> int | None:
        """Number of keys up to the last query's slot; None in compiled code with a static cache."""
        if isinstance(self.query_offset, Tensor) or isinstance(self.key_offset, Tensor):
            return None
        return self.query_offset + self.num_queries - self.key_offset

    @property
    def in_use(self) -> int:
        """Number of keys without the empty slots of a static cache, if known, else ``num_keys``."""
        end = self.end
        return self.num_keys if end is None or not self.causal else min(self.num_keys, end)

    def trim(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values without the empty slots of a static cache."""
        number = self.in_use
        return (key, value) if number == key.shape[2] else (key[:, :, :number], value[:, :, :number])

    @property
    def is_plain(self) -> bool:
        """Whether all keys are in use, from slot 0 on, and no mask but the causal one hides any.

        A window does not count, because callers add it to the prior.
        """
        nothing_else = self.documents is self.padding is self.forbidden is self.query_positions is None
        return nothing_else and self.causal and self.end == self.num_keys and not self.key_offset

    def options(self, prior: Prior | None) -> dict[str, Any]:
        """Return the arguments of :func:`attend` for trimmed keys; None for values that :func:`attend` computes itself.

        Padding shifts all positions of a row alike, which does not change a prior over distances. Without a prior and a
        causal mask, positions do not matter.
        """
        number = self.in_use
        queries, keys = self.query_positions, self.key_positions
        documents, forbidden = self.documents, self.forbidden
        if documents is not None and self.end is None:
            # attend() takes the last keys' documents for the queries', but the last slots may be empty.
            queries, keys = self.positions, self.positions_of_keys
            others = self.in_other_documents(documents).unsqueeze(1)
            forbidden = others if forbidden is None else forbidden.masked_fill(others, float("-inf"))
            documents = None
        elif queries is None and documents is None:
            start, first = self.start, self.key_offset
            shifted = isinstance(start, Tensor) or isinstance(first, Tensor) or start or first
            if (self.end != number and (self.causal or prior is not None)) or (shifted and is_absolute(prior)):
                queries, keys = self.positions, self.positions_of_keys
        return {
            "causal": self.causal,
            "query_positions": queries,
            "key_positions": None if keys is None else keys[:, :number],
            "document_ids": documents,
            "key_padding_mask": None if self.padding is None else self.padding[:, :number],
            "attn_mask": None if forbidden is None else forbidden[..., :number],
        }

    def of_queries(self, of_keys: Tensor | None) -> Tensor | None:
        """Select the queries' slots, ``(B, num_queries)``, from a tensor with one entry per key."""
        if of_keys is None:
            return None
        first = self.query_offset - self.key_offset
        if isinstance(first, Tensor):
            return of_keys[:, torch.arange(self.num_queries, device=self.device) + first]
        return of_keys[:, first : first + self.num_queries]

    def in_other_documents(self, documents: Tensor) -> Tensor:
        """Return which keys are in another document than each query, ``(B, num_queries, num_keys)``."""
        own = self.of_queries(documents)
        assert own is not None
        return own[:, :, None] != documents[:, None, :]

    def tokens_in_window(self) -> Tensor | None:
        """Count the non-padding tokens in each query's window, ``(B, 1, num_queries)``; None without padding."""
        if self.padding is None:
            return None
        assert self.window is not None
        until = pad((~self.padding).cumsum(-1), (1, 0))
        last = torch.arange(1, self.num_queries + 1, device=self.device) + self.query_offset - self.key_offset
        ends = (end.clamp(0, self.num_keys).expand(until.shape[0], -1) for end in (last, last - self.window))
        return (until.gather(1, next(ends)) - until.gather(1, next(ends))).unsqueeze(1)

    def last(self, number: int) -> Keys:
        """Return the :class:`Keys` of the last ``number`` queries."""
        if number == self.num_queries:
            return self
        forbidden, positions = self.forbidden, self.query_positions
        return replace(
            self,
            query_offset=self.query_offset + self.num_queries - number,
            num_queries=number,
            forbidden=forbidden if forbidden is None or forbidden.shape[2] == 1 else forbidden[:, :, -number:],
            query_positions=None if positions is None else positions[:, -number:],
        )

    def in_slots(self, first: int, number: int) -> Keys:
        """Return the :class:`Keys` of a layer whose cache holds ``number`` slots from slot ``first`` on."""
        held = slice(first, first + number)
        queries, keys = self.query_positions, self.key_positions
        if first and keys is None and self.documents is not None:
            queries, keys = self.positions, self.positions_of_keys
        return replace(
            self,
            num_keys=number,
            key_offset=first,
            documents=None if self.documents is None else self.documents[:, held],
            padding=None if self.padding is None else self.padding[:, held],
            forbidden=None if self.forbidden is None else self.forbidden[..., held],
            query_positions=queries,
            key_positions=None if keys is None else keys[:, held],
        )

    def to(self, device: torch.device | str | int) -> Keys:
        """Move all tensors to a device. accelerate calls this method when a model is spread over devices."""
        device = torch.device(device)
        if device == self.device:
            return self
        moved = {name: x.to(device) for name, x in vars(self).items() if isinstance(x, Tensor)}
        return replace(self, **moved, device=device)


def is_absolute(prior: Prior | None) -> bool:
    """Return whether a prior depends on more than distances."""
    return prior is not None and any(Structure.STATIONARY not in term.structure for term in prior.terms())


def _now(offset: int | Tensor) -> int | Tensor:
    """Return the current value of an offset, which a static cache will increment in place.

    The result is a copy in compiled code, which cannot read values.
    """
    if not isinstance(offset, Tensor):
        return offset
    return offset.clone() if torch.compiler.is_compiling() else int(offset)


def _is_whole(tokens: Tensor) -> bool:
    """Return whether no slot is padding; False in compiled code, which cannot read values."""
    return not torch.compiler.is_compiling() and bool(tokens.all())


def _padding(tokens: Tensor, key_offset: int | Tensor, num_keys: int) -> tuple[Tensor, Tensor]:
    """Return which keys are padding, and each row's first token: ``padding`` and ``start`` of :class:`Keys`.

    Args:
        tokens: ``(B, slots)``, False for padding. Slots missing at the end are padding.
        key_offset: slot of the first key.
        num_keys: number of keys.
    """
    slots = torch.arange(num_keys, device=tokens.device) + key_offset
    known = slots < tokens.shape[1]
    return ~(tokens[:, slots.clamp(max=tokens.shape[1] - 1)] & known), tokens.int().argmax(-1, keepdim=True)


def forbidden_by(mask: Tensor) -> Tensor:
    """Convert a mask of transformers to an ``attn_mask`` of :func:`attend`.

    A boolean mask of transformers is True where visible; a floating-point mask is added to the logits. transformers
    uses the smallest finite number in place of -inf.
    """
    if mask.dtype == torch.bool:
        return ~mask
    return mask.masked_fill(mask <= torch.finfo(mask.dtype).min / 2, float("-inf"))


def hides(forbidden: Tensor) -> Tensor:
    """Return where an ``attn_mask`` of :func:`attend`, boolean or added, hides a key."""
    return forbidden if forbidden.dtype == torch.bool else torch.isneginf(forbidden)


def sees_the_future(forbidden: Tensor, keys: Keys) -> bool:
    """Return whether a mask lets a query see a key at a later position.

    Returns False in compiled code, which cannot read values.
    """
    if torch.compiler.is_compiling():
        return False
    later = keys.positions_of_keys[:, None, None, :] > keys.positions[:, None, :, None]
    return bool((later & ~hides(forbidden)).any())


# ---- calls of this package's decoder


def keys_of_call(
    batch: int,
    length: int,
    device: torch.device,
    *,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    document_ids: Tensor | None = None,
    cache: Cache | None = None,
) -> Keys:
    """Return the keys of a decoder's call: all tokens so far, of which the last ``length`` are queries.

    Args:
        batch: batch size, ``B``.
        length: number of new tokens, ``L``.
        device: device of the tokens.
        attention_mask: ``(B, num_keys)``, 1 for tokens and 0 for padding. Or ``(B or 1, H or 1, L, num_keys)``, boolean
            (True = may see) or added to the logits, in addition to the causal mask.
        position_ids: integers ``(B or 1, num_keys)``. Beside a cache, ``(B or 1, L)`` is enough if the positions equal
            the default ones. Positions rise within a document: a new document begins where they do not (as in a batch
            that transformers packed), unless ``document_ids`` or a 4-D mask separate documents. Positions of padding
            are ignored.
        document_ids: integers ``(B, num_keys)``. Beside a static cache they may cover its empty slots too.
        cache: cache of the previous tokens.

    Raises:
        ValueError: an argument has a wrong shape or value. The message names it, and what was expected.
    """
    past, slots = 0, length
    if cache is not None:
        # A layer with a sliding window does not tell how many slots a static cache has.
        slides = cache.is_sliding if cache.is_compileable else []
        layer = slides.index(False) if False in slides else 0
        past = _now(cache.get_seq_length(layer))
        slots = sys.maxsize if slides and all(slides) else cache.get_mask_sizes(length, layer)[0]
    # A compiled model with a static cache cannot know how many slots are filled.
    num_keys = slots if isinstance(past, Tensor) else past + length
    slots = max(slots, num_keys)
    if document_ids is not None:
        shape = tuple(document_ids.shape)
        if len(shape) != 2 or shape[0] != batch or not num_keys <= shape[1] <= slots:
            raise ValueError(f"document_ids must cover every key, shape ({batch}, {num_keys}), got {shape}")
        document_ids = document_ids[:, :num_keys]
    keys = Keys(device, past, length, num_keys, documents=document_ids)
    if attention_mask is not None and attention_mask.dim() == 4:
        rows, _, queries, columns = attention_mask.shape
        fits = rows in (1, batch) and queries == length and num_keys <= columns <= slots
        if not fits or not (attention_mask.dtype == torch.bool or attention_mask.is_floating_point()):
            raise ValueError(
                "a 4-D attention_mask must be boolean (True = may see) or floating point (added to the logits), of "
                f"shape ({batch}, heads or 1, {length}, {num_keys}), got {attention_mask.dtype} "
                f"{tuple(attention_mask.shape)}"
            )
        keys = replace(keys, forbidden=forbidden_by(attention_mask[..., :num_keys]))
    elif attention_mask is not None:
        shape = tuple(attention_mask.shape)
        # A mask may cover the empty slots of a static cache.
        fewest = 0 if keys.end is None else num_keys
        if len(shape) != 2 or shape[0] != batch or not fewest <= shape[1] <= slots:
            raise ValueError(
                f"attention_mask must have shape ({batch}, {num_keys}), 1 for tokens and 0 for padding, or 4 "
                f"dimensions, got {shape}"
            )
        tokens = attention_mask[:, :num_keys] != 0
        if not _is_whole(tokens):
            padding, start = _padding(tokens, 0, num_keys)
            keys = replace(keys, padding=padding, start=start)
    if position_ids is not None:
        keys = _with_positions(keys, position_ids, batch)
    if keys.forbidden is not None and sees_the_future(keys.forbidden, keys):
        raise ValueError(
            "a 4-D attention_mask must not let a token see a later position: the decoder is causal (positions are "
            "those of position_ids)"
        )
    return keys


def keys_of_layer(keys: Keys, cache: Cache, index: int, window: int | None) -> Keys:
    """Return the keys that the cache of a layer holds: all, or those in the window before each query.

    Args:
        keys: all tokens so far, from :func:`keys_of_call`.
        cache: cache of the previous tokens.
        index: index of the layer.
        window: the layer's window in tokens, with the query's own; None for all keys.

    Raises:
        ValueError: the cache has dropped a key that a query sees. Windows count positions within a document, caches
            count slots.
    """
    if index >= len(cache) or not cache.is_sliding[index]:
        return keys
    number, first = cache.get_mask_sizes(keys.num_queries, index)
    fits = window is not None and window <= number - keys.num_queries + 1
    if first and not (fits and _follows_slots(keys)):
        _require(
            ~_sees_any(keys, first, window),
            f"the cache of layer {index} has dropped keys that new tokens see: documents are interleaved, positions "
            "fall or skip padding between tokens, or the cache was made for another model; pass a DynamicCache() made "
            "without config, which holds all keys",
        )
    return keys.in_slots(first, min(number, keys.num_keys - first))


def _follows_slots(keys: Keys) -> bool:
    """Return whether tokens of a document are known to be at least as far apart in positions as in slots."""
    if keys.documents is None and keys.key_positions is None:
        return True
    if torch.compiler.is_compiling():
        return False
    rises = None if keys.key_positions is None else keys.key_positions.diff() > 0
    if keys.documents is None:
        assert rises is not None
        return bool(rises.all())
    steps = keys.documents.diff()
    return bool((steps >= 0).all() and (rises is None or (rises | (steps > 0)).all()))


def _sees_any(keys: Keys, first: int, window: int | None) -> Tensor:
    """Return whether a query sees a key before slot ``first``, through masks and its window."""
    distance = keys.positions[:, :, None] - keys.positions_of_keys[:, None, :first]
    sees = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    if keys.padding is not None:
        hidden = keys.of_queries(keys.padding)
        assert hidden is not None
        sees = sees & ~hidden[:, :, None] & ~keys.padding[:, None, :first]
    if keys.documents is not None:
        sees = sees & ~keys.in_other_documents(keys.documents)[..., :first]
    if keys.forbidden is not None:
        sees = sees & ~hides(keys.forbidden[..., :first]).all(1)
    return sees.any()


def _with_positions(keys: Keys, position_ids: Tensor, batch: int) -> Keys:
    check_positions("position_ids", position_ids)
    looks = not torch.compiler.is_compiling()
    shape, length, num_keys = tuple(position_ids.shape), keys.num_queries, keys.num_keys
    fits = len(shape) == 2 and (
        shape[1] in (length, num_keys) if keys.end is not None else length <= shape[1] <= num_keys
    )
    if not fits or shape[0] not in (1, batch):
        raise ValueError(
            f"position_ids must have shape ({batch}, {num_keys}), one position per token so far, got {shape}"
        )
    if shape[1] == length < num_keys:
        _require_own_positions(keys, position_ids, batch)
        return keys
    own, new = keys.positions_of_keys, position_ids.to(torch.int64)
    given = new.expand(batch, -1)
    if shape[1] < num_keys:
        # Empty slots of a static cache get positions after all tokens, where no query sees them.
        after = given.amax(-1, keepdim=True) + 1 + torch.arange(num_keys - shape[1], device=given.device)
        given = torch.cat([given, after], -1)
    real = None if keys.padding is None else ~keys.padding
    if real is not None:
        given = torch.where(real, given, own)
    if looks:
        if bool((given == own).all()):
            return keys
        least = int((given if real is None else given.masked_fill(~real, 0)).min())
        if least < 0:
            raise ValueError(f"position_ids must not be negative, got {least}")
    queries = given[:, -length:] if keys.end is not None else new[:, -length:]
    placed = replace(keys, query_positions=queries, key_positions=given)
    return placed if keys.forbidden is not None else _with_documents(placed, given, real)


def _with_documents(keys: Keys, given: Tensor, real: Tensor | None) -> Keys:
    """Begin a new document wherever a token's position is not above the previous token's."""
    looks = not torch.compiler.is_compiling()
    if real is None:
        falls = pad(given[:, 1:] <= given[:, :-1], (1, 0))
    else:
        latest = torch.where(real, torch.arange(keys.num_keys, device=real.device), -1).cummax(-1).values
        before = pad(latest[:, :-1], (1, 0), value=-1)
        falls = real & (before >= 0) & (given <= given.gather(-1, before.clamp(min=0)))
    if keys.documents is not None:
        same = pad(keys.documents[:, 1:] == keys.documents[:, :-1], (1, 0))
        if looks and bool((falls & same).any()):
            raise ValueError("position_ids must rise within each document of document_ids")
        return keys
    if looks and not bool(falls.any()):
        return keys
    documents = falls.long().cumsum(-1)
    if looks and bool((positions_in_documents(documents) == given).all()):
        # attend() computes default positions faster.
        return replace(keys, documents=documents, query_positions=None, key_positions=None)
    return replace(keys, documents=documents)


def _require_own_positions(keys: Keys, position_ids: Tensor, batch: int) -> None:
    """Raise a ValueError unless positions of the new tokens alone equal the model's default positions."""
    same = position_ids == keys.positions
    if keys.padding is not None and keys.end is not None:
        same = same | keys.padding[:, -keys.num_queries :]
    message = (
        f"position_ids {tuple(position_ids.shape)} covers new tokens only, and differs from the default positions: "
        f"with a cache, pass the positions of all tokens so far, shape ({batch}, {keys.num_keys})"
    )
    _require(same.all(), message)


def _require(holds: Tensor, message: str) -> None:
    """Raise a ValueError unless a condition holds; in compiled code, which cannot read values, assert it."""
    if torch.compiler.is_compiling():
        torch._assert_async(holds, message)  # pyright: ignore[reportPrivateImportUsage]
    elif not bool(holds):
        raise ValueError(message)


# ---- masks of transformers' mask functions


def _read(mask_function: Callable[..., Tensor]) -> dict[str, Any] | None:
    """Return the rules of a mask function of transformers as fields of :class:`Keys`; None for an unknown function.

    The function's name and closure variables identify the rules.
    """
    if mask_function is causal_mask_function:
        return {"causal": True}
    if mask_function is bidirectional_mask_function:
        return {}
    if getattr(mask_function, "__module__", None) != masking_utils.__name__:
        return None
    maker = getattr(mask_function, "__qualname__", "").partition(".<locals>")[0]
    known: Mapping[str, Any] = getclosurevars(mask_function).nonlocals
    if maker == "sliding_window_overlay":
        return {"window": int(known["sliding_window"])}
    if maker == "packed_sequence_mask_function":
        return {"documents": known["packed_sequence_mask"]}
    if maker == "remap_positions_for_packed_sequence":
        # Within a sequence, differences of positions equal differences of slots.
        return _read(known["mask_function"])
    if maker != "and_masks":
        return None
    found: dict[str, Any] = {}
    for part in map(_read, known["mask_functions"]):
        if part is None or ("documents" in part and "documents" in found):
            return None
        if "window" in part and "window" in found:
            part["window"] = min(part["window"], found["window"])
        found |= part
    return found


class KeysMask(Tensor):
    """Mask ``(B, 1, Lq, Lk)`` without memory that holds its :class:`Keys`.

    Operations that read the mask's values get the dense matrix instead.
    """

    _keys: Keys
    is_dense: bool
    """Whether only the dense matrix describes the mask."""
    arguments: Mapping[str, Any]
    """Arguments of transformers' mask function."""
    notes: dict[str | bool, Any]
    """Matrices and results of checks, cached for this forward pass."""

    @classmethod
    def of(
        cls, keys: Keys, arguments: Mapping[str, Any], is_dense: bool, notes: dict[str | bool, Any] | None = None
    ) -> KeysMask:
        """Return a mask that holds ``keys``."""
        one = torch.zeros(1, dtype=torch.bool, device=keys.device)
        mask: Any = one.expand(arguments["batch_size"], 1, keys.num_queries, keys.num_keys)
        # Export cannot trace tensor subclasses, so a plain tensor holds the keys there.
        mask = mask if torch.compiler.is_exporting() else mask.as_subclass(cls)
        mask._keys, mask.arguments, mask.is_dense = keys, arguments, is_dense
        mask.notes = {} if notes is None else notes
        return mask

    @property
    def keys(self) -> Keys:
        """Keys, with the dense matrix as ``forbidden`` if only the matrix describes the mask."""
        if not self.is_dense:
            return self._keys
        matrix = self.matrix(skip=False)
        assert matrix is not None
        return replace(self._keys, forbidden=~matrix)

    def matrix(self, skip: bool) -> Tensor | None:
        """Return the boolean mask ``(B, 1, Lq, Lk)``, True = visible, that transformers makes for SDPA.

        Args:
            skip: whether the result may be None if SDPA's causal flag is equivalent.
        """
        if skip not in self.notes:
            skips = {} if skip else {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
            arguments: dict[str, Any] = dict(self.arguments) | skips
            self.notes[skip] = sdpa_mask(**arguments)
        return self.notes[skip]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Keep the :class:`Keys` if an operation does not change values; otherwise compute with the dense matrix."""
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in ("__get__", "__set__") or func in _ABOUT:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        mask = args[0] if args and isinstance(args[0], KeysMask) else None
        if mask is not None and (func in _SAME or (func is Tensor.to and args[1:] == (torch.bool,))):
            return cls.of(mask._keys, mask.arguments, mask.is_dense, mask.notes)
        if mask is not None and func is Tensor.to:
            device = torch._C._nn._parse_to(*args[1:], **kwargs)[0]  # pyright: ignore[reportAttributeAccessIssue]
            if device is not None:
                arguments = {name: _moved(value, device) for name, value in mask.arguments.items()}
                notes = {name: _moved(value, device) for name, value in mask.notes.items()}
                return cls.of(mask._keys.to(device), arguments | {"device": device}, mask.is_dense, notes)
        elif mask is not None and func is Tensor.__getitem__:
            last = _last_rows(args[1], mask.shape)
            if last is not None:
                keys = mask._keys.last(last)
                arguments = {**mask.arguments, "q_offset": keys.query_offset, "q_length": last}
                return cls.of(keys, arguments, mask.is_dense)
        plain = tree_map(_matrix_of, args)
        return func(*plain, **{name: _matrix_of(value) for name, value in kwargs.items()})


_SAME = frozenset({Tensor.detach, Tensor.contiguous, Tensor.clone, Tensor.requires_grad_})
"""Functions that return the mask's values unchanged."""
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
"""Functions that do not read the mask's values."""


def _last_rows(index: Any, shape: Sequence[int]) -> int | None:
    """Return the number of last rows that an index such as ``[:, :, -8:, :]`` selects; None for any other index."""
    if not isinstance(index, tuple) or len(index) not in (3, 4) or any(not isinstance(each, slice) for each in index):
        return None
    rows, taken = shape[2], [each.indices(size) for each, size in zip(index, shape, strict=False)]
    if any(each != (0, size, 1) for place, (each, size) in enumerate(zip(taken, shape, strict=False)) if place != 2):
        return None
    start, stop, step = taken[2]
    return stop - start if (stop, step) == (rows, 1) and start < rows else None


def _moved(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


def _matrix_of(value: Any) -> Any:
    return value.matrix(skip=False) if isinstance(value, KeysMask) else value


def keys_mask(batch_size: int, device: torch.device | str = "cpu", **arguments: Any) -> KeysMask:
    """Return a mask that holds the arguments of transformers' mask functions.

    Register this function with transformers.
    """
    device = torch.device(device)
    # A static cache may increment its offset before the matrix is computed.
    offsets = {name: _now(arguments.get(name, 0)) for name in ("q_offset", "kv_offset")}
    arguments = arguments | {"batch_size": batch_size, "device": device} | offsets
    known = None if arguments.get("use_vmap") else _read(arguments.get("mask_function", causal_mask_function))
    options: dict[str, Any] = {"causal": False, **(known or {})}
    mask, number = arguments.get("attention_mask"), arguments["kv_length"]
    if mask is not None and not _is_whole(mask):
        options["padding"], options["start"] = _padding(mask.to(torch.bool), offsets["kv_offset"], number)
    keys = Keys(device, offsets["q_offset"], arguments["q_length"], number, offsets["kv_offset"], **options)
    if torch.compiler.is_exporting():
        # Export cannot trace tensor subclasses. Use the dense matrix, with the keys as an attribute.
        whole: dict[str, Any] = arguments | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        matrix: Any = sdpa_mask(**whole)
        matrix._keys = None if known is None else keys
        return matrix
    return KeysMask.of(keys, arguments, known is None)
