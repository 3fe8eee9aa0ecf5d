"""Positions that are added to embeddings: what they do to the logits.

With ``x_i = e_i + p_i`` the logit ``<Q x_i, K x_j>`` is a sum of four: content with content, content with position, and
so on. A prior adds one term that depends on positions alone; an encoding that is added to embeddings brings all four.
In a trained model (GPT-2, OPT and their like) the logits of the first layer are split likewise.
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
"""Whether ``Q 1`` and ``K 1`` matter: i, neither; ii, ``K 1`` alone; iii, ``Q 1`` alone; iv, both."""


class Projected(NamedTuple):
    """Queries or keys by where they come from, ``(..., L, D)`` each; what expands to that will do."""

    content: Tensor
    """Of the embedding, ``Q e``."""
    position: Tensor
    """Of what was added to it, ``Q p``."""
    bias: Tensor | None = None
    """Of neither: the projection's bias, and that of a normalisation before it."""


@dataclass(frozen=True)
class AdditiveLogits:
    """Logits by what their queries and keys come from, ``(..., Lq, Lk)`` each, in nats."""

    content_content: Tensor
    """``<Q e_i, K e_j>``: what position has no part in."""
    content_position: Tensor
    """``<Q e_i, K p_j>``: some tokens look for places."""
    position_content: Tensor
    """``<Q p_i, K e_j>``: from some places, certain tokens are looked for."""
    position_position: Tensor
    """``<Q p_i, K p_j>``: what a prior would be."""
    bias: Tensor
    """All that a bias has a part in."""

    @property
    def total(self) -> Tensor:
        """Their sum."""
        return self.content_content + self.content_position + self.position_content + self.position_position + self.bias

    def spreads(self, visible: Tensor) -> dict[str, Tensor]:
        """The standard deviation of each summand over the keys that a query sees, mean over queries, ``(...)``.

        In nats. A softmax does not see what all keys have in common, so a summand matters by how it differs between
        them. Queries that see one key alone do not count.

        Args:
            visible: boolean, which expands to ``(..., Lq, Lk)``.

        Raises:
            ValueError: no query sees two keys.
        """
        visible = visible.expand(self.content_content.shape)
        number = visible.sum(-1)
        choosing = number > 1
        if not bool(choosing.any(-1).all()):
            raise ValueError("visible: no query sees two keys, so no summand can differ between them")
        found = {}
        for name, summand in vars(self).items():
            term = summand.masked_fill(~visible, 0.0)
            mean = term.sum(-1) / number.clamp(min=1)
            centred = (term - mean.unsqueeze(-1)).masked_fill(~visible, 0.0)
            variance = centred.square().sum(-1) / number.clamp(min=1)
            # The root of 0 has no gradient: where keys do not differ, as where there is one, nothing is to be learned.
            flat = variance == 0
            deviation = variance.masked_fill(flat, 1.0).sqrt().masked_fill(flat, 0.0)
            found[name] = deviation.masked_fill(~choosing, 0.0).sum(-1) / choosing.sum(-1)
        return found


def additive_logits(query: Projected, key: Projected, softmax_scale: float | None = None) -> AdditiveLogits:
    """Split the logits of queries and keys that are sums of content, position and bias. The split is exact.

    Args:
        query: ``(..., Lq, D)`` each.
        key: ``(..., Lk, D)`` each.
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
    """What positions ``p_i = i · 1`` do to the logits of one head, or of several, ``(...)``.

    The four summands are ``(Q e_i)ᵀ K e_j``, ``j (Q e_i)ᵀ K 1``, ``i (Q 1)ᵀ K e_j`` and ``i j (Q 1)ᵀ K 1``. After a
    normalisation the places ``i`` and ``j`` are no longer whole numbers, but rise with them.
    """

    logits: AdditiveLogits
    query_share: Tensor
    """Root mean square of ``i (Q 1)ᵀ K e_j`` over that of the content's summand, over visible pairs, ``(...)``; 0 where
    neither is there, inf where the content's is not."""
    key_share: Tensor
    """Likewise of ``j (Q e_i)ᵀ K 1``."""
    quadratic_share: Tensor
    """Likewise of ``i j (Q 1)ᵀ K 1``, for which both must matter: content may be blind to them, and they not to each
    other."""
    threshold: float
    """Share up to which ``Q 1`` or ``K 1`` counts as 0."""
    slope: Tensor
    """``(Q e_i)ᵀ K 1 + i (Q 1)ᵀ K 1``: nats by which the logit drifts with each place of the key, ``(..., Lq)``."""
    drift: Tensor
    """The slope times the places between the keys that the query sees, in nats, ``(..., Lq)``."""
    skewed: Tensor
    """Whether that drift exceeds the range of the content's summand, ``(..., Lq)``: then either end of the text is
    favoured, whatever stands there."""
    drowned: Tensor
    """Whether the range of ``i (Q 1)ᵀ K e_j`` over those keys exceeds that of the content's summand, ``(..., Lq)``."""
    quadratic_from: Tensor
    """``|(Q e_i)ᵀ K 1| / |(Q 1)ᵀ K 1|``: the place from which the part of the slope that grows with the query's own
    is the larger one, ``(..., Lq)``; inf where it never is."""

    @property
    def cases(self) -> list[Case]:
        """The case of each head, of those in the order in which ``(...)`` lists them."""
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
    """What becomes of attention when each token's position, as a number, is added to every feature of its embedding.

    Source: the analysis of the toy encoding ``p_i = i · 1``, whose four cases turn on whether ``Q 1 ≈ 0`` and
    ``K 1 ≈ 0``. It leaves open how near; here the summands that they make are held against the content's.

    Args:
        query_content: ``Q e_i``, ``(..., L, D)``.
        query_one: ``Q 1``, ``(..., D)``.
        key_content: ``K e_j``, ``(..., L, D)``.
        key_one: ``K 1``, ``(..., D)``.
        visible: boolean, which expands to ``(..., L, L)``.
        query_places: what multiplies ``Q 1``, which expands to ``(..., L)``; ``0, 1, 2, ...`` by default.
        key_places: what multiplies ``K 1``, likewise.
        softmax_scale: ``1/sqrt(D)`` by default.
        threshold: share of the content's root mean square up to which a summand counts as 0.

    Returns:
        Numbers in float32, or float64 if some of what is given are.

    Raises:
        ValueError: the threshold is negative, or nothing is visible.
    """
    if not 0 <= threshold < float("inf"):
        raise ValueError(f"threshold must be a finite number, at least 0, got {threshold!r}")
    if not bool(visible.any()):
        raise ValueError("visible: no query sees a key")
    # Half precision has no digits for squares that are summed over all pairs, nor for places beyond some hundreds.
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
        """The largest less the smallest over the keys that a query sees."""
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
    """The queries and keys of the first layer have been computed: the rest of the model need not run."""

    def __init__(self, problem: Problem) -> None:
        super().__init__()
        self.problem = problem


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
        scale = 1.0 if self.row_scale is None else self.row_scale.unsqueeze(-1)
        return Projected(*((part * scale).to(part.dtype) for part in self.query if part is not None))


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
    """Return what the attention of the first layer is asked."""

    def stop(layer: LayerAttention) -> None:
        raise _SeenError(layer.problem)

    try:
        with observed_attention(model, stop):
            model(text[None].to(model.device))
    except _SeenError as seen:
        return seen.problem
    raise ValueError(f"{type(model).__name__} computed no attention that can be seen")


def _observed(layer: nn.Module, model: PreTrainedModel, text: Tensor) -> tuple[Tensor, dict[nn.Module, Tensor]]:
    """What goes into a layer, ``(1, L, W)``, and what each normalisation before its attention multiplies by."""
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
    """The layer's queries and keys for other inputs, its normalisations multiplying by what is given."""

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
    """One over the standard deviation, or the root mean square, that a normalisation divides by."""
    names = ("eps", "variance_epsilon", "epsilon")
    epsilon = next(value for name in names if (value := getattr(module, name, None)) is not None)
    centred = isinstance(module, nn.LayerNorm) or type(module).__name__.endswith("LayerNorm")
    x = x - x.mean(-1, keepdim=True) if centred else x
    return (x.square().mean(-1, keepdim=True) + epsilon).rsqrt()
