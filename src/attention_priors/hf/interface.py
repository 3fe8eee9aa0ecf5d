"""transformers' attention interface, answered by :func:`attend`."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import find_packed_sequence_indices
from transformers.utils import output_capturing

from attention_priors.attention import SSMax, attend
from attention_priors.attention.attend import attend_with_weights
from attention_priors.models.masks import Keys, KeysMask, forbidden_by, hides, is_absolute, keys_mask
from attention_priors.models.pretrained import beside
from attention_priors.priors import Prior, RelativeBuckets, Window

IMPLEMENTATION = "attention_priors"
"""The name under which transformers knows this attention."""
ATTRIBUTE = "attached_prior"
"""Where a layer's attention module has what is attached to it."""
PEFT_PREFIX = "base_model.model."
"""Start of the names that PEFT gives to the modules of a model."""
PAST = "past_seen_tokens"
"""Attribute of the scalars that a layer of T5 hands over: number of tokens before its queries."""
REFUSED = {
    "softcap": "capped logits",
    "position_bias": "a position bias of the model's own",
    "indices": "a selection of keys",
    "cache": "a paged cache (continuous batching)",
}
"""Arguments that some models hand to attention and attend() does not take."""


class AttachedPrior(nn.Module):
    """Prior and logit scale that are attached to one layer's attention.

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
        self.learns = frozenset(name for name, parameter in self.named_parameters() if parameter.requires_grad)
        """Names of the parameters that train, unless PEFT or its like freezes them."""
        self.is_saved = False
        """Whether the files of an adapter hold the parameters, which no training step has changed since."""
        self._in_windows: dict[int, Prior] = {}

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if PEFT_PREFIX in prefix and not self.is_saved:
            warnings.warn(
                "PEFT saves its own weights alone; without what attach() attached, they compute something else. Call "
                "save_adapter(model, folder) before model.save_pretrained(folder)",
                stacklevel=2,
            )

    def in_window(self, size: int, num_heads: int) -> Prior:
        """The prior within a sliding window."""
        if size not in self._in_windows:
            window = Window(num_heads, size)
            self._in_windows[size] = window if self.prior is None else self.prior + window
        return self._in_windows[size]


class BorrowedBuckets(RelativeBuckets):
    """:class:`RelativeBuckets` whose scalars come with a history, so that gradients reach what they are made of.

    Args:
        scalars: ``(H, num_buckets)``.
        max_distance: as in :class:`RelativeBuckets`.
        bidirectional: as in :class:`RelativeBuckets`.
    """

    def __init__(self, scalars: Tensor, max_distance: int, bidirectional: bool) -> None:
        Prior.__init__(self, scalars.shape[0])
        self.num_buckets = scalars.shape[1]
        self.max_distance = max_distance
        self.bidirectional = bidirectional
        # As torch.func.functional_call does it: a tensor takes the place of a parameter.
        self._parameters["bias"] = scalars  # pyright: ignore[reportArgumentType]


def _buckets_of(module: Any, scalars: Tensor) -> BorrowedBuckets | None:
    """Return the prior of a layer of T5 that hands over the scalars of its buckets; None where there are none."""
    if not scalars.shape[1]:
        return None
    # Pix2Struct's layers do not say that they are a decoder's.
    bidirectional = not getattr(module, "is_decoder", True)
    return BorrowedBuckets(scalars, module.relative_attention_max_distance, bidirectional)


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

    A ``position_bias`` with two dimensions holds the scalars of T5's buckets, from which a prior is made. SDPA adds a
    dense one, as that of UDOP's encoder.

    Returns:
        Output ``(B, Lq, H, Dv)``, and the attention weights ``(B, H, Lq, Lk)`` with ``output_attentions``, else None.
    """
    attached: AttachedPrior | None = getattr(module, ATTRIBUTE, None)
    prior, scale = (None, None) if attached is None else (attached.prior, attached.logit_scale)
    wants_weights = _wants_weights(kwargs)
    sinks: Tensor | None = kwargs.pop("s_aux", None)
    bias: Tensor | None = kwargs.get("position_bias")
    hands_scalars = bias is not None and bias.dim() == 2
    if hands_scalars:
        prior = _buckets_of(module, kwargs.pop("position_bias"))
    is_plain = attached is None and not wants_weights and sinks is None and not hands_scalars
    for name, what in REFUSED.items():
        if kwargs.get(name) is not None and not (is_plain and name == "position_bias"):
            raise ValueError(f"{type(module).__name__} calls attention with {name}= ({what}), which has no prior form")
    if is_plain:
        # SDPA, exactly as it is without anything attached. (Sinks it would leave out without a word.)
        mask = attention_mask.matrix(skip=True) if isinstance(attention_mask, KeysMask) else attention_mask
        return sdpa_attention_forward(
            module, query, key, value, mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
        )
    if isinstance(attention_mask, KeysMask):
        _check_packing(module, attention_mask, kwargs.get("position_ids"))
        keys = attention_mask.keys
    elif (keys := getattr(attention_mask, "_keys", None)) is None:
        past = getattr(bias, PAST, None)
        keys = _keys_of_matrix(module, prior, attention_mask, is_causal, query, key, past)
    key, value = keys.trim(key, value)
    if keys.window is not None:
        prior = (attached or AttachedPrior(None, None)).in_window(keys.window, query.shape[1])
    if scale is not None and keys.window is not None:
        # Documents have no padding between them.
        scale = _WithinWindow(scale, keys.window, None if keys.documents is not None else keys.tokens_in_window())
    options = keys.options(prior) | {"logit_scale": scale, "softmax_scale": scaling, "dropout_p": dropout}
    options["null_logit"] = sinks
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


def _keys_of_matrix(
    module: nn.Module,
    prior: Prior | None,
    mask: Tensor | None,
    is_causal: bool | None,
    query: Tensor,
    key: Tensor,
    past: int | Tensor | None,
) -> Keys:
    """Return the keys where a caller brings a mask of his own, or none at all.

    Queries stand after ``past`` tokens; where that is not known, at the last keys.
    """
    num_queries, num_keys = query.shape[2], key.shape[2]
    keys = Keys(query.device, num_keys - num_queries if past is None else past, num_queries, num_keys)
    if mask is None:
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        if causal and past is None and num_queries not in (1, num_keys):
            raise ValueError(
                f"{type(module).__name__} was given no attention mask for {num_queries} queries and {num_keys} keys: "
                "it does not say which of the keys the queries stand at"
            )
        return replace(keys, causal=causal)
    if mask.dim() != 4 or mask.shape[-1] != num_keys:
        raise ValueError(
            f"attention_mask must be (B, Lk), or (B, 1 or H, Lq, Lk) with {num_keys} keys, got {tuple(mask.shape)}"
        )
    if torch.compiler.is_exporting() and is_absolute(prior):
        raise ValueError(
            f"{type(module).__name__} was given an attention mask {tuple(mask.shape)}, which does not say where a text "
            "begins; the prior depends on keys' positions, which count from there: export with a mask (B, Lk)"
        )
    forbidden = forbidden_by(mask)
    # What is compiled does not look at values.
    looks = not torch.compiler.is_compiling()
    ends = prior is not None and past is None and num_queries != num_keys
    if looks and ends and bool(hides(forbidden[..., -1]).all()):
        raise ValueError(
            f"attention_mask {tuple(mask.shape)} hides the last of {num_keys} keys from all queries, as the empty "
            "slots of a static cache are hidden, and does not say at which keys the queries stand: expected a mask "
            "(B, Lk), or a cache that holds no more than was read"
        )
    if looks and is_absolute(prior) and bool(hides(forbidden[..., 0]).flatten(1).all(-1).any()):
        raise ValueError(
            f"attention_mask {tuple(mask.shape)} hides a text's first key from all queries, and does not say whether "
            "that is padding; the prior depends on keys' positions, which count from the first token that is none: "
            "expected a mask (B, Lk)"
        )
    return replace(keys, causal=False, forbidden=forbidden)


def _check_packing(module: nn.Module, mask: KeysMask, position_ids: Tensor | None) -> None:
    """Say so where position_ids of packed sequences are not heeded: with a cache, transformers makes a plain mask."""
    if position_ids is None or torch.compiler.is_compiling() or mask.shape[2] == 1 or "packing" in mask.notes:
        return
    mask.notes["packing"] = "checked"
    if mask.is_dense or mask.keys.documents is not None or mask.arguments.get("attention_mask") is not None:
        return
    if position_ids.dim() == 2 and find_packed_sequence_indices(position_ids) is not None:
        message = (
            f"position_ids start anew within a row, as those of packed sequences do, but {type(module).__name__} masks "
            "them as one text"
        )
        config = mask.arguments.get("config")
        if config is not None and config.model_type == "opt":
            raise ValueError(f"{message}: OPT does not support packed sequences in transformers")
        warnings.warn(f"{message}: transformers tells them apart with use_cache=False alone", stacklevel=2)


def register() -> None:
    """Make the implementation known to transformers. It may be called again."""
    AttentionInterface.register(IMPLEMENTATION, attention_forward)
    AttentionMaskInterface.register(IMPLEMENTATION, keys_mask)
