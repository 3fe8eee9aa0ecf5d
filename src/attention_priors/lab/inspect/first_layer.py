"""What absolute positions do in a trained model: the logits of its first layer, split (GPT-2, OPT and their like)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attention_priors.hf.observe import LayerAttention, observed_attention
from attention_priors.lab.inspect.additive import AdditiveLogits, LinearAudit, Projected, additive_logits, linear_audit
from attention_priors.lab.inspect.logits import problem_logits


class _SeenError(Exception):
    """The queries and keys of the first layer have been computed: the rest of the model need not run."""

    def __init__(self, layer: LayerAttention) -> None:
        super().__init__()
        self.problem = layer.problem
        self.query = layer.problem.query
        self.key = layer.problem.key


class _Split(NamedTuple):
    """The first layer's queries and keys by where they come from, ``(H, L, D)`` each."""

    query: Projected
    """Without the logit scale, which may be 0 and would then leave nothing to tell queries by."""
    key: Projected
    softmax_scale: float
    added: Tensor
    """What was added to the embeddings, ``(L, W)``."""
    scales: list[Tensor]
    """What each normalisation before the attention multiplies each token by, ``(1, L, 1)``."""
    row_scale: Tensor | None
    """The logit scale of each query, ``(H, L)``; None for 1."""
    visible: Tensor
    """Which keys a query sees, ``(H, L, L)``."""

    def scaled_query(self) -> Projected:
        """The queries times the logit scale, so that their summands are those that the softmax sees."""
        if self.row_scale is None:
            return self.query
        scale = self.row_scale.unsqueeze(-1)
        assert self.query.bias is not None
        parts = (self.query.content, self.query.position, self.query.bias)
        return Projected(*((part * scale).to(part.dtype) for part in parts))


@torch.no_grad()
def first_layer_logits(model: PreTrainedModel, text: Tensor) -> AdditiveLogits:
    """The first layer's logits by what comes from tokens, from positions, and from biases.

    Before its first layer such a model adds a vector for the position to that of the token, and then normalises. With
    the normaliser's scale left as it is for the sum, queries and keys are linear in that sum, so the split is exact.
    Deeper layers have no such split: content and position are mixed in what they read.

    Args:
        model: a language model of ours, or a causal one of transformers, that adds positions to embeddings.
        text: tokens, ``(L,)``, at least 2.

    Returns:
        Summands ``(H, L, L)``; ``H`` query heads. A logit scale is in them.

    Raises:
        ValueError: nothing is added to the embeddings, something else happens to them before the first layer, or
            queries and keys are no linear function of the sum, as with rotary positions.
    """
    split = _split(model, text)
    return additive_logits(split.scaled_query(), split.key, split.softmax_scale)


@torch.no_grad()
def first_layer_linear_audit(model: PreTrainedModel, text: Tensor) -> LinearAudit:
    """:func:`linear_audit` of every head of the first layer, of a model whose positions are the linear toy's.

    The layer normalises what it reads, so the place of a token is its position times the normaliser's scale: the places
    ``i / rms(e_i + i 1)`` rise towards 1. The queries' have the logit scale too.

    Args:
        model: as for :func:`first_layer_logits`.
        text: likewise.

    Raises:
        ValueError: as :func:`first_layer_logits`, or what is added is not ``i`` at position ``i``, for all features.
    """
    split = _split(model, text)
    positions = torch.arange(len(text), dtype=split.added.dtype, device=split.added.device)
    rounding = 16 * torch.finfo(split.added.dtype).eps
    if not torch.allclose(split.added, positions.unsqueeze(-1), rtol=rounding, atol=rounding):
        raise ValueError(f"{type(model).__name__} does not add each token's position, as a number, to its embedding")
    key_places = positions * split.scales[0][0, :, 0] if split.scales else positions
    query_places = key_places if split.row_scale is None else (key_places * split.row_scale).to(key_places.dtype)
    # The first token stands at 0, and says nothing of ones.
    query_one, key_one = (part.position[:, -1] / key_places[-1] for part in (split.query, split.key))
    return linear_audit(
        split.scaled_query().content,
        query_one,
        split.key.content,
        key_one,
        split.visible,
        query_places=query_places,
        key_places=key_places,
        softmax_scale=split.softmax_scale,
    )


def _split(model: PreTrainedModel, text: Tensor) -> _Split:
    if text.dim() != 1 or len(text) < 2:
        raise ValueError(f"text must be the tokens of one text, at least 2, got shape {tuple(text.shape)}")
    kind = type(model).__name__
    first_layer = _first_layer(model)
    was_training = model.training
    model.eval()
    try:
        embedding: Any = model.get_input_embeddings()
        embedded = embedding(text[None].to(model.device))
        inputs, scales = _observed(first_layer, model, text)
        if inputs.shape != embedded.shape:
            raise ValueError(
                f"{kind} brings its embeddings from a width of {embedded.shape[-1]} to {inputs.shape[-1]} before its "
                "first layer: that has no part in this split"
            )
        if torch.equal(inputs, embedded):
            raise ValueError(f"{kind} adds no positions to its embeddings: there is nothing to split")
        # What is added for a place is the same for all tokens there: every place is read with another one.
        other_text = (text + 1) % len(embedding.weight)
        others = embedding(other_text[None].to(model.device))
        other_inputs, _ = _observed(first_layer, model, other_text)
        rounding = torch.finfo(inputs.dtype).eps * (inputs.abs() + other_inputs.abs() + embedded.abs() + others.abs())
        if bool(((inputs - embedded) - (other_inputs - others)).abs().gt(4 * rounding).any()):
            raise ValueError(
                f"{kind} does something else to its embeddings before its first layer than to add positions, such as "
                "to normalise or to multiply them: that has no part in this split"
            )
        whole, content, position, bias = (
            _projected(first_layer, scales, model, text, part)
            for part in (inputs, embedded, inputs - embedded, torch.zeros_like(inputs))
        )
    finally:
        model.train(was_training)
    # What is no linear function differs by as much as there is; parts that are rounded differ by a few roundings.
    tolerance = max(1e-3, 8 * torch.finfo(inputs.dtype).eps)
    split: list[Projected] = []
    for name in ("query", "key"):
        total, of_content, of_position, of_bias = (getattr(seen, name)[0] for seen in (whole, content, position, bias))
        parts = Projected(of_content - of_bias, of_position - of_bias, of_bias)
        again = parts.content + parts.position + of_bias
        if float((again - total).abs().max()) > tolerance * float(total.abs().max()):
            raise ValueError(
                f"the {name} of {kind}'s first layer is no linear function of its embeddings: rotary positions, or a "
                "normalisation of queries and keys, have no part in this split"
            )
        split.append(parts)
    query, key = split
    group = len(query.content) // len(key.content)
    assert key.bias is not None
    key = Projected(*(part.repeat_interleave(group, dim=0) for part in (key.content, key.position, key.bias)))
    return _Split(
        query,
        key,
        whole.problem.softmax_scale,
        added=(inputs - embedded)[0],
        scales=[*scales.values()],
        row_scale=None if whole.problem.row_scale is None else whole.problem.row_scale[0],
        visible=problem_logits(whole.problem).visible[0],
    )


def _first_layer(model: PreTrainedModel) -> nn.Module:
    layers = next(
        (part for part in model.base_model.modules() if isinstance(part, nn.ModuleList) and len(part) > 0), None
    )
    if layers is None:
        raise ValueError(f"{type(model).__name__} has no list of layers")
    return layers[0]


def _run(model: PreTrainedModel, text: Tensor) -> _SeenError:
    def stop(layer: LayerAttention) -> None:
        raise _SeenError(layer)

    try:
        with observed_attention(model, stop):
            model(text[None].to(model.device))
    except _SeenError as seen:
        return seen
    raise ValueError(f"{type(model).__name__} computed no attention that can be seen")


def _observed(layer: nn.Module, model: PreTrainedModel, text: Tensor) -> tuple[Tensor, dict[nn.Module, Tensor]]:
    """What goes into a layer, ``(1, L, W)``, and what each normalisation before its attention multiplies by."""
    inputs: list[Tensor] = []
    scales: dict[nn.Module, Tensor] = {}

    def note_input(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs.append(args[0] if args else kwargs["hidden_states"])

    def note_scale(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        scales[module] = _scale(module, args[0])

    hooks = [layer.register_forward_pre_hook(note_input, with_kwargs=True)]
    hooks += [part.register_forward_hook(note_scale) for part in layer.modules() if _normalises(part)]
    try:
        _run(model, text)
    finally:
        for hook in hooks:
            hook.remove()
    return inputs[0], scales


def _projected(
    layer: nn.Module, scales: dict[nn.Module, Tensor], model: PreTrainedModel, text: Tensor, inputs: Tensor
) -> _SeenError:
    """The layer's queries and keys for other inputs, its normalisations multiplying by what is given."""

    def put(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return ((inputs, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": inputs})

    def fix(module: Any, args: tuple[Any, ...], output: Tensor) -> Tensor:
        shift = getattr(module, "bias", None)
        shift = 0.0 if shift is None else shift
        return shift + (output - shift) * (scales[module] / _scale(module, args[0]))

    hooks = [layer.register_forward_pre_hook(put, with_kwargs=True)]
    hooks += [module.register_forward_hook(fix) for module in scales]
    try:
        return _run(model, text)
    finally:
        for hook in hooks:
            hook.remove()


def _normalises(module: nn.Module) -> bool:
    return isinstance(module, nn.LayerNorm | nn.RMSNorm) or type(module).__name__.endswith(("LayerNorm", "RMSNorm"))


def _scale(module: Any, x: Tensor) -> Tensor:
    """One over the standard deviation, or the root mean square, that a normalisation divides by."""
    names = ("eps", "variance_epsilon", "epsilon")
    epsilon = next(value for name in names if (value := getattr(module, name, None)) is not None)
    centred = isinstance(module, nn.LayerNorm) or type(module).__name__.endswith("LayerNorm")
    x = x - x.mean(-1, keepdim=True) if centred else x
    return (x.square().mean(-1, keepdim=True) + epsilon).rsqrt()
