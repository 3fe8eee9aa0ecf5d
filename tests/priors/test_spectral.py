import math
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from prior_samples import randomise

from attention_priors.priors import Prior, Spectral
from attention_priors.priors.spectral import angular_frequencies
from thoroughness import examples

FAR = 2**20
thorough = settings(max_examples=examples(25))


def directly(prior: Spectral, head: int, distance: int) -> float:
    """Compute the trigonometric sum in Python floats."""
    steps = max(prior.num_frequencies - 1, 1)
    total = 0.0
    for r in range(prior.num_frequencies):
        phase = 2 * math.pi / prior.shortest_period * prior.base ** (-r / steps) * distance
        total += prior.alpha[head, r].item() * math.cos(phase) + prior.beta[head, r].item() * math.sin(phase)
    return total


def random_spectral(
    num_frequencies: int = 8, base: float = 10_000.0, seed: int = 0, sign: int = 0, period: float = 2 * math.pi
) -> Spectral:
    prior = Spectral(2, num_frequencies, base, period)
    randomise(prior, seed, scale=1.0)
    if sign:
        with torch.no_grad():
            for weights in prior.parameters():
                weights.copy_(sign * weights.abs())
    return prior


def test_frequencies_fall_geometrically_from_one_radian_to_one_over_the_base():
    found = angular_frequencies(5, 10_000.0, torch.device("cpu"))
    assert found.dtype == torch.float64
    assert found.tolist() == pytest.approx([1.0, 0.1, 0.01, 0.001, 0.0001], rel=1e-14)
    assert angular_frequencies(1, 50.0, torch.device("cpu")).tolist() == [1.0]


@thorough
@given(
    st.integers(1, 12),
    st.floats(2, 1e6),
    st.floats(2, 20),
    st.integers(0, 1000),
    st.lists(st.integers(-FAR, FAR), min_size=1, max_size=5),
)
def test_log_prior_matches_the_direct_sum(
    num_frequencies: int, base: float, period: float, seed: int, distances: list[int]
):
    prior = random_spectral(num_frequencies, base, seed, period=period)
    found = prior.log_prior_at(torch.tensor(distances), torch.float64)
    for head in range(2):
        expected = [directly(prior, head, distance) for distance in distances]
        assert found[head].tolist() == pytest.approx(expected, abs=1e-8)


@pytest.mark.parametrize("sign", [0, 1, -1], ids=["mixed", "positive", "negative"])
def test_goat_appendix_c_weights_may_have_any_sign(sign: int):
    prior = random_spectral(sign=sign)
    distances = [-500, -3, 0, 1, 2, 77]
    found = prior.log_prior_at(torch.tensor(distances), torch.float64)
    for head in range(2):
        assert found[head].tolist() == pytest.approx([directly(prior, head, d) for d in distances], abs=1e-9)
    if sign:
        assert (sign * found[:, 2] > 0).all()  # at d = 0 the sum of α


def test_float32_is_exact_at_far_distances():
    prior = random_spectral()
    distances = [FAR, FAR - 1, -FAR, 999_983, -524_287]
    found = prior.log_prior_at(torch.tensor(distances))
    assert found.dtype == torch.float32
    for head in range(2):
        expected = [directly(prior, head, distance) for distance in distances]
        assert found[head].tolist() == pytest.approx(expected, abs=1e-4)


@thorough
@given(
    st.integers(1, 12),
    st.integers(0, 1000),
    st.lists(st.integers(0, FAR), min_size=1, max_size=3),
    st.lists(st.integers(0, FAR), min_size=1, max_size=3),
)
def test_goat_appendix_b_each_frequency_is_one_pair_of_lanes(
    num_frequencies: int, seed: int, queries: list[int], keys: list[int]
):
    # Equations 37 and 38, and their product, equation 43, for each frequency separately.
    prior = random_spectral(num_frequencies, seed=seed)
    lanes = prior.lanes(torch.tensor(queries), torch.tensor(keys), dtype=torch.float64)
    for head, r in product(range(2), range(num_frequencies)):
        omega = prior.base ** (-r / max(num_frequencies - 1, 1))
        alpha, beta = prior.alpha[head, r].item(), prior.beta[head, r].item()
        pair = [r, num_frequencies + r]
        for found, j in zip(lanes.key[:, pair].tolist(), keys, strict=True):
            assert found == pytest.approx([math.cos(omega * j), math.sin(omega * j)], abs=1e-9)
        for found, i in zip(lanes.query[head][:, pair].tolist(), queries, strict=True):
            cos, sin = math.cos(omega * i), math.sin(omega * i)
            assert found == pytest.approx([alpha * cos + beta * sin, alpha * sin - beta * cos], abs=1e-8)
        whole = lanes.query[head][:, pair] @ lanes.key[:, pair].T
        for found, i in zip(whole.tolist(), queries, strict=True):
            phases = [omega * (i - j) for j in keys]
            assert found == pytest.approx([alpha * math.cos(x) + beta * math.sin(x) for x in phases], abs=1e-8)


@thorough
@given(
    st.integers(1, 12),
    st.integers(0, 1000),
    st.sampled_from([0, 1, -1]),
    st.lists(st.integers(0, FAR), min_size=1, max_size=4),
    st.lists(st.integers(0, FAR), min_size=1, max_size=4),
)
def test_goat_proposition_f5_lanes_reproduce_the_log_prior(
    num_frequencies: int, seed: int, sign: int, queries: list[int], keys: list[int]
):
    prior = random_spectral(num_frequencies, seed=seed, sign=sign)
    for dtype, tolerance in ((torch.float64, 1e-8), (torch.float32, 1e-4)):
        lanes = prior.lanes(torch.tensor(queries), torch.tensor(keys), dtype=dtype)
        assert lanes.query.shape == (2, len(queries), 2 * num_frequencies)
        assert lanes.key.shape == (len(keys), 2 * num_frequencies)
        assert {lanes.query.dtype, lanes.key.dtype} == {dtype}
        whole = lanes.query @ lanes.key.mT
        for head in range(2):
            expected = [[directly(prior, head, i - j) for j in keys] for i in queries]
            torch.testing.assert_close(
                whole[head].double(), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=tolerance
            )


@thorough
@given(st.integers(2, 12), st.integers(1, 12), st.integers(0, 1000), st.integers(-FAR, FAR))
def test_the_fastest_frequency_repeats_itself_after_the_shortest_period(
    period: int, num_frequencies: int, seed: int, distance: int
):
    prior = random_spectral(num_frequencies, seed=seed, period=period)
    with torch.no_grad():
        prior.alpha[:, 1:] = prior.beta[:, 1:] = 0
    here, there = prior.log_prior_at(torch.tensor([distance, distance + 1000 * period]), torch.float64).unbind(-1)
    torch.testing.assert_close(here, there, rtol=0, atol=1e-8)


def test_alpha_is_the_symmetric_and_beta_the_antisymmetric_part():
    distance = torch.tensor([1, 2, 30, 4000])
    for kept, sign in (("alpha", 1), ("beta", -1)):
        prior = random_spectral()
        with torch.no_grad():
            getattr(prior, "beta" if kept == "alpha" else "alpha").zero_()
        past = prior.log_prior_at(distance, torch.float64)
        assert (past != 0).all()
        torch.testing.assert_close(prior.log_prior_at(-distance, torch.float64), sign * past)


def test_uniform_and_recency_init():
    natural = Spectral(3, 4).natural_parameters()
    assert natural["alpha"].tolist() == natural["beta"].tolist() == [[0.0] * 4] * 3
    torch.manual_seed(0)
    prior: Prior = Spectral(500, 8, init="recency")
    assert prior.natural_parameters()["alpha"].std().item() == pytest.approx(0.02, rel=0.05)
    assert prior.natural_parameters()["beta"].abs().max().item() == 0


def test_sandwich_matches_its_papers_formula():
    """``Σ_k cos(d / 10000^(2k/d̄))``, ``k = 1..d̄/2``, times ``H/8h`` in head ``h`` (Chi et al. 2023; d̄ = 128)."""
    heads, width = 6, 128
    half = width // 2
    prior = Spectral(heads, half, 10_000 ** (1 - 1 / half), 2 * math.pi * 10_000 ** (1 / half), "sandwich", learn=False)
    distance = torch.tensor([0, 1, 2, 17, 300, 4096, FAR])
    found = prior.log_prior_at(distance, torch.float64)
    for head, place in product(range(heads), range(len(distance))):
        cosines = (math.cos(int(distance[place]) / 10_000 ** (2 * k / width)) for k in range(1, half + 1))
        expected = sum(cosines) / (8 * (head + 1) / heads)
        assert found[head, place].item() == pytest.approx(expected, rel=1e-6, abs=1e-6)
    assert not any(parameter.requires_grad for parameter in prior.parameters())
