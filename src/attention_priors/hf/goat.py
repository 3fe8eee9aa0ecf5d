"""Conversion of attention layers of GOAT's package (``goat-attention``, 0.1.1) to :class:`PriorAttention`.

The package reserves ``2R + 1`` of a head's ``D`` dimensions for positions (``2R`` without a key bias). Content is the
first ``D_c = D - 2R - 1`` dimensions of queries and keys; values have all ``D``. The logit of query ``i`` and key
``j``, with ``d = i - j``, is the formula below.

``q_c · k_c / sqrt(D_c) + Σ_r λ_sym,r cos(ω_r d) + λ_asym,r sin(ω_r d) + gain · MLP(j) + bump · 1[j = 0]``

With ``is_causal=True``, ``softplus(recency_slope_raw) · j`` is added. The converted layer has :class:`Spectral` and
:class:`KeySink` as priors. In its projections, rows for positions are 0, and content rows of queries are scaled by
``sqrt(D / D_c)``. ``λ``, gain, bump and slope belong to key heads; each query head gets a copy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from attention_priors.checks import check_positive_integers
from attention_priors.models.layer import PriorAttention
from attention_priors.priors import KeySink, Prior, Spectral

LARGEST_WEIGHT = 1e6
"""Bound on spectral weights in nats, as in the package."""


def load_goat_attention(
    source: nn.Module | Mapping[str, Tensor],
    *,
    causal: bool,
    train_length: int | None = None,
    dropout: float | None = None,
    batch_first: bool | None = None,
) -> PriorAttention:
    """Convert a ``GoatAttention`` of the package ``goat-attention`` to an equivalent :class:`PriorAttention`.

    A state dict does not hold every setting. Settings of a module are read and checked. For a state dict, the package's
    defaults are assumed: one-dimensional positions, ``prior_gate="none"``, ``add_zero_attn=False`` and a prior scale of
    1.

    The package divides positions by ``training_seq_len``. Without ``training_seq_len``, the divisor is the number of
    keys of each call minus one. In that case pass the divisor as ``train_length``. Outputs are then equal for calls
    with ``train_length + 1`` keys, and differ for others, as the package's own prior does.

    Args:
        source: the module, or its state dict.
        causal: whether the layer is called with ``is_causal=True``, for which the package adds its slopes.
        train_length: ``training_seq_len`` in tokens. Required for a key bias, unless the module holds it.
        dropout: dropout of attention weights. By default the module's, or 0.
        batch_first: as in :class:`PriorAttention`. By default the module's, or False as in the package.

    Returns:
        The layer, in the module's training or evaluation mode. Call it with ``is_causal=causal``.

    Raises:
        ValueError: the weights are not those of a ``GoatAttention``, contradict each other, or have no equivalent.
    """
    module = source if isinstance(source, nn.Module) else None
    state = dict(source.state_dict() if isinstance(source, nn.Module) else source)
    if module is not None:
        _check_settings(module)
        own_length: Any = getattr(module, "training_seq_len", None)
        if train_length is not None and own_length is not None and train_length != own_length:
            raise ValueError(f"train_length={train_length}, but the module has training_seq_len={own_length}")
        train_length = own_length if train_length is None else train_length
        dropout = float(getattr(module, "dropout", 0.0)) if dropout is None else dropout
        batch_first = bool(getattr(module, "batch_first", False)) if batch_first is None else batch_first
    for name in ("lambda_sym", "lambda_asym", "prior_gate_scale_raw", "out_proj.weight"):
        if name not in state:
            raise ValueError(f"source must be a GoatAttention of goat-attention, or its state dict; it has no {name}")
    if "bias_k" in state:
        raise ValueError("source has add_bias_kv=True, and PriorAttention has no extra key and value")
    heads, (kv_heads, frequencies) = len(state["prior_gate_scale_raw"]), state["lambda_sym"].shape
    width = len(state["out_proj.weight"])
    has_sink = "key_bias.fc1.weight" in state
    content = width // heads - 2 * frequencies - has_sink
    if width % heads or heads % kv_heads or content < 1:
        raise ValueError(
            f"{heads} heads, {kv_heads} key heads, width {width} and {frequencies} frequencies are inconsistent"
        )
    prior: Prior | None = _spectral(state, heads) if frequencies else None
    if has_sink:
        if train_length is None:
            raise ValueError(
                "train_length is required: the key bias divides positions by training_seq_len, which the state dict "
                "does not hold. If training_seq_len was None, pass the number of keys minus one; outputs are equal for "
                "that number of keys only"
            )
        check_positive_integers(train_length=train_length)
        sink = _sink(state, heads, train_length, causal=causal)
        prior = sink if prior is None else prior + sink
    query, key, value = (_projection(state, name, heads, kv_heads) for name in ("q_proj", "k_proj", "v_proj"))
    has_bias = "bias" in query
    layer = PriorAttention(
        width,
        heads,
        dropout=dropout or 0.0,
        bias=has_bias,
        kdim=key["weight"].shape[1],
        vdim=value["weight"].shape[1],
        batch_first=bool(batch_first),
        device=query["weight"].device,
        dtype=query["weight"].dtype,
        prior=None if prior is None else prior.to(query["weight"].device),
        num_kv_heads=kv_heads,
    )
    query = {name: _content_rows(rows, heads, content, scaled=True) for name, rows in query.items()}
    key = {name: _content_rows(rows, kv_heads, content, scaled=False) for name, rows in key.items()}
    if hasattr(layer, "in_proj_weight"):
        projections = {"in_proj_weight": torch.cat([part["weight"] for part in (query, key, value)])}
    else:
        projections = {f"{name}_proj_weight": part["weight"] for name, part in (("q", query), ("k", key), ("v", value))}
    if has_bias:
        projections["in_proj_bias"] = torch.cat([part["bias"] for part in (query, key, value)])
    projections |= {name: tensor for name, tensor in state.items() if name.startswith("out_proj.")}
    layer.load_state_dict(
        projections | {f"prior.{k}": v for k, v in prior.state_dict().items()} if prior else projections
    )
    return layer.train(module.training if module is not None else True)


def _check_settings(module: Any) -> None:
    """Raise a ValueError if a setting that a state dict does not hold changes the formula."""
    wanted = {"prior_gate": "none", "pos_encoding": "1d", "add_zero_attn": False, "goat_prior_scale": 1.0}
    for name, value in wanted.items():
        found = getattr(module, name, value)
        found = float(found) if isinstance(found, Tensor) else found
        if found != value:
            raise ValueError(f"source has {name}={found!r}, which PriorAttention does not support; expected {value!r}")


def _spectral(state: Mapping[str, Tensor], heads: int) -> Spectral:
    frequencies = state["lambda_sym"].shape[1]
    prior = Spectral(heads, frequencies, base=_base(state, "rel_freqs_base", frequencies))
    with torch.no_grad():
        for parameter, name in ((prior.alpha, "lambda_sym"), (prior.beta, "lambda_asym")):
            parameter.copy_(_per_query_head(state[name], heads).clamp(-LARGEST_WEIGHT, LARGEST_WEIGHT))
    return prior


def _sink(state: Mapping[str, Tensor], heads: int, train_length: int, *, causal: bool) -> KeySink:
    first = state["key_bias.fc1.weight"]
    hidden, features = first.shape
    frequencies = (features - 2) // 2
    prior = KeySink(
        heads,
        train_length,
        num_frequencies=max(frequencies, 1),
        hidden_size=hidden,
        base=_base(state, "abs_freqs_base", frequencies),
        init="recency" if causal else "uniform",
        activation="silu",
    )
    cosines, sines, others = first.split([frequencies, frequencies, 2], dim=1)
    if not frequencies:
        # KeySink needs at least one frequency; weights of 0 disable it.
        cosines = sines = first.new_zeros(hidden, 1)
    into = {"0.weight": torch.cat([sines, cosines, others], dim=1), "0.bias": state["key_bias.fc1.bias"]}
    out_of = {f"2.{name}": state[f"key_bias.fc2.{name}"] for name in ("weight", "bias")}
    prior.mlp.load_state_dict(into | out_of)
    with torch.no_grad():
        prior.gain.copy_(_per_query_head(state["sink_gain"], heads))
        prior.bump.copy_(_per_query_head(state["sink_bump"], heads))
        if causal:
            prior.slope.copy_(_per_query_head(softplus(state["recency_slope_raw"]), heads))
    return prior


def _base(state: Mapping[str, Tensor], name: str, count: int) -> float:
    """Return the base of geometric frequencies ``base^(-r / (R-1))``."""
    if count < 2:
        return 10000.0  # a single frequency is 1 for any base
    frequencies = state[name].double()
    base = float(1 / frequencies[-1])
    expected = torch.logspace(0, -1, count, base=base, dtype=torch.float64) if base > 1 else frequencies * math.nan
    if len(frequencies) != count or not torch.allclose(frequencies.cpu(), expected, rtol=1e-5):
        raise ValueError(f"{name} must hold {count} frequencies base^(-r / {count - 1}), got {frequencies.tolist()}")
    return base


def _per_query_head(values: Tensor, heads: int) -> Tensor:
    return values.repeat_interleave(heads // len(values), dim=0)


def _projection(state: Mapping[str, Tensor], name: str, heads: int, kv_heads: int) -> dict[str, Tensor]:
    """Return ``weight``, and ``bias`` if present, of a projection, which may be fused with the others."""
    if "in_proj.weight" not in state:
        return {kind: state[f"{name}.{kind}"] for kind in ("weight", "bias") if f"{name}.{kind}" in state}
    width = len(state["out_proj.weight"])
    of_keys = width // heads * kv_heads
    place = ("q_proj", "k_proj", "v_proj").index(name)
    return {
        kind: state[f"in_proj.{kind}"].split([width, of_keys, of_keys])[place]
        for kind in ("weight", "bias")
        if f"in_proj.{kind}" in state
    }


def _content_rows(rows: Tensor, heads: int, content: int, *, scaled: bool) -> Tensor:
    """Return a projection's rows with zeros in the rows for positions, which no gradient then changes."""
    by_head = rows.unflatten(0, (heads, -1)).clone()
    by_head[:, content:] = 0
    if scaled:
        by_head *= math.sqrt(by_head.shape[1] / content)
    return by_head.flatten(0, 1)
