"""A trained decoder with other positions: RoPE scaled or dropped, a prior attached, all other weights kept."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from attention_priors.models.decoder import LAYER_PARTS, PriorDecoderConfig, PriorDecoderForCausalLM


def with_positions(model: PriorDecoderForCausalLM, changes: Mapping[str, Any]) -> PriorDecoderForCausalLM:
    """Return the same decoder with other parts for positions.

    A part whose description changes is made anew, as in a new model: what was learned in the old one is dropped, what
    the new one learns is initialised, drawn from torch's generator where it is random. A shared prior that each layer
    is to have for itself, or the reverse, is a change of the prior. Every other weight is copied.

    With ``{"encoding": None}`` rotary positions are dropped (DroPE); with ``{"encoding": None, "prior": {"name":
    "generalized_gaussian", "init": "uniform"}, "logit_scale": "residual_ssmax"}`` the model computes the same as with
    them dropped, until it is trained.

    Source: Gelberg et al., "Extending the Context of Pretrained LLMs by Dropping Their Positional Embeddings" (2025),
    for dropping; what is new is trained by whoever calls this.

    Args:
        model: is left as it is.
        changes: new values for ``prior``, ``share_prior``, ``encoding``, ``logit_scale``, ``null_logit``, ``key_bias``,
            ``layer_pattern`` and ``layer_kinds`` of its :class:`PriorDecoderConfig`; what is not named stays. Where a
            part changes in one layer, it is made anew in all.

    Returns:
        A new model on the same device, in the same dtype (priors and logit scales in float32) and mode.

    Raises:
        ValueError: a change is of something else, or describes nothing that there is; or the two models' other weights
            do not match, and it names them.
    """
    allowed = (*LAYER_PARTS, "share_prior", "layer_pattern", "layer_kinds")
    for key in changes:
        if key not in allowed:
            raise ValueError(f"changes: {key!r} is not about positions; it must be one of {', '.join(allowed)}")
    config = PriorDecoderConfig.from_dict(model.config.to_dict() | dict(copy.deepcopy(changes)))
    changed = {part for part in LAYER_PARTS if _described(model.config, part) != _described(config, part)}
    made = PriorDecoderForCausalLM(config).to(device=model.device, dtype=model.dtype)  # pyright: ignore[reportCallIssue]
    made.load_state_dict(_kept(model, made, changed), strict=False)
    learns = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    for name, parameter in made.named_parameters():
        if _part_of(name) not in changed:
            parameter.requires_grad_(learns[name])
    made.generation_config = copy.deepcopy(model.generation_config)
    return made.train(model.training)


def _described(config: PriorDecoderConfig, part: str) -> Any:
    """Return the full description of a part of each layer, however it was written; None for none."""
    layers = [getattr(config.of_layer(index), f"make_{part}")() for index in range(config.num_hidden_layers)]
    described = [None if made is None else made.to_config() for made in layers]
    return described, config.share_prior and part == "prior" and layers[0] is not None


def _part_of(name: str) -> str | None:
    """The part of the positions that a weight belongs to; None for the model's other weights."""
    return next((part for part in LAYER_PARTS if part in name.split(".")), None)


def _kept(model: nn.Module, made: nn.Module, changed: set[str]) -> dict[str, Tensor]:
    """The weights of all that does not change.

    Raises:
        ValueError: one of them is not in the other model, or of another shape there.
    """
    there, here = (
        {name: weight for name, weight in one.state_dict().items() if _part_of(name) not in changed}
        for one in (model, made)
    )
    different = [name for name in sorted({*there, *here}) if _shape(there.get(name)) != _shape(here.get(name))]
    if different:
        found = "; ".join(f"{name} ({_shape(there.get(name))}, now {_shape(here.get(name))})" for name in different[:3])
        raise ValueError(f"model: {len(different)} of its weights do not fit the model with other positions: {found}")
    return there


def _shape(weight: Tensor | None) -> str:
    return "missing" if weight is None else f"{weight.dtype} {tuple(weight.shape)}"
