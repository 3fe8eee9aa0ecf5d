"""Layers of the package goat-attention as PriorAttention, against the package itself.

Outputs in float32 of the order of 1 agree within 1e-4.
"""

from typing import Any

import pytest
import torch
from goat import GoatAttention
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from attention_priors import KeySink, PriorAttention
from attention_priors.hf import load_goat_attention
from thoroughness import examples

TOLERANCE = 1e-4


def goat(width: int = 64, heads: int = 4, **changes: Any) -> Any:
    """Return a layer all of whose parameters differ from their start, which is too close to 0 to show errors."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"pos_rank": 3, "abs_rank": 4, "training_seq_len": 20, "batch_first": True}
    module = GoatAttention(width, heads, **options | changes)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "gate" in name:
                continue
            if name == "recency_slope_raw":
                parameter.copy_(torch.linspace(-3, 0, len(parameter)))
            elif "key_bias" in name or "lambda" in name or "sink" in name:
                parameter.normal_()
            elif name.endswith("bias"):
                parameter.normal_(std=0.3)
    return module.eval()


def hidden(length: int = 12, width: int = 64, batch: int = 2, seed: int = 1) -> Tensor:
    return torch.randn(batch, length, width, generator=torch.Generator().manual_seed(seed))


def difference(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return float((a - b).detach().abs().max())


@given(
    heads=st.sampled_from([(1, 1), (2, 1), (4, 2), (4, 4)]),
    head_dim=st.sampled_from([16, 20]),
    pos_rank=st.integers(0, 4),
    abs_rank=st.integers(0, 4),
    enable_key_bias=st.booleans(),
    bias=st.booleans(),
    fuse_qkv=st.booleans(),
    causal=st.booleans(),
    length=st.integers(1, 30),
    bases=st.sampled_from([(10000.0, 10000.0), (50.0, 200.0)]),
)
@settings(max_examples=examples(15))
def test_outputs_and_weights_match_the_package(
    heads: tuple[int, int], head_dim: int, causal: bool, length: int, bases: tuple[float, float], **options: Any
) -> None:
    width = heads[0] * head_dim
    bases_of = dict(zip(("pos_base", "abs_base"), bases, strict=True))
    theirs = goat(width, heads[0], kv_num_heads=heads[1], **bases_of, **options)
    ours = load_goat_attention(theirs, causal=causal)
    x = hidden(length, width)
    expected, weights = theirs(x, x, x, is_causal=causal)
    got, our_weights = ours(x, x, x, is_causal=causal)
    assert our_weights is not None
    assert difference(expected, got) < TOLERANCE
    assert difference(weights, our_weights) < TOLERANCE


@pytest.mark.parametrize("causal", [False, True])
def test_padding_masks_and_other_widths_match(causal: bool) -> None:
    theirs = goat(kdim=24, vdim=40, kv_num_heads=2)
    ours = load_goat_attention(theirs, causal=causal)
    inputs = hidden(), hidden(width=24, seed=2), hidden(width=40, seed=3)
    padding = torch.zeros(2, 12, dtype=torch.bool)
    padding[0, 9:] = True
    forbidden = torch.zeros(12, 12, dtype=torch.bool)
    forbidden[5:, 2] = True
    options = {"key_padding_mask": padding, "attn_mask": forbidden, "is_causal": causal}
    expected = theirs(*inputs, **options)[0]
    assert difference(expected, theirs(*inputs, is_causal=causal)[0]) > 0.01
    assert difference(expected, ours(*inputs, **options)[0]) < TOLERANCE


def test_state_dicts_load() -> None:
    theirs = goat()
    ours = load_goat_attention(theirs.state_dict(), causal=True, train_length=20, batch_first=True).eval()
    x = hidden()
    assert difference(theirs(x, x, x, is_causal=True)[0], ours(x, x, x, is_causal=True)[0]) < TOLERANCE
    with pytest.raises(ValueError, match="train_length is required"):
        load_goat_attention(theirs.state_dict(), causal=True)
    time_first = load_goat_attention(theirs.state_dict(), causal=True, train_length=20).eval()
    assert (
        difference(
            time_first(*[x.transpose(0, 1)] * 3, is_causal=True)[0].transpose(0, 1), ours(x, x, x, is_causal=True)[0]
        )
        == 0
    )


@pytest.mark.parametrize("causal", [False, True])
def test_without_a_training_length_one_number_of_keys_matches(causal: bool) -> None:
    theirs = goat(training_seq_len=None)
    with pytest.raises(ValueError, match="train_length is required"):
        load_goat_attention(theirs, causal=causal)
    ours = load_goat_attention(theirs, causal=causal, train_length=11)
    for length, equal in ((12, True), (18, False)):
        x = hidden(length)
        gap = difference(theirs(x, x, x, is_causal=causal)[0], ours(x, x, x, is_causal=causal)[0])
        assert gap < TOLERANCE if equal else gap > 1e-3


def test_decoding_matches_with_the_packages_cache() -> None:
    theirs = goat()
    ours = load_goat_attention(theirs, causal=True)
    x = hidden()
    past, parts = None, []
    for start, stop in ((0, 5), (5, 6), (6, 12)):
        new = x[:, start:stop]
        options = {"is_causal": True, "past_key_value": past, "return_present_kv": True}
        out, _, past = theirs(new, new, new, **options)
        parts.append(out)
    assert difference(torch.cat(parts, 1), ours(x, x, x, is_causal=True)[0]) < TOLERANCE
    last = ours(x[:, 6:], x, x, is_causal=True)[0]
    assert difference(parts[-1], last) < TOLERANCE


def test_gradients_of_common_parameters_match() -> None:
    theirs = goat().train()
    ours = load_goat_attention(theirs, causal=True)
    assert ours.training
    gradients = []
    for layer in (theirs, ours):
        x = hidden().requires_grad_()
        layer(x, x, x, is_causal=True)[0].square().sum().backward()
        gradients.append(x.grad)
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-3)
    spectral, sink = ours.prior.terms()  # pyright: ignore[reportOptionalMemberAccess]
    assert isinstance(sink, KeySink)
    torch.testing.assert_close(spectral.get_parameter("alpha").grad, theirs.lambda_sym.grad, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(sink.gain.grad, theirs.sink_gain.grad, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(sink.bump.grad, theirs.sink_bump.grad, rtol=1e-3, atol=1e-3)


def test_rows_for_positions_stay_0_in_training() -> None:
    layer = load_goat_attention(goat(), causal=True)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    x = hidden()
    layer(x, x, x, is_causal=True)[0].square().mean().backward()
    optimizer.step()
    content = 16 - 2 * 3 - 1
    query, key, value = layer.in_proj_weight.view(3, 4, 16, 64)
    assert not query[:, content:].any()
    assert not key[:, content:].any()
    assert value[:, content:].all()


def test_loaded_layers_are_plain_prior_attention() -> None:
    layer = load_goat_attention(goat(dropout=0.25), causal=True)
    assert type(layer) is PriorAttention
    assert layer.dropout == 0.25
    assert layer.batch_first
    names = [term.name for term in layer.prior.terms()]  # pyright: ignore[reportOptionalMemberAccess]
    assert names == ["spectral", "key_sink"]
    assert load_goat_attention(goat(enable_key_bias=False, pos_rank=0), causal=True).prior is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prior_gate": "query_norm"}, "prior_gate='query_norm'"),
        ({"pos_encoding": "2d"}, "pos_encoding='2d'"),
        ({"add_zero_attn": True}, "add_zero_attn=True"),
        ({"add_bias_kv": True}, "add_bias_kv=True"),
    ],
)
def test_options_outside_of_priors_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_goat_attention(goat(**changes), causal=True)


def test_other_objects_are_refused() -> None:
    with pytest.raises(ValueError, match="has no lambda_sym"):
        load_goat_attention(nn.Linear(2, 2), causal=True)
    scaled = goat()
    scaled.set_goat_prior_scale(0.5)
    with pytest.raises(ValueError, match=r"goat_prior_scale=0\.5"):
        load_goat_attention(scaled, causal=True)
    with pytest.raises(ValueError, match="the module has training_seq_len=20"):
        load_goat_attention(goat(), causal=True, train_length=21)
    odd = goat().state_dict()
    odd["rel_freqs_base"][1] = 0.9
    with pytest.raises(ValueError, match="rel_freqs_base must hold 3 frequencies"):
        load_goat_attention(odd, causal=True, train_length=20)
