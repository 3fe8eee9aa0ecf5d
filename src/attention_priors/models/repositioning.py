"""Changing the positions of a trained decoder: scale or drop RoPE, or add a prior, and keep all other weights."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from attention_priors.models.decoder import LAYER_PARTS, PriorDecoderConfig, PriorDecoderForCausalLM


def with_positions(model: PriorDecoderForCausalLM, changes: Mapping[str, Any]) -> PriorDecoderForCausalLM:
    """Return a copy of a decoder with other priors, encodings or logit scales.

    A part whose description changes is initialised as in a new model, and its learned parameters are discarded. Random
    initial values come from torch's generator. Switching ``share_prior`` counts as a change of the prior. All other
    weights are copied.

    ``{"encoding": None}`` drops rotary positions (DroPE). ``{"encoding": None, "prior": {"name":
    "generalized_gaussian", "init": "uniform"}, "logit_scale": "residual_ssmax"}`` adds a prior and a logit scale, which
    change no output before training.

    Source: Gelberg et al., "Extending the Context of Pretrained LLMs by Dropping Their Positional Embeddings" (2025),
    for dropping. Training the new parts is up to the caller.

    Args:
        model: the trained decoder, which is not modified.
        changes: new values for ``prior``, ``share_prior``, ``encoding``, ``logit_scale``, ``null_logit``, ``key_bias``,
            ``layer_pattern`` and ``layer_kinds`` of :class:`PriorDecoderConfig`. Other values stay. A part that changes
            in one layer is initialised anew in all layers.

    Returns:
        A new model on the same device and in the same dtype and mode. Priors and logit scales are in float32.

    Raises:
        ValueError: a change names another setting or is invalid; or the other weights of the two models do not match.
            The message names the weights.
    """
    allowed = (*LAYER_PARTS, "share_prior", "layer_pattern", "layer_kinds")
    for key in changes:
        if key not in allowed:
            raise ValueError(f"changes must set only {', '.join(allowed)}; got {key!r}")
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
    """Return the full description of a part in each layer, and whether the layers share it."""
    layers = [getattr(config.of_layer(index), f"make_{part}")() for index in range(config.num_hidden_layers)]
    described = [None if made is None else made.to_config() for made in layers]
    return described, config.share_prior and part == "prior" and layers[0] is not None


def _part_of(name: str) -> str | None:
    """Return the positional part that a weight belongs to; None for the model's other weights."""
    return next((part for part in LAYER_PARTS if part in name.split(".")), None)


def _kept(model: nn.Module, made: nn.Module, changed: set[str]) -> dict[str, Tensor]:
    """Return the weights of all unchanged parts.

    Raises:
        ValueError: a weight is missing from one model, or differs in shape.
    """
    there, here = (
        {name: weight for name, weight in one.state_dict().items() if _part_of(name) not in changed}
        for one in (model, made)
    )
    different = [name for name in sorted({*there, *here}) if _shape(there.get(name)) != _shape(here.get(name))]
    if different:
        found = "; ".join(f"{name} ({_shape(there.get(name))}, now {_shape(here.get(name))})" for name in different[:3])
        raise ValueError(f"{len(different)} weights of model do not fit the model with new positions: {found}")
    return there


def _shape(weight: Tensor | None) -> str:
    return "missing" if weight is None else f"{weight.dtype} {tuple(weight.shape)}"
