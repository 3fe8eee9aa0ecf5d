import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from prior_samples import randomise

from attention_priors.priors import KeySink, Laplace, alibi_slopes
from thoroughness import examples

FAR = 2**20


def directly(prior: KeySink, head: int, j: int) -> float:
    """Compute ``u(j)`` from the parameters in Python floats."""
    steps = max(prior.num_frequencies - 1, 1)
    phases = [prior.base ** (-m / steps) * j for m in range(prior.num_frequencies)]
    features = [
        *(math.sin(phase) for phase in phases),
        *(math.cos(phase) for phase in phases),
        j / prior.train_length,
        math.log(1 + j) / math.log(1 + prior.train_length),
    ]
    state = {key: value.tolist() for key, value in prior.state_dict().items()}
    out = state["mlp.2.bias"][0]
    for unit, (weights, bias) in enumerate(zip(state["mlp.0.weight"], state["mlp.0.bias"], strict=True)):
        x = sum(weight * feature for weight, feature in zip(weights, features, strict=True)) + bias
        share = (1 + math.erf(x / math.sqrt(2))) / 2 if prior.activation == "gelu" else (1 + math.tanh(x / 2)) / 2
        out += state["mlp.2.weight"][0][unit] * x * share
    return state["slope"][head] * j + state["gain"][head] * out + state["bump"][head] * (j == 0)


@settings(max_examples=examples(15))
@given(
    st.integers(1, 6),
    st.integers(1, 9),
    st.integers(1, 5000),
    st.integers(0, 1000),
    st.lists(st.integers(0, FAR), max_size=4),
    st.sampled_from(["gelu", "silu"]),
)
def test_log_prior_matches_the_formula(
    frequencies: int, hidden: int, train_length: int, seed: int, keys: list[int], activation: str
):
    prior = KeySink(2, train_length, frequencies, hidden, base=300.0, activation=activation)
    randomise(prior, seed)
    keys = [0, 1, *keys]
    found = prior.log_prior_of_key(torch.tensor(keys), torch.float64)
    assert found.shape == (2, len(keys))
    for head in range(2):
        assert found[head].tolist() == pytest.approx([directly(prior, head, j) for j in keys], rel=1e-9)


def test_float32_is_exact_at_far_positions():
    prior = KeySink(2, train_length=FAR)  # keeps the features within 1
    randomise(prior, 3)
    with torch.no_grad():
        prior.slope.zero_()  # a slope's own size at j = 2^20 leaves float32 fewer digits
    keys = [FAR, FAR - 1, 999_983, 524_287]
    found = prior.log_prior_of_key(torch.tensor(keys))
    for head in range(2):
        assert found[head].tolist() == pytest.approx([directly(prior, head, j) for j in keys], abs=1e-4)


def test_goat_theorem_4_rank_is_one_and_rows_are_equal():
    prior = randomise(KeySink(3, 32))
    log_prior = prior.log_prior(torch.arange(20), torch.arange(25), torch.float64)
    assert torch.equal(log_prior, log_prior[:, :1].expand_as(log_prior))
    assert torch.linalg.matrix_rank(log_prior).tolist() == [1, 1, 1]
    torch.testing.assert_close(log_prior[:, 0], prior.log_prior_of_key(torch.arange(25), torch.float64))


def test_goat_theorem_4_defaults_do_not_depend_on_later_keys():
    prior = randomise(KeySink(2, 32))
    few = prior.log_prior(torch.tensor([5]), torch.arange(6), torch.float64)
    many = prior.log_prior(torch.tensor([5]), torch.arange(50), torch.float64)
    torch.testing.assert_close(few, many[..., :6])


@pytest.mark.parametrize("init", ["uniform", "recency"])
def test_log_prior_of_key_accepts_any_shape(init: str):
    prior = randomise(KeySink(2, 32, init=init))
    keys = torch.arange(10).view(2, 5)
    found = prior.log_prior_of_key(keys)
    assert found.shape == (2, 2, 5)
    for head in range(2):
        for element, row in enumerate(keys.tolist()):
            assert found[head, element].tolist() == pytest.approx([directly(prior, head, j) for j in row], abs=1e-4)


def test_bump_lifts_only_the_first_key():
    prior = KeySink(1, 32)
    with torch.no_grad():
        prior.bump.fill_(2.5)
    assert prior.log_prior_of_key(torch.arange(4)).tolist() == [[2.5, 0.0, 0.0, 0.0]]


def test_uniform_and_recency_init():
    positions = torch.arange(10)
    prior = KeySink(6, 32)
    assert prior.log_prior(positions, positions).tolist() == torch.zeros(6, 10, 10).tolist()
    recency = KeySink(6, 32, init="recency")
    torch.testing.assert_close(recency.natural_parameters()["slope"], alibi_slopes(6).float())
    difference = recency.log_prior(positions, positions) - Laplace(6).log_prior(positions, positions)
    for i in range(10):  # ALiBi over the past, up to a constant per query
        past = difference[:, i, : i + 1]
        torch.testing.assert_close(past, past[:, :1].expand_as(past))


@pytest.mark.parametrize("arguments", [{"init": "recency"}, {"learn": "slope"}, {"init": "recency", "learn": False}])
def test_goat_proposition_f6_a_slope_needs_a_causal_mask(arguments: dict):
    prior = KeySink(2, 32, **arguments)
    assert prior.has_slope
    prior.check(causal=True)
    with pytest.raises(ValueError, match=r"slope.*bidirectional"):
        prior.check(causal=False)
    with pytest.raises(ValueError, match=r"slope.*bidirectional"):
        (Laplace(2) + prior).check(causal=False)


def test_without_a_slope_attention_may_be_bidirectional():
    prior = KeySink(2, 32)
    assert not prior.has_slope
    prior.check(causal=False)
    prior.check(causal=True)


def test_far_positions_stay_exact_under_autocast():
    prior = randomise(KeySink(2, FAR), 1)
    keys = torch.tensor([3, 1000, FAR])
    expected = prior.log_prior_of_key(keys)
    with torch.autocast("cpu", torch.bfloat16):
        found = prior.log_prior_of_key(keys)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert torch.isfinite(expected).all()


def test_padding_before_the_first_position_is_finite():
    prior = randomise(KeySink(2, 32))
    assert torch.isfinite(prior.log_prior_of_key(torch.tensor([-5, -1, 0, 1]))).all()
