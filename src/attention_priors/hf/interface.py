"""transformers' attention interface, answered by :func:`attend`."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import find_packed_sequence_indices
from transformers.utils import output_capturing

from attention_priors.attention import SSMax, attend
from attention_priors.attention.attend import attend_with_weights
from attention_priors.hf.slots import SlotMask, Slots, Visibility, slot_mask
from attention_priors.models.placement import beside
from attention_priors.priors import Prior, Structure, Window

IMPLEMENTATION = "attention_priors"
"""The name under which transformers knows this attention."""
ATTRIBUTE = "attached_prior"
"""Where a layer's attention module has what is attached to it."""
REFUSED = {
    "softcap": "capped logits",
    "s_aux": "sinks of the model's own",
    "position_bias": "a position bias of the model's own",
    "cache": "a paged cache (continuous batching)",
}
"""What some models hand to attention that attend() has no form of."""


class AttachedPrior(nn.Module):
    """What is attached to one layer's attention.

    Args:
        prior: over the layer's heads, or None.
        logit_scale: over the layer's heads, or None.
        owns_prior: whether the prior's parameters belong to this layer; of a prior that layers share, to the first one.
    """

    prior: Prior | None

    def __init__(self, prior: Prior | None, logit_scale: SSMax | None, owns_prior: bool = True) -> None:
        super().__init__()
        if owns_prior:
            self.prior = prior
        else:
            # Not as a submodule: a checkpoint holds the parameters once.
            object.__setattr__(self, "prior", prior)
        self.logit_scale = logit_scale
        self._in_windows: dict[int, Prior] = {}

    def in_window(self, size: int | None, num_heads: int) -> Prior | None:
        """The prior within a sliding window."""
        if size is None:
            return self.prior
        if size not in self._in_windows:
            window = Window(num_heads, size)
            self._in_windows[size] = window if self.prior is None else self.prior + window
        return self._in_windows[size]


class _WithinWindow:
    """A logit scale that counts the keys which a sliding window shows: a cache may have dropped the others.

    Args:
        scale: the scale.
        size: of the window.
        shown: how many that are, ``(B, 1, Lq)``, where there is padding; None where no slot is.
    """

    def __init__(self, scale: SSMax, size: int, shown: Tensor | None) -> None:
        self.scale, self.size, self.shown = scale, size, shown
        self.num_heads, self.include_prior = scale.num_heads, scale.include_prior

    def __call__(self, visible_keys: Tensor, dtype: torch.dtype) -> Tensor:
        return self.scale(visible_keys.clamp(max=self.size) if self.shown is None else self.shown, dtype)


def _shown(slots: Slots, size: int, device: torch.device) -> Tensor:
    """How many slots of a window are no padding, ``(B, 1, Lq)``."""
    assert slots.attention_mask is not None
    mask = slots.attention_mask.to(device)
    until = nn.functional.pad(mask.cumsum(-1), (1, 0))
    last = torch.arange(1, slots.num_queries + 1, device=device) + slots.query_offset
    ends = (end.clamp(0, mask.shape[1]).expand(len(mask), -1) for end in (last, last - size))
    return (until.gather(1, next(ends)) - until.gather(1, next(ends))).unsqueeze(1)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention of one layer, as transformers calls it: with what is attached, or plainly.

    Returns:
        Output ``(B, Lq, H, Dv)``, and the attention weights ``(B, H, Lq, Lk)`` with ``output_attentions``, else None.
    """
    attached: AttachedPrior | None = getattr(module, ATTRIBUTE, None)
    wants_weights = _wants_weights(kwargs)
    for name, what in REFUSED.items():
        if kwargs.get(name) is not None:
            raise ValueError(f"{type(module).__name__} calls attention with {name}= ({what}), which has no prior form")
    if attached is None and not wants_weights:
        # SDPA, exactly as it is without anything attached.
        mask = attention_mask.slots.matrix(skip=True) if isinstance(attention_mask, SlotMask) else attention_mask
        return sdpa_attention_forward(
            module, query, key, value, mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
        )
    attached = AttachedPrior(None, None) if attached is None else attached
    if isinstance(attention_mask, SlotMask):
        slots = attention_mask.slots
        _check_packing(module, slots, kwargs.get("position_ids"), query.shape[2])
        key, value, options = _of_slots(attached, slots, query, key, value)
    else:
        options = _of_matrix(module, attached, attention_mask, is_causal, query, key)
    options |= {"softmax_scale": scaling, "dropout_p": dropout}
    prior = options.pop("prior")
    weights = None
    with beside(query, prior):
        if wants_weights:
            out, weights = attend_with_weights(query, key, value, prior, **options)
        else:
            out = attend(query, key, value, prior, **options)
    return out.transpose(1, 2).contiguous(), weights


def _wants_weights(options: dict[str, Any]) -> bool:
    """Whether the caller asked for attention weights. Some models (GPT-2) do not hand that on: they record them."""
    recorded = output_capturing._active_collector.get()
    return bool(options.get("output_attentions", False)) or (recorded is not None and "attentions" in recorded)


def _of_slots(
    attached: AttachedPrior, slots: Slots, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Keys and values in use, and what :func:`attend` is told."""
    heads = query.shape[1]
    visibility = slots.visibility
    if visibility is None:
        forbidden = slots.matrix(skip=False)
        assert forbidden is not None
        forbidden = ~forbidden
        visibility = Visibility(causal=False)
    else:
        forbidden = None
    query_offset, key_offset = slots.query_offset, slots.key_offset
    number, in_use = key.shape[2], None
    if isinstance(query_offset, int) and isinstance(key_offset, int):
        in_use = query_offset + query.shape[2] - key_offset
        if visibility.causal:
            # A static cache has room after the last token.
            number = min(number, in_use)
            key, value = key[:, :, :number], value[:, :, :number]
    options: dict[str, Any] = {"causal": visibility.causal, "document_ids": visibility.documents}
    device = query.device
    padding, first_token = _padding(slots, key_offset, number, device)
    options["key_padding_mask"] = padding
    prior = attached.in_window(visibility.window, heads)
    starts_at_0 = isinstance(key_offset, int) and key_offset == 0 and first_token is None
    if visibility.documents is None and not (in_use == number and (starts_at_0 or not _is_absolute(prior))):
        # Positions count from the first token that is not padding. Distances do not know of it.
        start = 0 if first_token is None else first_token
        options["query_positions"] = torch.arange(query.shape[2], device=device).unsqueeze(0) + query_offset - start
        options["key_positions"] = torch.arange(number, device=device).unsqueeze(0) + key_offset - start
    if forbidden is not None:
        options["attn_mask"] = forbidden
    scale = attached.logit_scale
    if scale is not None and visibility.window is not None:
        # Documents have no padding between them.
        shown = (
            None if padding is None or visibility.documents is not None else _shown(slots, visibility.window, device)
        )
        scale = _WithinWindow(scale, visibility.window, shown)
    return key, value, options | {"prior": prior, "logit_scale": scale}


def _padding(
    slots: Slots, key_offset: int | Tensor, number: int, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    """Which keys are padding, ``(B, Lk)``, and the slot of each text's first token, ``(B, 1)``; None without any."""
    mask = slots.attention_mask
    # What is compiled does not look at values.
    if mask is None or (not torch.compiler.is_compiling() and not slots.is_padded):
        return None, None
    mask = mask.to(device)
    first_token = mask.int().argmax(-1, keepdim=True)
    index = torch.arange(number, device=device) + key_offset
    # What the mask does not reach is padding.
    known = index < mask.shape[1]
    return ~(mask[:, index.clamp(max=mask.shape[1] - 1)] & known), first_token


def _is_absolute(prior: Prior | None) -> bool:
    return prior is not None and any(Structure.STATIONARY not in term.structure for term in prior.terms())


def _of_matrix(
    module: nn.Module,
    attached: AttachedPrior,
    mask: Tensor | None,
    is_causal: bool | None,
    query: Tensor,
    key: Tensor,
) -> dict[str, Any]:
    """What :func:`attend` is told where a caller brings a mask of his own, or none at all."""
    options: dict[str, Any] = {"prior": attached.prior, "logit_scale": attached.logit_scale}
    if mask is None:
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        if query.shape[2] not in (1, key.shape[2]):
            raise ValueError(
                f"{type(module).__name__} was given no attention mask for {query.shape[2]} queries and {key.shape[2]} "
                "keys: it does not say which of the keys the queries stand at"
            )
        return options | {"causal": causal}
    num_queries, num_keys = query.shape[2], key.shape[2]
    if mask.dim() != 4 or mask.shape[-1] != num_keys:
        raise ValueError(
            f"attention_mask must be (B, Lk), or (B, 1 or H, Lq, Lk) with {num_keys} keys, got {tuple(mask.shape)}"
        )
    if mask.dtype == torch.bool:  # transformers' are True where a key is seen
        forbidden = ~mask
    else:  # transformers writes the least finite number where it means -inf
        forbidden = mask.masked_fill(mask <= torch.finfo(mask.dtype).min / 2, float("-inf"))
    # What is compiled does not look at values.
    looks = not torch.compiler.is_compiling()
    if looks and num_queries != num_keys and bool(_hides(forbidden[..., -1]).all()):
        raise ValueError(
            f"attention_mask {tuple(mask.shape)} hides the last of {num_keys} keys from all queries, as the empty "
            "slots of a static cache are hidden, and does not say at which keys the queries stand: expected a mask "
            "(B, Lk), or a cache that holds no more than was read"
        )
    if looks and _is_absolute(attached.prior) and bool(_hides(forbidden[..., 0]).flatten(1).all(-1).any()):
        raise ValueError(
            f"attention_mask {tuple(mask.shape)} hides a text's first key from all queries, and does not say whether "
            "that is padding; the prior depends on keys' positions, which count from the first token that is none: "
            "expected a mask (B, Lk)"
        )
    return options | {"causal": False, "attn_mask": forbidden}


def _hides(forbidden: Tensor) -> Tensor:
    """Where a mask of :func:`attend`, boolean or added, lets nothing be seen."""
    return forbidden if forbidden.dtype == torch.bool else torch.isneginf(forbidden)


def _check_packing(module: nn.Module, slots: Slots, position_ids: Tensor | None, length: int) -> None:
    """Say so where position_ids of packed sequences are not heeded: with a cache, transformers makes a plain mask."""
    if position_ids is None or length == 1 or torch.compiler.is_compiling():
        return
    if slots.visibility is None or slots.visibility.documents is not None or slots.attention_mask is not None:
        return
    if "packing_checked" in slots.remarks:
        return
    slots.remarks.add("packing_checked")
    if position_ids.dim() == 2 and find_packed_sequence_indices(position_ids) is not None:
        message = (
            f"position_ids start anew within a row, as those of packed sequences do, but {type(module).__name__} masks "
            "them as one text"
        )
        if slots.arguments.get("config") is not None and slots.arguments["config"].model_type == "opt":
            raise ValueError(f"{message}: OPT does not support packed sequences in transformers")
        warnings.warn(f"{message}: transformers tells them apart with use_cache=False alone", stacklevel=2)


def register() -> None:
    """Make the implementation known to transformers. It may be called again."""
    AttentionInterface.register(IMPLEMENTATION, attention_forward)
    AttentionMaskInterface.register(IMPLEMENTATION, slot_mask)
