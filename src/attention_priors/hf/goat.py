"""Attention layers of GOAT's published package (``goat-attention``, 0.1.1) as :class:`PriorAttention`.

Of a head's ``D`` dimensions that package gives ``2R + 1`` to positions (``2R`` without a key bias): content is the
first ``D_c = D - 2R - 1`` of queries and keys, values are all ``D``. With ``d = i - j``, the logit of query ``i`` and
key ``j`` is

``q_c · k_c / sqrt(D_c) + Σ_r λ_sym,r cos(ω_r d) + λ_asym,r sin(ω_r d) + gain · MLP(j) + bump · 1[j = 0]``

and ``softplus(recency_slope_raw) · j`` where it is called with ``is_causal=True``. That is :class:`Spectral` and
:class:`KeySink` beside projections whose rows for positions are 0, and whose rows for content are longer by
``sqrt(D / D_c)`` on the query's side. ``λ``, gain, bump and slope belong to key heads; here each query head has a copy.
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
"""In nats; the package cuts off spectral weights there."""


def load_goat_attention(
    source: nn.Module | Mapping[str, Tensor],
    *,
    causal: bool,
    train_length: int | None = None,
    dropout: float | None = None,
    batch_first: bool | None = None,
) -> PriorAttention:
    """Make a :class:`PriorAttention` that computes what a ``GoatAttention`` of the package ``goat-attention`` computes.

    A state dict does not hold everything. For the module itself the rest is read off it and checked. For a state dict
    it is assumed: one-dimensional positions, ``prior_gate="none"``, ``add_zero_attn=False`` and a prior scale of 1,
    which are the package's defaults.

    The package divides positions by ``training_seq_len``, or without one by the number of keys of each call less one.
    Then give that number as ``train_length``: outputs are equal for calls with ``train_length + 1`` keys, and differ
    for others, as the package's own prior does.

    Args:
        source: the module, or its state dict.
        causal: whether it is called with ``is_causal=True``, which is when the package adds its slopes.
        train_length: ``training_seq_len`` in tokens; needed where there is a key bias, unless the module has it.
        dropout: of attention weights; the module's, or 0.
        batch_first: as in :class:`PriorAttention`; the module's, or False as is the package's default.

    Returns:
        The layer, in training or evaluation mode as the module is. Call it with ``is_causal=causal``.

    Raises:
        ValueError: if the weights are not such a module's, do not fit each other, or compute something else.
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
            raise ValueError(f"source has no {name}; it is not (the state dict of) a GoatAttention of goat-attention")
    if "bias_k" in state:
        raise ValueError("source has add_bias_kv=True: its extra key and value have no place in PriorAttention")
    heads, (kv_heads, frequencies) = len(state["prior_gate_scale_raw"]), state["lambda_sym"].shape
    width = len(state["out_proj.weight"])
    has_sink = "key_bias.fc1.weight" in state
    content = width // heads - 2 * frequencies - has_sink
    if width % heads or heads % kv_heads or content < 1:
        raise ValueError(
            f"{heads} heads, {kv_heads} key heads, a width of {width} and {frequencies} frequencies do not fit together"
        )
    prior: Prior | None = _spectral(state, heads) if frequencies else None
    if has_sink:
        if train_length is None:
            raise ValueError(
                "train_length is needed: the key bias divides positions by training_seq_len, which the state dict does "
                "not hold; if that was None, by the number of keys less one, and outputs are equal at that number alone"
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
    """Raise a ValueError where a module has settings, which its state dict does not hold, of another formula."""
    wanted = {"prior_gate": "none", "pos_encoding": "1d", "add_zero_attn": False, "goat_prior_scale": 1.0}
    for name, value in wanted.items():
        found = getattr(module, name, value)
        found = float(found) if isinstance(found, Tensor) else found
        if found != value:
            raise ValueError(f"source has {name}={found!r}, which PriorAttention does not compute; expected {value!r}")


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
        # KeySink has one frequency at least; nothing looks at it.
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
    """The base of geometric frequencies ``base^(-r / (R-1))``, from the frequencies."""
    if count < 2:
        return 10000.0  # one frequency is 1 for any base
    frequencies = state[name].double()
    base = float(1 / frequencies[-1])
    expected = torch.logspace(0, -1, count, base=base, dtype=torch.float64) if base > 1 else frequencies * math.nan
    if len(frequencies) != count or not torch.allclose(frequencies.cpu(), expected, rtol=1e-5):
        raise ValueError(f"{name} must hold {count} frequencies base^(-r / {count - 1}), got {frequencies.tolist()}")
    return base


def _per_query_head(values: Tensor, heads: int) -> Tensor:
    return values.repeat_interleave(heads // len(values), dim=0)


def _projection(state: Mapping[str, Tensor], name: str, heads: int, kv_heads: int) -> dict[str, Tensor]:
    """``weight``, and ``bias`` if it has one, of one of the three projections, which may be fused."""
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
    """A projection's rows, with those for positions 0: nothing comes from them, and no gradient moves them."""
    by_head = rows.unflatten(0, (heads, -1)).clone()
    by_head[:, content:] = 0
    if scaled:
        by_head *= math.sqrt(by_head.shape[1] / content)
    return by_head.flatten(0, 1)
