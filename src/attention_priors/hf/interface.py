"""Implementation of transformers' attention interface by :func:`attend`."""

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

from attention_priors.attention import SSMax
from attention_priors.models.masks import Keys, KeysMask, forbidden_by, hides, is_absolute, keys_mask
from attention_priors.models.pretrained import attend_over
from attention_priors.priors import Prior, RelativeBuckets, Window

IMPLEMENTATION = "attention_priors"
"""Name of this attention implementation in transformers."""
ATTRIBUTE = "attached_prior"
"""Attribute of attention modules that holds the attached prior."""
PEFT_PREFIX = "base_model.model."
"""Prefix of module names in PEFT models."""
PAST = "past_seen_tokens"
"""Attribute of the scalars from a T5 layer: number of tokens before its queries."""
REFUSED = {
    "softcap": "capped logits",
    "position_bias": "a position bias of the model's own",
    "indices": "a selection of keys",
}
"""Arguments that some models pass to attention and attend() does not support."""


class AttachedPrior(nn.Module):
    """Prior and logit scale attached to one layer's attention.

    Args:
        prior: prior over the layer's heads, or None.
        logit_scale: logit scale over the layer's heads, or None.
        owns_prior: whether the prior is a submodule of this layer. Of layers that share a prior, the first one owns it.
    """

    prior: Prior | None

    def __init__(self, prior: Prior | None, logit_scale: SSMax | None, owns_prior: bool = True) -> None:
        super().__init__()
        if owns_prior:
            self.prior = prior
        else:
            # Not a submodule, so that a checkpoint holds shared parameters once.
            object.__setattr__(self, "prior", prior)
        self.logit_scale = logit_scale
        self.learns = frozenset(name for name, parameter in self.named_parameters() if parameter.requires_grad)
        """Names of trainable parameters, even if PEFT freezes them later."""
        self.is_saved = False
        """Whether an adapter on disk holds the current parameters."""
        self._in_windows: dict[int, Prior] = {}

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if PEFT_PREFIX in prefix and not self.is_saved:
            warnings.warn(
                "PEFT does not save attached priors, without which its weights compute other outputs. Call "
                "save_adapter(model, folder) before model.save_pretrained(folder)",
                stacklevel=2,
            )

    def in_window(self, size: int, num_heads: int) -> Prior:
        """Return the prior within a sliding window."""
        if size not in self._in_windows:
            window = Window(num_heads, size)
            self._in_windows[size] = window if self.prior is None else self.prior + window
        return self._in_windows[size]


class BorrowedBuckets(RelativeBuckets):
    """:class:`RelativeBuckets` over given scalars, so that gradients flow to the tensors they were computed from.

    Args:
        scalars: log-prior of each bucket, ``(H, num_buckets)``.
        max_distance: as in :class:`RelativeBuckets`.
        bidirectional: as in :class:`RelativeBuckets`.
    """

    def __init__(self, scalars: Tensor, max_distance: int, bidirectional: bool) -> None:
        Prior.__init__(self, scalars.shape[0])
        self.num_buckets = scalars.shape[1]
        self.max_distance = max_distance
        self.bidirectional = bidirectional
        # As in torch.func.functional_call, a tensor replaces a parameter.
        self._parameters["bias"] = scalars  # pyright: ignore[reportArgumentType]


def _buckets_of(module: Any, scalars: Tensor) -> BorrowedBuckets | None:
    """Return the prior of a T5 layer from the scalars of its buckets, or None without buckets."""
    if not scalars.shape[1]:
        return None
    # Pix2Struct's decoder layers have no is_decoder.
    bidirectional = not getattr(module, "is_decoder", True)
    return BorrowedBuckets(scalars, module.relative_attention_max_distance, bidirectional)


class _WithinWindow:
    """Logit scale that counts the keys within a sliding window; a cache may have dropped the others.

    Args:
        scale: the logit scale.
        size: size of the window.
        shown: number of visible keys with padding, ``(B, 1, Lq)``; None without padding.
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
    """Compute one layer's attention, with the attached prior if any.

    The signature is that of transformers' attention interface. A 2-D ``position_bias`` holds the scalars of T5's
    buckets, from which a prior is built. SDPA adds a dense ``position_bias``, such as that of UDOP's encoder.

    Returns:
        Output ``(B, Lq, H, Dv)``, and the attention weights ``(B, H, Lq, Lk)`` with ``output_attentions``, else None.
    """
    attached: AttachedPrior | None = getattr(module, ATTRIBUTE, None)
    if attached is not None:
        _check_attached(module, attached, query)
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
            raise ValueError(
                f"{type(module).__name__} passes {name} ({what}) to attention, which attend() does not support"
            )
    if is_plain:
        # Use SDPA, as without attached priors. Sinks take the other branch: SDPA would ignore them silently.
        mask = attention_mask.matrix(skip=True) if isinstance(attention_mask, KeysMask) else attention_mask
        return sdpa_attention_forward(
            module, query, key, value, mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
        )
    if isinstance(attention_mask, KeysMask):
        keys = attention_mask.keys
        if keys.num_queries > 1:
            _check_packing(module, attention_mask, kwargs.get("position_ids"))
    elif (keys := getattr(attention_mask, "_keys", None)) is None:
        past = getattr(bias, PAST, None)
        keys = _keys_of_matrix(module, prior, attention_mask, is_causal, query, key, past)
    if keys.window is not None:
        prior = (attached or AttachedPrior(None, None)).in_window(keys.window, query.shape[1])
    if scale is not None and keys.window is not None:
        # Packed documents have no padding between them.
        scale = _WithinWindow(scale, keys.window, None if keys.documents is not None else keys.tokens_in_window())
    options: dict[str, Any] = {} if sinks is None else {"null_logit": sinks}
    options |= {"logit_scale": scale, "softmax_scale": scaling, "dropout_p": dropout}
    out, weights = attend_over(query, key, value, prior, keys, wants_weights, **options)
    return out.contiguous(), weights


def _check_attached(module: nn.Module, attached: nn.Module, query: Tensor) -> None:
    """Raise a RuntimeError if PEFT has replaced the attached prior; warn if the prior is frozen in training."""
    if not isinstance(attached, AttachedPrior):
        raise RuntimeError(
            f"layer {module.layer_idx} has a {type(attached).__name__} in place of its attached prior: remove "
            f"{ATTRIBUTE!r} from PEFT's modules_to_save, call train_attached(model) to train the attached priors, and "
            "save_adapter(model, folder) to save them"
        )
    if module.training and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        attached.is_saved = False
        frozen = attached.learns and not any(parameter.requires_grad for parameter in attached.parameters())
        if frozen and (query.requires_grad or any(parameter.requires_grad for parameter in module.parameters())):
            warnings.warn(
                "attached priors and logit scales are frozen while the model trains, as after peft.get_peft_model(): "
                "call train_attached(model) after it, before creating the optimizer. If they should stay frozen, "
                "ignore this warning",
                stacklevel=2,
            )


def _wants_weights(options: dict[str, Any]) -> bool:
    """Return whether the caller wants attention weights. GPT-2 and others record them without passing the option on."""
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
    """Return the keys for a dense mask from the caller, or for no mask.

    Queries follow ``past`` tokens; if ``past`` is None, queries are aligned with the last keys.
    """
    num_queries, num_keys = query.shape[2], key.shape[2]
    keys = Keys(query.device, num_keys - num_queries if past is None else past, num_queries, num_keys)
    if mask is None:
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        if causal and past is None and num_queries not in (1, num_keys):
            raise ValueError(
                f"{type(module).__name__} got no attention mask for {num_queries} queries and {num_keys} keys, so the "
                "queries' positions among the keys are unknown; pass an attention mask"
            )
        return replace(keys, causal=causal)
    if mask.dim() != 4 or mask.shape[-1] != num_keys:
        raise ValueError(
            f"attention_mask must have shape (B, Lk) or (B, 1 or H, Lq, Lk) with Lk={num_keys}, got {tuple(mask.shape)}"
        )
    if torch.compiler.is_exporting() and is_absolute(prior):
        raise ValueError(
            f"{type(module).__name__} got an attention mask {tuple(mask.shape)}, which does not say where padding "
            "ends; the prior depends on key positions, which count from there: export with a mask (B, Lk)"
        )
    forbidden = forbidden_by(mask)
    # Compiled code cannot read values.
    looks = not torch.compiler.is_compiling()
    ends = prior is not None and past is None and num_queries != num_keys
    if looks and ends and bool(hides(forbidden[..., -1]).all()):
        raise ValueError(
            f"attention_mask {tuple(mask.shape)} hides the last of {num_keys} keys from all queries, like the empty "
            "slots of a static cache, so the queries' positions are unknown: pass a mask (B, Lk), or use a cache "
            "without empty slots"
        )
    if looks and is_absolute(prior) and bool(hides(forbidden[..., 0]).flatten(1).all(-1).any()):
        raise ValueError(
            f"attention_mask {tuple(mask.shape)} hides a row's first key from all queries, and does not say whether "
            "the key is padding; the prior depends on key positions, which count from the first token that is not "
            "padding: pass a mask (B, Lk)"
        )
    return replace(keys, causal=False, forbidden=forbidden)


def _check_packing(module: nn.Module, mask: KeysMask, position_ids: Tensor | None) -> None:
    """Warn, or raise a ValueError for OPT, if position_ids of packed sequences are ignored.

    With a cache, transformers makes a plain causal mask for packed sequences.
    """
    if position_ids is None or torch.compiler.is_compiling() or "packing" in mask.notes:
        return
    mask.notes["packing"] = "checked"
    if mask.is_dense or mask.keys.documents is not None or mask.arguments.get("attention_mask") is not None:
        return
    if position_ids.dim() == 2 and find_packed_sequence_indices(position_ids) is not None:
        message = (
            f"position_ids start anew within a row, as in packed sequences, but {type(module).__name__} masks the row "
            "as one sequence"
        )
        config = mask.arguments.get("config")
        if config is not None and config.model_type == "opt":
            raise ValueError(f"{message}: OPT does not support packed sequences in transformers")
        warnings.warn(f"{message}: transformers separates packed sequences only with use_cache=False", stacklevel=2)


def register() -> None:
    """Register the implementation with transformers. Repeated calls are harmless."""
    AttentionInterface.register(IMPLEMENTATION, attention_forward)
    AttentionMaskInterface.register(IMPLEMENTATION, keys_mask)
