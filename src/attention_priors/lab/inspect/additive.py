"""Positions added to embeddings, and their effect on the logits.

With ``x_i = e_i + p_i``, the logit ``<Q x_i, K x_j>`` is a sum of four terms: content with content, content with
position, and so on. A prior adds one term that depends on positions alone; positions added to embeddings bring all
four. The first-layer logits of trained models such as GPT-2 and OPT are split in the same way.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from functools import reduce
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attention_priors.attention.problem import Problem
from attention_priors.hf.observe import LayerAttention, observed_attention
from attention_priors.lab.inspect.posterior import problem_logits

Case = Literal["i", "ii", "iii", "iv"]
"""Which of ``Q 1`` and ``K 1`` matter: i, neither; ii, only ``K 1``; iii, only ``Q 1``; iv, both."""


class Projected(NamedTuple):
    """Queries or keys by origin, ``(..., L, D)`` each or expandable to this shape."""

    content: Tensor
    """Part from the token embedding, ``Q e``."""
    position: Tensor
    """Part from the added position, ``Q p``."""
    bias: Tensor | None = None
    """Part from the biases of the projection and of the normalisation before it."""


@dataclass(frozen=True)
class AdditiveLogits:
    """Logits by the origin of their queries and keys, ``(..., Lq, Lk)`` each, in nats."""

    content_content: Tensor
    """``<Q e_i, K e_j>``: content alone."""
    content_position: Tensor
    """``<Q e_i, K p_j>``: tokens that look for positions."""
    position_content: Tensor
    """``<Q p_i, K e_j>``: positions that look for tokens."""
    position_position: Tensor
    """``<Q p_i, K p_j>``: positions alone, as in a prior."""
    bias: Tensor
    """Sum of all terms that contain a bias."""

    @property
    def total(self) -> Tensor:
        """Sum of all terms."""
        return self.content_content + self.content_position + self.position_content + self.position_position + self.bias

    def spreads(self, visible: Tensor) -> dict[str, Tensor]:
        """Return the standard deviation of each term over a query's visible keys, mean over queries, ``(...)``.

        The result is in nats. The softmax ignores a constant over keys, so only the variation of a term matters.
        Queries that see a single key are left out.

        Args:
            visible: boolean, expandable to ``(..., Lq, Lk)``.

        Raises:
            ValueError: no query sees two keys.
        """
        visible = visible.expand(self.content_content.shape)
        number = visible.sum(-1)
        choosing = number > 1
        if not bool(choosing.any(-1).all()):
            raise ValueError("visible: no query sees two keys, so no term can vary over keys")
        found = {}
        for name, summand in vars(self).items():
            term = summand.masked_fill(~visible, 0.0)
            mean = term.sum(-1) / number.clamp(min=1)
            centred = (term - mean.unsqueeze(-1)).masked_fill(~visible, 0.0)
            variance = centred.square().sum(-1) / number.clamp(min=1)
            # The root of 0 has no gradient: without variation over keys, the gradient is 0.
            flat = variance == 0
            deviation = variance.masked_fill(flat, 1.0).sqrt().masked_fill(flat, 0.0)
            found[name] = deviation.masked_fill(~choosing, 0.0).sum(-1) / choosing.sum(-1)
        return found


def additive_logits(query: Projected, key: Projected, softmax_scale: float | None = None) -> AdditiveLogits:
    """Split the logits of queries and keys that are sums of content, position and bias. The split is exact.

    Args:
        query: parts of the queries, ``(..., Lq, D)`` each.
        key: parts of the keys, ``(..., Lk, D)`` each.
        softmax_scale: ``1/sqrt(D)`` by default.
    """
    scale = query.content.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale

    def product(left: Tensor, right: Tensor) -> Tensor:
        return scale * (left @ right.mT)

    batch = torch.broadcast_shapes(query.content.shape[:-2], key.content.shape[:-2])
    shape = (*batch, query.content.shape[-2], key.content.shape[-2])
    summands = {
        f"{mine}_{theirs}": product(getattr(query, mine), getattr(key, theirs)).expand(shape)
        for mine in ("content", "position")
        for theirs in ("content", "position")
    }
    bias = torch.zeros_like(summands["content_content"])
    if query.bias is not None:
        bias = bias + product(query.bias, key.content + key.position)
    if key.bias is not None:
        bias = bias + product(query.content + query.position, key.bias)
        if query.bias is not None:
            bias = bias + product(query.bias, key.bias)
    return AdditiveLogits(**summands, bias=bias)


@dataclass(frozen=True)
class LinearAudit:
    """Effect of positions ``p_i = i · 1`` on the logits of one or several heads, ``(...)``.

    The four terms are ``(Q e_i)ᵀ K e_j``, ``j (Q e_i)ᵀ K 1``, ``i (Q 1)ᵀ K e_j`` and ``i j (Q 1)ᵀ K 1``. After a
    normalisation, the places ``i`` and ``j`` are no longer whole numbers, but still rise with the position.
    """

    logits: AdditiveLogits
    query_share: Tensor
    """Root mean square of ``i (Q 1)ᵀ K e_j`` over visible pairs, divided by that of the content term, ``(...)``. 0 if
    both terms are 0, inf if only the content term is."""
    key_share: Tensor
    """Share of ``j (Q e_i)ᵀ K 1``, defined like ``query_share``."""
    quadratic_share: Tensor
    """Share of ``i j (Q 1)ᵀ K 1``, defined like ``query_share``. If this share is large, both ``Q 1`` and ``K 1``
    matter, even if the content ignores them."""
    threshold: float
    """Largest share at which ``Q 1`` or ``K 1`` counts as 0."""
    slope: Tensor
    """``(Q e_i)ᵀ K 1 + i (Q 1)ᵀ K 1``: drift of the logit per place of the key, in nats, ``(..., Lq)``."""
    drift: Tensor
    """Slope times the span of the visible keys' places, in nats, ``(..., Lq)``."""
    skewed: Tensor
    """Whether the drift exceeds the range of the content term, ``(..., Lq)``. If so, the query favours one end of the
    text, whatever its content."""
    drowned: Tensor
    """Whether the range of ``i (Q 1)ᵀ K e_j`` over visible keys exceeds that of the content term, ``(..., Lq)``."""
    quadratic_from: Tensor
    """``|(Q e_i)ᵀ K 1| / |(Q 1)ᵀ K 1|``, ``(..., Lq)``: place of the query from which the second part of the slope
    dominates; inf if it never does. This part grows with the place."""

    @property
    def cases(self) -> list[Case]:
        """Case of each head, in the flattened order of ``(...)``."""
        names: dict[tuple[bool, bool], Case] = {
            (False, False): "i", (False, True): "ii", (True, False): "iii", (True, True): "iv"
        }  # fmt: skip
        matters = (share > self.threshold for share in (self.query_share, self.key_share, self.quadratic_share))
        query, key, both = (found.flatten().tolist() for found in matters)
        return [names[q or b, k or b] for q, k, b in zip(query, key, both, strict=True)]


def linear_audit(
    query_content: Tensor,
    query_one: Tensor,
    key_content: Tensor,
    key_one: Tensor,
    visible: Tensor,
    *,
    query_places: Tensor | None = None,
    key_places: Tensor | None = None,
    softmax_scale: float | None = None,
    threshold: float = 0.05,
) -> LinearAudit:
    """Measure how adding each token's position, as a number, to every feature of its embedding affects attention.

    Source: the analysis of the toy encoding ``p_i = i · 1``, whose four cases depend on whether ``Q 1 ≈ 0`` and
    ``K 1 ≈ 0``. The analysis sets no tolerance. This function compares the terms of ``Q 1`` and ``K 1`` with the
    content term.

    Args:
        query_content: ``Q e_i``, ``(..., L, D)``.
        query_one: ``Q 1``, ``(..., D)``.
        key_content: ``K e_j``, ``(..., L, D)``.
        key_one: ``K 1``, ``(..., D)``.
        visible: visibility of each key. Boolean, expandable to ``(..., L, L)``.
        query_places: multipliers of ``Q 1``, expandable to ``(..., L)``. By default ``0, 1, 2, ...``.
        key_places: multipliers of ``K 1``, expandable to ``(..., L)``. By default ``0, 1, 2, ...``.
        softmax_scale: ``1/sqrt(D)`` by default.
        threshold: share of the content's root mean square up to which a term counts as 0.

    Returns:
        Numbers in float32, or in float64 if any input is float64.

    Raises:
        ValueError: the threshold is negative, or no query sees a key.
    """
    if not 0 <= threshold < float("inf"):
        raise ValueError(f"threshold must be a finite number, at least 0, got {threshold!r}")
    if not bool(visible.any()):
        raise ValueError("visible: no query sees a key")
    # Half precision cannot resolve sums of squares over all pairs, nor places beyond a few hundred.
    given = (query_content, query_one, key_content, key_one)
    dtype = reduce(torch.promote_types, [each.dtype for each in given], torch.float32)
    query_content, query_one, key_content, key_one = (each.to(dtype) for each in given)
    scale = query_content.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    places = torch.arange(query_content.shape[-2], dtype=dtype, device=query_content.device)
    query_places, key_places = (places if each is None else each.to(dtype) for each in (query_places, key_places))
    query = Projected(query_content, query_places.unsqueeze(-1) * query_one.unsqueeze(-2))
    key = Projected(key_content, key_places.unsqueeze(-1) * key_one.unsqueeze(-2))
    logits = additive_logits(query, key, scale)
    visible = visible.expand(logits.content_content.shape)

    def share(term: Tensor) -> Tensor:
        size, whole = (x.masked_fill(~visible, 0.0).square().sum((-2, -1)) for x in (term, logits.content_content))
        return torch.where(size == 0, 0.0, size / whole).sqrt()

    def extent(term: Tensor) -> Tensor:
        """Return the range over a query's visible keys."""
        span = term.masked_fill(~visible, -torch.inf).amax(-1) - term.masked_fill(~visible, torch.inf).amin(-1)
        return span.masked_fill(~visible.any(-1), 0.0)

    of_content = scale * (query_content @ key_one.unsqueeze(-1)).squeeze(-1)
    of_position = scale * (query_one * key_one).sum(-1, keepdim=True)
    slope = of_content + query_places * of_position
    drift = slope * extent(key_places.unsqueeze(-2).expand_as(visible))
    own = extent(logits.content_content)
    return LinearAudit(
        logits=logits,
        query_share=share(logits.position_content),
        key_share=share(logits.content_position),
        quadratic_share=share(logits.position_position),
        threshold=threshold,
        slope=slope,
        drift=drift,
        skewed=drift.abs() > own,
        drowned=extent(logits.position_content) > own,
        quadratic_from=torch.where(of_position == 0, torch.inf, of_content.abs() / of_position.abs()),
    )


class _SeenError(Exception):
    """Signal that the first layer's queries and keys are computed, so that the rest of the model need not run."""

    def __init__(self, problem: Problem) -> None:
        super().__init__()
        self.problem = problem


class _Split(NamedTuple):
    """Queries and keys of the first layer by origin, ``(H, L, D)`` each."""

    query: Projected
    """Queries without the logit scale: a scale of 0 would make all queries equal."""
    key: Projected
    softmax_scale: float
    added: Tensor
    """Vectors added to the embeddings, ``(L, W)``."""
    scales: list[Tensor]
    """Factor of each token in each normalisation before the attention, ``(1, L, 1)``."""
    row_scale: Tensor | None
    """Logit scale of each query, ``(H, L)``; None for 1."""
    visible: Tensor
    """Whether each query sees each key, ``(H, L, L)``."""

    def scaled_query(self) -> Projected:
        """Return the queries times the logit scale, so that their logits are those of the softmax."""
        scale = 1.0 if self.row_scale is None else self.row_scale.unsqueeze(-1)
        return Projected(*((part * scale).to(part.dtype) for part in self.query if part is not None))


@torch.no_grad()
def first_layer_logits(model: PreTrainedModel, text: Tensor) -> AdditiveLogits:
    """Split the first layer's logits into the parts from tokens, positions and biases.

    Such a model adds a position vector to each token embedding and then normalises the sum. With the normaliser's scale
    fixed to its value for the sum, queries and keys are linear in the sum, so the split is exact. Deeper layers read a
    mixture of content and position and cannot be split.

    Args:
        model: language model of this library, or causal model of transformers, that adds positions to embeddings.
        text: token ids, ``(L,)``, at least 2.

    Returns:
        Terms ``(H, L, L)`` for ``H`` query heads, with the logit scale applied.

    Raises:
        ValueError: the model adds nothing to its embeddings, or changes them in another way before the first layer. Or
            queries and keys are not linear in the sum, as with rotary positions.
    """
    split = _split(model, text)
    return additive_logits(split.scaled_query(), split.key, split.softmax_scale)


@torch.no_grad()
def first_layer_linear_audit(model: PreTrainedModel, text: Tensor) -> LinearAudit:
    """Run :func:`linear_audit` on every head of the first layer of a model with the linear toy encoding.

    The layer normalises its input, so the place of a token is its position times the normaliser's scale. These places
    ``i / rms(e_i + i 1)`` rise towards 1. The places of queries also include the logit scale.

    Args:
        model: see :func:`first_layer_logits`.
        text: see :func:`first_layer_logits`.

    Raises:
        ValueError: see :func:`first_layer_logits`; or the model does not add ``i`` to every feature at position ``i``.
    """
    split = _split(model, text)
    positions = torch.arange(len(text), dtype=split.added.dtype, device=split.added.device)
    rounding = 16 * torch.finfo(split.added.dtype).eps
    if not torch.allclose(split.added, positions.unsqueeze(-1), rtol=rounding, atol=rounding):
        raise ValueError(f"{type(model).__name__} does not add each token's position, as a number, to its embedding")
    key_places = positions * split.scales[0][0, :, 0] if split.scales else positions
    query_places = key_places if split.row_scale is None else (key_places * split.row_scale).to(key_places.dtype)
    # The last token gives the projection of ones: the first token's position is 0.
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
                "first layer: the split does not cover this step"
            )
        if torch.equal(inputs, embedded):
            raise ValueError(f"{kind} adds no positions to its embeddings: there is nothing to split")
        # The vector added at a position is the same for all tokens, so read every position with another token too.
        other_text = (text + 1) % len(embedding.weight)
        others = embedding(other_text[None].to(model.device))
        other_inputs, _ = _observed(first_layer, model, other_text)
        rounding = torch.finfo(inputs.dtype).eps * (inputs.abs() + other_inputs.abs() + embedded.abs() + others.abs())
        if bool(((inputs - embedded) - (other_inputs - others)).abs().gt(4 * rounding).any()):
            raise ValueError(
                f"{kind} changes its embeddings before its first layer other than by adding positions, such as by "
                "normalising or multiplying them: the split does not cover this step"
            )
        whole, content, position, bias = (
            _projected(first_layer, scales, model, text, part)
            for part in (inputs, embedded, inputs - embedded, torch.zeros_like(inputs))
        )
    finally:
        model.train(was_training)
    # A nonlinear function differs by the size of its values; a linear function differs by rounding alone.
    tolerance = max(1e-3, 8 * torch.finfo(inputs.dtype).eps)
    split: list[Projected] = []
    for name in ("query", "key"):
        total, of_content, of_position, of_bias = (getattr(seen, name)[0] for seen in (whole, content, position, bias))
        parts = Projected(of_content - of_bias, of_position - of_bias, of_bias)
        again = parts.content + parts.position + of_bias
        if float((again - total).abs().max()) > tolerance * float(total.abs().max()):
            raise ValueError(
                f"the {name} of {kind}'s first layer is not a linear function of its embeddings: the split does not "
                "cover rotary positions or a normalisation of queries and keys"
            )
        split.append(parts)
    query, key = split
    group = len(query.content) // len(key.content)
    key = Projected(*(part.repeat_interleave(group, dim=0) for part in key if part is not None))
    return _Split(
        query,
        key,
        whole.softmax_scale,
        added=(inputs - embedded)[0],
        scales=[*scales.values()],
        row_scale=None if whole.row_scale is None else whole.row_scale[0],
        visible=problem_logits(whole).visible[0],
    )


def _first_layer(model: PreTrainedModel) -> nn.Module:
    layers = next(
        (part for part in model.base_model.modules() if isinstance(part, nn.ModuleList) and len(part) > 0), None
    )
    if layers is None:
        raise ValueError(f"{type(model).__name__} has no list of layers")
    return layers[0]


def _run(model: PreTrainedModel, text: Tensor) -> Problem:
    """Run the model up to the first layer's attention and return its problem."""

    def stop(layer: LayerAttention) -> None:
        raise _SeenError(layer.problem)

    try:
        with observed_attention(model, stop):
            model(text[None].to(model.device))
    except _SeenError as seen:
        return seen.problem
    raise ValueError(f"{type(model).__name__} computed no attention that can be observed")


def _observed(layer: nn.Module, model: PreTrainedModel, text: Tensor) -> tuple[Tensor, dict[nn.Module, Tensor]]:
    """Return a layer's inputs, ``(1, L, W)``, and the factor of each normalisation before its attention."""
    inputs: list[Tensor] = []
    scales: dict[nn.Module, Tensor] = {}

    def note_input(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs.append(args[0] if args else kwargs["hidden_states"])

    def note_scale(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        scales[module] = _scale(module, args[0])

    with ExitStack() as hooks:
        hooks.enter_context(layer.register_forward_pre_hook(note_input, with_kwargs=True))
        for part in filter(_normalises, layer.modules()):
            hooks.enter_context(part.register_forward_hook(note_scale))
        _run(model, text)
    return inputs[0], scales


def _projected(
    layer: nn.Module, scales: dict[nn.Module, Tensor], model: PreTrainedModel, text: Tensor, inputs: Tensor
) -> Problem:
    """Return the layer's queries and keys for other inputs, with its normalisations fixed to the given factors."""

    def put(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return ((inputs, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": inputs})

    def fix(module: Any, args: tuple[Any, ...], output: Tensor) -> Tensor:
        shift = getattr(module, "bias", None)
        shift = 0.0 if shift is None else shift
        return shift + (output - shift) * (scales[module] / _scale(module, args[0]))

    with ExitStack() as hooks:
        hooks.enter_context(layer.register_forward_pre_hook(put, with_kwargs=True))
        for module in scales:
            hooks.enter_context(module.register_forward_hook(fix))
        return _run(model, text)


def _normalises(module: nn.Module) -> bool:
    return isinstance(module, nn.LayerNorm | nn.RMSNorm) or type(module).__name__.endswith(("LayerNorm", "RMSNorm"))


def _scale(module: Any, x: Tensor) -> Tensor:
    """Return the reciprocal of the standard deviation, or of the root mean square, by which a normalisation divides."""
    names = ("eps", "variance_epsilon", "epsilon")
    epsilon = next(value for name in names if (value := getattr(module, name, None)) is not None)
    centred = isinstance(module, nn.LayerNorm) or type(module).__name__.endswith("LayerNorm")
    x = x - x.mean(-1, keepdim=True) if centred else x
    return (x.square().mean(-1, keepdim=True) + epsilon).rsqrt()
