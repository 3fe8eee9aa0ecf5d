"""Signal against sink: how much attention a sink keeps while the content grows (GOAT, Figure 2c)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypedDict

import torch
from torch import Tensor

from attention_priors.analysis.logits import attention_logits
from attention_priors.analysis.margins import content_range
from attention_priors.attention import SSMax
from attention_priors.attention.attend import attend_with_weights
from attention_priors.encodings import Rotary, ShawVectors
from attention_priors.models.decoder import PriorDecoderForCausalLM
from attention_priors.priors import Prior


class SinkMassRow(TypedDict):
    """One head with its content logits multiplied by one factor."""

    layer: int
    head: int
    factor: float
    signal: float
    """``ω``, the range of the content logits over the keys that a query sees, in nats; mean over queries."""
    mass: float
    """Attention weight of the first token; mean over queries, but for the first one, which sees nothing else."""


@torch.no_grad()
def sink_mass(
    query: Tensor,
    key: Tensor,
    prior: Prior | None = None,
    *,
    factors: Sequence[float],
    sink: int = 0,
    logit_scale: SSMax | None = None,
    relative: ShawVectors | None = None,
) -> Tensor:
    """The attention weight of one key, while the content logits are multiplied by rising factors.

    ``p_i(sink; f) = softmax_j(f · <q_i, k_j> / sqrt(D) + K_ij)[sink]`` under the causal mask. At ``f = 0`` it is the
    prior's own mass, ``exp(K_i,sink) / Σ_{j ≤ i} exp(K_ij)``, whatever the content: ``1 / (i + 1)`` for the uniform
    prior, ``e^b / (e^b + i)`` for a :class:`KeySink` that is a bump ``b``. With ``ω_i`` the range of the content
    ``<q_i, k_j> / sqrt(D)`` over the visible keys, ``π exp(-f ω_i) ≤ p_i ≤ π exp(f ω_i)``, ``π`` being the mass at 0.

    Source: GOAT, Theorem 5.1 (equation 25) and Figure 2c. The paper does not say how its signal was varied; here the
    content of given queries and keys is.

    Args:
        query: ``(B, H, L, D)``, with whatever encoding turns queries.
        key: ``(B, Hkv, L, D)``, likewise.
        prior: the log-prior; None is the uniform one.
        factors: what content logits are multiplied by, 0 or more.
        sink: which key, from 0. Queries before it do not see it.
        logit_scale: SSMax; it multiplies what it always multiplies.
        relative: Shaw's vectors.

    Returns:
        ``(len(factors), B, H, L)`` in the query's dtype. Memory while it runs: ``B · H · L²``.

    Raises:
        ValueError: a factor is negative or not finite, or ``sink`` is no key.
    """
    for factor in factors:
        if not 0 <= factor < float("inf"):
            raise ValueError(f"factors must be finite and at least 0, got {factor}")
    if not 0 <= sink < key.shape[2]:
        raise ValueError(f"sink must be a key from 0 to {key.shape[2] - 1}, got {sink}")
    # Values play no part in weights.
    options: dict[str, Any] = {"logit_scale": logit_scale, "relative": relative}
    return torch.stack(
        [attend_with_weights(factor * query, key, key, prior, **options)[1][..., sink] for factor in factors]
    )


@torch.no_grad()
def sink_mass_rows(
    model: PriorDecoderForCausalLM, texts: Sequence[Tensor], *, factors: Sequence[float]
) -> list[SinkMassRow]:
    """:func:`sink_mass` of the first token, for every head of a model.

    Queries and keys of each layer are those of an ordinary forward pass; the factor multiplies the content logits of
    that layer alone.

    Args:
        model: a decoder in evaluation mode.
        texts: tokens of each text, ``(L,)``, at least 2.
        factors: as for :func:`sink_mass`.

    Raises:
        ValueError: there are no texts, one is too short, or a factor is impossible.
    """
    if not texts or min(map(len, texts)) < 2:
        raise ValueError(
            f"texts must hold texts of at least 2 tokens each, got lengths {[len(text) for text in texts]}"
        )
    config = model.config
    total = torch.zeros(config.num_hidden_layers, len(factors) + 1, config.num_attention_heads, dtype=torch.float64)
    queries = 0
    for text in texts:
        queries += len(text) - 1
        for layer, (attention, query, key) in enumerate(_queries_and_keys(model, text)):
            prior = model.model.prior if attention.prior is None else attention.prior
            relative = attention.encoding if isinstance(attention.encoding, ShawVectors) else None
            mass = sink_mass(
                query, key, prior, factors=factors, logit_scale=attention.logit_scale, relative=relative
            )  # fmt: skip
            sums = torch.cat([mass[:, 0], content_range(attention_logits(query, key))], 0)[..., 1:].double().sum(-1)
            total[layer] += sums.cpu()
    means = total / queries
    return [
        {
            "layer": layer,
            "head": head,
            "factor": float(factor),
            "signal": float(factor * means[layer, -1, head]),
            "mass": float(means[layer, place, head]),
        }
        for layer in range(config.num_hidden_layers)
        for head in range(config.num_attention_heads)
        for place, factor in enumerate(factors)
    ]


def _queries_and_keys(model: PriorDecoderForCausalLM, text: Tensor) -> Iterator[tuple[Any, Tensor, Tensor]]:
    """Each layer's attention, and its queries and keys ``(1, H, L, D)`` when it reads a text."""
    layers: list[Any] = [layer.self_attn for layer in model.model.layers]
    seen: dict[Any, Tensor] = {}

    def keep(module: Any, inputs: Any, output: Tensor) -> None:
        seen[module] = output

    hooks = [part.register_forward_hook(keep) for layer in layers for part in (layer.q_proj, layer.k_proj)]
    try:
        model(text[None].to(model.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    positions = torch.arange(len(text), device=model.device)
    for layer in layers:
        query, key = (
            seen[part].unflatten(-1, (-1, layer.head_dim)).transpose(1, 2) for part in (layer.q_proj, layer.k_proj)
        )
        if isinstance(layer.encoding, Rotary):
            query, key = layer.encoding(query, positions[None]), layer.encoding(key, positions[None])
        yield layer, query, key
