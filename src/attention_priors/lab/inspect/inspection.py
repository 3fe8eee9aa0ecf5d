"""Inspection of a model as one JSON-serialisable dictionary, including the passkey prompt of BAM's Figure 4."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from pydantic import Field
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from attention_priors._io import with_nulls
from attention_priors.attention import SSMax
from attention_priors.attention.geometry import block_length
from attention_priors.attention.problem import Problem
from attention_priors.attention.reference import reference
from attention_priors.encodings import LinearToy
from attention_priors.hf.loading import check_positions, number_of_positions
from attention_priors.hf.observe import LayerAttention, observed_attention
from attention_priors.lab.inspect.additive import LinearAudit, first_layer_linear_audit, first_layer_logits
from attention_priors.lab.inspect.load import Inspected
from attention_priors.lab.inspect.posterior import AttentionLogits, decompose, problem_logits
from attention_priors.lab.inspect.priors import (
    REACH_LENGTHS,
    curve_distances,
    effective_reach,
    head_roles,
    logit_scale_rows,
    prior_rows,
    prior_term_rows,
)
from attention_priors.lab.inspect.sinks import content_range, sink_margin
from attention_priors.lab.machine import now, processor, versions
from attention_priors.lab.strict_yaml import Strict
from attention_priors.lab.tasks import PasskeyTexts
from attention_priors.lab.tasks.passkey import PasskeySample
from attention_priors.priors import Prior, Uniform

REACH_SHARES = (0.5, 0.9, 0.99)
MAPS = 6
"""Default number of attention maps, if no heads are named."""
LONGEST = 2**24
"""Longest text for which priors are described, in tokens; each head computes a number per token."""
_READ = 512
"""Default number of tokens to read from a text."""
_AUDITED = 256
"""Number of tokens of a text for the additive split."""
_CHARACTERS = 16
"""Characters to tokenize at first for each wanted token, so that a long book is not tokenized whole."""
_UNREAD = 16
"""Number of arbitrary tokens to read without a tokenizer, only to make the model compute attention."""

_BESIDE = ("logit_scale", "null_logit", "key_bias")
"""Arguments of :func:`attend`, other than the prior, in which layers may differ."""

Say = Callable[[str], None]


class InspectionPlan(Strict):
    """Settings of an inspection."""

    length: int = Field(default=4096, ge=2, le=LONGEST)
    """Text length in tokens for which priors are described."""
    text: str | None = None
    """Text to read; None for no text."""
    text_name: str = ""
    """Source of the text."""
    text_tokens: int | None = Field(default=None, ge=4)
    """Number of tokens to read. By default 512, or the model's number of positions if smaller."""
    heads: tuple[tuple[int, int], ...] | None = None
    """Heads whose attention maps are shown, as pairs ``(layer, head)``; None for the most telling heads."""


def inspect_model(given: Inspected, plan: InspectionPlan, say: Say = lambda _: None) -> dict[str, Any]:
    """Inspect a model: its priors, their share in attention on a text, and its attention to a pass key.

    Args:
        given: model, in evaluation mode.
        plan: settings of the inspection.
        say: callback for progress messages.

    Returns:
        Dictionary for JSON, except that the maps of ``passkey`` hold ``weights`` as tensors:

        - General. ``format``, ``model``, ``title``, ``kind``, ``positions``, ``parameters``, ``length``.
        - ``layers``. Each layer's name and heads, whether it is ``causal``, whether it has its own mask and a prior,
          and the other arguments ``beside`` the prior.
        - ``priors``. One row per head: its curve as learned, and its role and reach as attention applies the prior,
          with any logit scale. ``reach`` is by text length, ``reach_at_length`` at ``length``.
        - ``prior_terms`` and ``logit_scales``. Rows of :func:`prior_term_rows` and :func:`logit_scale_rows`.
        - ``text``, ``passkey`` and ``additive``. Each holds only ``reason`` if the part cannot be computed. The maps of
          ``passkey`` say why each head was chosen.

    Raises:
        ValueError: the model's attention cannot be observed, or ``plan.heads`` names an unknown head.
    """
    say("Reading the text")
    tokens, why_no_text = _tokens(given, plan)
    layers: list[LayerAttention] = []
    text_heads: list[dict[str, Any]] = []
    unaccounted: list[str] = []

    def see(layer: LayerAttention) -> None:
        problem = layer.problem
        if _is_cross(problem):
            return
        if why_no_text is None:
            try:
                text_heads.extend({"layer": len(layers), **row} for row in head_accounts(problem))
            except ValueError as error:  # the other parts of the inspection do not need these rows
                unaccounted.append(f"in layer {len(layers)}, {layer.name}, {error}")
        layers.append(layer)

    with observed_attention(given.model, see):
        given.read(tokens)
    why_no_accounts = why_no_text or next(iter(unaccounted), None)
    heads = {(row, head) for row, layer in enumerate(layers) for head in range(layer.problem.query.shape[1])}
    unknown = sorted({*(plan.heads or ())} - heads)
    if unknown:
        raise ValueError(
            f"heads: there is no head {unknown[0][1]} of layer {unknown[0][0]}; {given.name} has {len(layers)} layers "
            f"with up to {max(head for _, head in heads) + 1} heads"
        )
    say("Describing the priors")
    own = [_prior_of(layer) for layer in layers]
    scales = [layer.problem.logit_scale for layer in layers]
    described = [_layer(layer) for layer in layers]
    priors = [
        row
        for layer, (prior, scale) in enumerate(zip(own, scales, strict=True))
        for row in _priors(layer, prior, scale, plan.length, causal=described[layer]["causal"])
    ]
    found: dict[str, Any] = {
        "format": 1,
        "model": given.name,
        "title": given.title,
        "kind": type(given.model).__name__,
        "positions": given.positions(),
        "parameters": sum(parameter.numel() for parameter in given.model.parameters()),
        "length": plan.length,
        "layers": described,
        "priors": priors,
        "prior_terms": prior_term_rows([*own], length=plan.length, logit_scales=scales),
        "logit_scales": logit_scale_rows([layer.module for layer in layers]),
        "text": {"reason": why_no_accounts}
        if why_no_accounts
        else {"name": plan.text_name, "tokens": len(tokens), "heads": text_heads},
    }
    say("Reading the passkey prompt")
    found["passkey"] = _passkey(given, plan, {(row["layer"], row["head"]): row["role"] for row in priors})
    say("Splitting the first layer's logits")
    found["additive"] = _additive(given, tokens, why_no_text, causal=described[0]["causal"])
    found |= {
        "created": now(),
        "versions": versions(("attention-priors", "torch", "transformers")),
        "processor": processor(),
    }
    return found


# ---- attention of the heads on a text


@torch.no_grad()
def head_accounts(problem: Problem) -> list[dict[str, Any]]:
    """Describe the attention of every head over all queries of the first row of a batch.

    The first key is the key at index 0. If the row starts with padding or holds several documents, some queries do not
    see this key and lower its shares. To measure a text by its own first key, give the text its own row, without left
    padding.

    Memory: one block of queries at a time.

    Returns:
        A dict for each head. Numbers are means over the queries that see at least two keys, unless stated otherwise:

        - ``head``. Index of the head.
        - ``position_share``. Share of the prior in the posterior, 0 (content decides) to 1 (prior decides); see
          :class:`Decomposition`.
        - ``agreement``. Agreement of content and prior, ``ln(n Z)``, in nats.
        - ``divergence_from_position``. ``KL(p ‖ p_position)``, in nats: the contribution of the content.
        - ``divergence_from_content``. ``KL(p ‖ p_content)``, in nats: the contribution of the prior.
        - ``content_range``. Range ``ω`` of the content logits, in nats.
        - ``inverse_temperature``. Logit scale ``γ``, which multiplies the content and, unless it leaves the prior out,
          the prior; 1 without a scale.
        - ``entropy``. Entropy of the attention weights, in nats.
        - ``distance``. Mean absolute distance between the query and its keys, weighted by attention, in tokens.
        - ``first``. Weight of the key at index 0, even if this key is padding or belongs to another document.
        - ``sink``. Share of the queries for which the first key leads all others, 0 to 1. A query that does not see
          the first key counts as not led by it.
        - ``sink_content`` and ``sink_position``. Content part and prior part of the first key's lead, in nats: medians
          over the queries that it leads, None without such queries. The median is robust to a prior that gives a
          query's own key far less than all others.
        - ``nothing``. Weight of the null key, 0 without one. The other numbers describe the remaining weights,
          normalised to sum 1.
        - ``forgotten``. Mean ``-ln f`` of a forget gate over the text, in nats per token: the mean rise of the key bias
          per key. None without a key bias.

    Raises:
        ValueError: no query sees two keys.
    """
    geometry = problem.geometry
    key_positions = geometry.key_positions[:1].double()
    found: dict[str, list[Tensor]] = defaultdict(list)
    step = block_length(problem.query.shape[0] * problem.query.shape[1] * problem.key.shape[2])
    for start in range(0, geometry.num_queries, step):
        part = problem.rows(slice(start, start + step))
        logits = _first_text(part)
        parts = decompose(logits)
        margin = sink_margin(logits, 0)
        several = logits.visible.sum(-1) >= 2
        away = (part.geometry.query_positions[:1].double().unsqueeze(-1) - key_positions.unsqueeze(-2)).abs()
        leads = margin.total > 0
        of_queries = {
            "position_share": parts.position_share,
            "agreement": parts.agreement,
            "divergence_from_position": parts.divergence_from_position,
            "divergence_from_content": parts.divergence_from_content,
            "content_range": content_range(logits),
            "inverse_temperature": logits.inverse_temperature.double(),
            "entropy": -torch.special.xlogy(parts.posterior, parts.posterior).sum(-1),
            "distance": (parts.posterior * away).sum(-1),
            "first": parts.posterior[..., 0],
            "sink": leads.double(),
            "sink_content": margin.content.masked_fill(~leads, torch.nan),
            "sink_position": margin.position.masked_fill(~leads, torch.nan),
            "nothing": _weight_of_nothing(part),
        }
        for name, values in of_queries.items():
            found[name].append(values.masked_fill(~several, torch.nan).cpu())
    whole = {name: torch.cat(values, -1) for name, values in found.items()}
    if bool(whole["entropy"].isnan().all(-1).any()):
        raise ValueError("no query of the text sees two keys: its attention cannot be described")
    means = {
        name: with_nulls((values.nanmedian(-1).values if name.startswith("sink_") else values.nanmean(-1)).tolist())
        for name, values in whole.items()
    }
    return [
        {"head": head} | dict(zip(means, own, strict=True)) | {"forgotten": _forgotten(problem, head)}
        for head, own in enumerate(zip(*means.values(), strict=True))
    ]


def _weight_of_nothing(problem: Problem) -> Tensor:
    """Return the weight of the null key for each query of the first row, ``(H, Lq)``."""
    if problem.null_logit is None:
        return problem.query.new_zeros(problem.query.shape[1:3], dtype=torch.float64)
    return torch.sigmoid(problem.null_logit[0].double() - reference(problem)[1][0].double())


def _forgotten(problem: Problem, head: int) -> float | None:
    biases = problem.key_bias
    return None if biases is None else float(biases[0, head].diff().mean())


def _first_text(problem: Problem) -> AttentionLogits:
    """Return the logits of the first row in float64, ``(H, Lq, Lk)``."""
    logits = problem_logits(problem)
    content, position = logits.content[0].double(), logits.position[0].double()
    return AttentionLogits(content, position, logits.visible[0], logits.inverse_temperature[0])


# ---- parts


def _tokens(given: Inspected, plan: InspectionPlan) -> tuple[Tensor, str | None]:
    """Return the tokens to read, and why they are arbitrary, or None if they are the plan's text."""
    if plan.text is None or given.tokenizer is None:
        why = given.without_tokenizer if given.tokenizer is None else "no text was given"
        embedding: Any = given.model.get_input_embeddings()
        check_positions(given.model, _UNREAD)
        return torch.arange(_UNREAD) % len(embedding.weight), why
    wanted = min(_READ, number_of_positions(given.model) or _READ) if plan.text_tokens is None else plan.text_tokens
    end = _CHARACTERS * wanted
    while len(read := given.tokenizer.encode(plan.text[:end])) < 2 * wanted and end < len(plan.text):
        end *= 2  # twice the wanted tokens: cutting a text may change its last tokens
    tokens = torch.tensor(read[:wanted], dtype=torch.int64)
    if len(tokens) < 4:
        raise ValueError(f"text has {len(tokens)} tokens; at least 4 are needed")
    check_positions(given.model, len(tokens))
    return tokens, None


def _is_cross(problem: Problem) -> bool:
    """Whether this is cross-attention."""
    return not problem.geometry.causal and problem.query.shape[2] != problem.key.shape[2]


def _layer(layer: LayerAttention) -> dict[str, Any]:
    """Describe a layer for JSON."""
    problem = layer.problem
    geometry = problem.geometry
    causal, own_mask = geometry.causal, False
    if geometry.attn_mask is not None:
        # Some models build their own masks, causal masks too, so read causality off the visible pairs.
        allowed = geometry.allowed(slice(None), slice(None))
        assert allowed is not None
        ahead = geometry.key_positions[:, None, None, :] > geometry.query_positions[:, None, :, None]
        own_mask = not bool(allowed.all())
        causal = causal or not bool((allowed & ahead).any())
    # Observing a plain model gives every layer a uniform prior; this prior does not count.
    has_prior = problem.prior is not None and any(term.name != Uniform.name for term in problem.prior.terms())
    return {
        "name": layer.name,
        "heads": problem.query.shape[1],
        "causal": causal,
        "own_mask": own_mask,
        "has_prior": has_prior,
        "scales_prior": has_prior and problem.scales_prior,
        "beside": [name.replace("_", " ") for name in _BESIDE if getattr(problem, name) is not None],
    }


def _prior_of(layer: LayerAttention) -> Prior:
    prior = layer.problem.prior
    return Uniform(layer.problem.query.shape[1]) if prior is None else prior


def _priors(layer: int, prior: Prior, scale: SSMax | None, length: int, *, causal: bool) -> list[dict[str, Any]]:
    """Describe the prior of each head of a layer, with roles and reach as attention applies the prior."""
    roles = head_roles(prior, length, logit_scale=scale)
    reach = {
        size: effective_reach(prior, size, REACH_SHARES, logit_scale=scale).T.tolist()
        for size in {*REACH_LENGTHS, length}
    }
    rows: list[dict[str, Any]] = [dict(row) for row in prior_rows([prior], length=length)]
    ahead = []
    if not causal:  # at the distances of the curve
        places = torch.tensor(curve_distances(length))
        ahead = prior.log_prior(torch.zeros(1, dtype=torch.int64), places, torch.float64)[:, 0].tolist()
    for head, row in enumerate(rows):
        row["layer"], row["role"] = layer, roles[head]
        row["reach"] = {str(size): reach[size][head] for size in REACH_LENGTHS}
        row["reach_at_length"] = reach[length][head]
        if ahead:
            row["log_prior_ahead"] = ahead[head]
    return rows


def _passkey(given: Inspected, plan: InspectionPlan, roles: dict[tuple[int, int], str]) -> dict[str, Any]:
    """Return each head's attention to the pass key of a prompt, and attention maps of some heads."""
    if given.tokenizer is None:
        return {"reason": given.without_tokenizer}
    if given.is_encoder_decoder or given.is_encoder:
        return {"reason": "a model with an encoder is not asked for pass keys"}
    try:
        sample = figure_4_prompt(given.tokenizer)
        check_positions(given.model, len(sample.tokens))
    except ValueError as error:
        return {"reason": str(error)}
    rows, answered = _needle_weights(given, sample)
    chosen = _say_most(rows, roles) if plan.heads is None else dict.fromkeys(plan.heads, "named")
    ends = (0, sample.needle_start, sample.needle_end, sample.question_start, sample.answer_start, len(sample.tokens))
    parts = dict(zip(("instruction", "needle", "filler", "question", "answer"), pairwise(ends), strict=True))
    named = {
        f"{part}_tokens": [_token(given, token) for token in sample.tokens[slice(*parts[part])].tolist()]
        for part in ("needle", "question", "answer")
    }
    del parts["answer"]
    return {
        "tokens": len(sample.prompt),
        **{part: [*ends] for part, ends in parts.items()},
        **named,
        "key": str(sample.key),
        "answered": answered,
        "heads": rows,
        "maps": _maps(given, sample, chosen),
    }


def _token(given: Inspected, token: int) -> str:
    """Return a token as text for display on one line."""
    assert given.tokenizer is not None
    return str(given.tokenizer.decode([token])).replace("\n", "⏎").replace(" ", "␣")


def _needle_weights(given: Inspected, sample: PasskeySample) -> tuple[list[dict[str, Any]], float]:
    """Return the attention of the question's last token, per head, and the share of right answer tokens.

    The rows hold the weights on the whole needle, on the first token, and the highest on a single needle token.
    """
    rows: list[dict[str, Any]] = []
    last = sample.answer_start - 1
    needle = slice(sample.needle_start, sample.needle_end)

    def see(layer: LayerAttention) -> None:
        weights = _weights(layer.problem.rows(slice(last, last + 1)))[:, 0]
        parts = torch.stack([weights[:, needle].sum(-1), weights[:, 0], weights[:, needle].amax(-1)], -1)
        for head, found in enumerate(parts.tolist()):
            own = zip(("needle", "first", "highest"), found, strict=True)
            rows.append({"layer": layer.index, "head": head, **dict(own)})

    with observed_attention(given.model, see):
        logits = given.read(sample.tokens[:-1]).logits[0]
    answers = logits[last:].argmax(-1).cpu()
    return rows, float((answers == sample.answer).double().mean())


def _weights(problem: Problem) -> Tensor:
    """Return the attention weights of the first row, ``(H, Lq, Lk)``."""
    return reference(problem)[2][0]


def _say_most(rows: Sequence[dict[str, Any]], roles: dict[tuple[int, int], str]) -> dict[tuple[int, int], str]:
    """Choose the heads to show, with the reason for each.

    Chosen are the heads with most weight on the needle, then a head of each other role, then the heads with least
    weight.
    """
    ranked = [(row["layer"], row["head"]) for row in sorted(rows, key=lambda row: -row["needle"])]
    chosen = dict.fromkeys(ranked[: MAPS // 2], "most")
    for role in dict.fromkeys(roles.values()):
        if role not in {roles[head] for head in chosen}:
            chosen[next(head for head in ranked if roles[head] == role)] = "kind"
    rest = [head for head in reversed(ranked) if head not in chosen]
    return chosen | dict.fromkeys(rest[: max(0, MAPS - len(chosen))], "least")


def _maps(given: Inspected, sample: PasskeySample, chosen: Mapping[tuple[int, int], str]) -> list[dict[str, Any]]:
    """Return attention maps over the prompt, ``weights`` ``(L, L)``, in the order of the chosen heads."""
    maps: dict[tuple[int, int], Tensor] = {}

    def see(layer: LayerAttention) -> None:
        wanted = [head for number, head in chosen if number == layer.index]
        if wanted:
            blocks = [_weights(layer.problem.rows(slice(start, start + 64)))[wanted] for start in range(0, length, 64)]
            whole = torch.cat(blocks, 1).to(torch.float16).cpu()
            maps.update({(layer.index, head): whole[place] for place, head in enumerate(wanted)})

    length = len(sample.prompt)
    with observed_attention(given.model, see):
        given.read(sample.prompt)
    return [
        {"layer": layer, "head": head, "why": why, "weights": maps[layer, head]}
        for (layer, head), why in chosen.items()
    ]


def _additive(given: Inspected, tokens: Tensor, why_no_text: str | None, *, causal: bool) -> dict[str, Any]:
    """Return how much each term of the first layer's logits varies over the keys, per head, in nats."""
    if given.is_encoder_decoder:
        return {"reason": "the split does not cover models with an encoder and a decoder"}
    tokens = tokens[:_AUDITED]
    try:
        split = first_layer_logits(given.model, tokens)
    except ValueError as error:
        return {"reason": str(error)}
    if why_no_text is not None:
        return {"reason": why_no_text}  # a split on arbitrary tokens would be meaningless
    visible = torch.ones(len(tokens), len(tokens), dtype=torch.bool, device=split.bias.device)
    visible = visible.tril() if causal else visible
    numbers = {name: values.tolist() for name, values in split.spreads(visible).items()}
    found: dict[str, Any] = {"tokens": len(tokens)}
    if given.positions() == LinearToy.name:
        audit = first_layer_linear_audit(given.model, tokens)
        found["threshold"] = audit.threshold
        numbers |= _linear(audit, visible)
    of_heads = enumerate(zip(*numbers.values(), strict=True))
    return found | {"heads": [{"head": head, **dict(zip(numbers, own, strict=True))} for head, own in of_heads]}


def _linear(audit: LinearAudit, visible: Tensor) -> dict[str, list[Any]]:
    """Return each head's case and slope, and its shares of skewed and drowned queries, for the linear toy encoding."""
    apart = visible.sum(-1) - 1  # tokens between the first and the last visible key
    several = apart > 0
    return {
        "case": audit.cases,
        "slope": (audit.drift[..., several] / apart[several]).mean(-1).tolist(),
        "skewed": audit.skewed[..., several].double().mean(-1).tolist(),
        "drowned": audit.drowned[..., several].double().mean(-1).tolist(),
    }


FILLER = 768
"""Tokens of filler between the pass key and the question."""
_SEED = 4


def figure_4_prompt(tokenizer: PreTrainedTokenizerBase) -> PasskeySample:
    """Return a passkey prompt: instruction, pass key, 768 tokens of filler, question, and the answer to predict.

    Source: BAM, Figure 4, a prompt of 32 + 25 + 768 + 16 = 841 tokens. With the paper's tokenizer (Mistral-7B v0.3),
    this prompt has 32 + 28 + 768 + 13 = 841 tokens. Line ends make up 3 tokens of the pass key and 2 of the question,
    and the 5 tokens of the answer are not counted. Without line ends and with the answer, the parts have 25 and 16
    tokens. With other tokenizers, only the filler keeps its number of tokens.

    Raises:
        ValueError: the tokenizer merges a pass key with the words before it.
    """
    task = PasskeyTexts(tokenizer, wording="long")
    length = task.minimum_length + FILLER
    while True:
        sample = task.sample(length, 0.0, torch.Generator().manual_seed(_SEED))
        missing = FILLER - (sample.question_start - sample.needle_end)
        # A tokenizer that merges digits may need fewer tokens for this key than for the longest key.
        if not missing:
            return sample
        length += missing
