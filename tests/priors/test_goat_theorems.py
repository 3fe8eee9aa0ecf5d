"""Statements of GOAT about the scope and effect of priors: equations 20 to 23, section 5, appendices C, E and F."""

import math
from itertools import pairwise, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from prior_samples import randomise
from torch import Tensor

from attention_priors.encodings import Rotary
from attention_priors.priors import GeneralizedGaussian, KeySink, Laplace, Prior, RelativeBuckets, Spectral
from thoroughness import examples

thorough = settings(max_examples=examples(25))


def toeplitz(prior: Prior, length: int) -> Tensor:
    """Return the log-prior of every query for every key, past and future, in float64: ``(H, length, length)``."""
    positions = torch.arange(length)
    return prior.log_prior(positions, positions, torch.float64).detach()


def rank(matrix: Tensor, tolerance: float = 1e-9) -> list[int]:
    return torch.linalg.matrix_rank(matrix, rtol=tolerance).tolist()


# --- Appendix C


def test_goat_appendix_c_a_negative_weight_is_a_prior_no_positive_definite_kernel_can_be():
    prior = Spectral(1, 1)
    with torch.no_grad():
        prior.alpha.fill_(-2.0)
    log_prior = toeplitz(prior, 12)[0]
    # A positive definite kernel is largest at displacement 0. This kernel is smallest there: it repels.
    assert log_prior.diagonal().tolist() == [-2.0] * 12
    assert (log_prior >= -2.0).all()
    assert torch.linalg.eigvalsh(log_prior).min() < -1
    weights = log_prior.softmax(-1)
    assert (weights > 0).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(12, dtype=torch.float64))


# --- Appendix E


def test_goat_appendix_e_1_a_prior_of_finite_dimension_is_an_encoding():
    # Equations 60 and 61: queries and keys that include the prior's coordinates give content plus log-prior.
    prior = randomise(Spectral(2, 4), scale=1.0)
    positions = torch.arange(9)
    query, key = torch.randn(2, 2, 9, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    lanes = prior.lanes(positions, positions, dtype=torch.float64)
    wide_query = torch.cat([query, lanes.query.expand(2, 9, -1)], -1)
    wide_key = torch.cat([key, lanes.key.expand(2, 9, -1)], -1)
    torch.testing.assert_close(wide_query @ wide_key.mT, query @ key.mT + toeplitz(prior, 9))


@thorough
@given(st.integers(0, 1000), st.floats(1 / 16, 16))
def test_goat_appendix_e_2_only_rotation_scales_with_the_content(seed: int, strength: float):
    query, key = torch.randn(2, 1, 1, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    rotary, prior = Rotary(head_dim=8), randomise(Spectral(1, 4), seed, scale=1.0)
    here, far = torch.tensor([5]), torch.tensor([0])

    def of_rotation(factor: float) -> Tensor:
        return (rotary(factor * query, here) * (rotary(key, here) - rotary(key, far))).sum()

    def of_prior(factor: float) -> Tensor:
        logits = [factor * (query * key).sum() + prior.log_prior(here, p, torch.float64) for p in (here, far)]
        return logits[0] - logits[1]

    torch.testing.assert_close(of_rotation(strength), strength * of_rotation(1.0))
    assert of_rotation(0.0) == 0
    torch.testing.assert_close(of_prior(strength), of_prior(1.0))
    assert abs(of_prior(0.0).item()) > 1e-6


# --- Appendix F, Theorem 2


@pytest.mark.slow
@thorough
@given(st.integers(1, 6), st.integers(0, 1000), st.sampled_from([40, 80]))
def test_goat_theorem_2_a_finite_trigonometric_sum_has_bounded_rank(num_frequencies: int, seed: int, length: int):
    # Frequencies far enough apart for 40 positions to distinguish.
    prior = randomise(Spectral(2, num_frequencies, base=4.0), seed, scale=1.0)
    assert all(found <= 2 * num_frequencies for found in rank(toeplitz(prior, length)))
    assert toeplitz(prior, 200).abs().max() <= sum(p.abs().sum(-1).max() for p in prior.parameters())


def test_goat_theorem_2_one_frequency_may_need_only_one_dimension():
    # Erratum: the paper allows at most d_p / 2 frequencies in d_p dimensions. cos(πd) = (-1)^i (-1)^j needs only one.
    positions = torch.arange(30)
    distance = positions[:, None] - positions
    assert rank(torch.cos(math.pi * distance.double())) == 1
    assert rank(torch.cos(math.pi / 2 * distance.double())) == 2


@pytest.mark.parametrize(
    "prior",
    [RelativeBuckets(1, bidirectional=True), GeneralizedGaussian(1, init="uniform")],
    ids=["T5", "GGD with β < 0"],
)
def test_goat_theorem_2_other_bounded_tables_have_full_rank(prior: Prior):
    # Bounded, translation-equivariant, and not a trigonometric sum: no number of lanes serves every length.
    if isinstance(prior, GeneralizedGaussian):
        with torch.no_grad():
            prior.theta_beta.fill_(-0.5)
            prior.theta_alpha.fill_(1.0)
    else:
        randomise(prior, scale=1.0)
    ranks = [rank(toeplitz(prior, length), 1e-12)[0] for length in (16, 64, 256)]
    assert ranks[0] == 16
    assert ranks[1] >= 48
    assert ranks[2] >= 150


@pytest.mark.parametrize("power", [2, 4])
def test_goat_theorem_2_unbounded_polynomials_have_lanes(power: int):
    distance = (torch.arange(12)[:, None] - torch.arange(12)).double()
    assert rank(-(distance**power)) == power + 1


# --- Lemma F.4


def differences(sequence: list[int], times: int) -> list[int]:
    for _ in range(times):
        sequence = [b - a for a, b in pairwise(sequence)]
    return sequence


@thorough
@given(st.lists(st.integers(-50, 50), min_size=1, max_size=6), st.lists(st.integers(-1000, 1000), min_size=7))
def test_goat_lemma_f4_a_vanishing_kth_difference_means_a_polynomial(coefficients: list[int], drawn: list[int]):
    k = len(coefficients)
    polynomial = [sum(c * i**power for power, c in enumerate(coefficients)) for i in range(-10, 20)]
    assert not any(differences(polynomial, k))
    # Conversely, k values and a vanishing difference determine one sequence: Lagrange's polynomial.
    sequence = drawn[:k]
    for _ in range(20):
        sequence.append(-sum((-1) ** (k - t) * math.comb(k, t) * sequence[len(sequence) - k + t] for t in range(k)))
    assert not any(differences(sequence, k))
    for i in range(len(sequence)):
        lagrange = 0.0
        for t in range(k):
            others = [u for u in range(k) if u != t]
            lagrange += sequence[t] * math.prod(i - u for u in others) / math.prod(t - u for u in others)
        assert sequence[i] == pytest.approx(lagrange, rel=1e-9, abs=1e-6)


def test_goat_lemma_f4_binomials_are_a_triangular_basis():
    # Erratum: with the backward difference of equation 77, Φ does not map the binomials to the standard basis.
    size = 5

    def binomial(i: int, t: int) -> int:
        return math.prod(range(i - t + 1, i + 1)) // math.factorial(t)

    phi = torch.zeros(size, size)
    for row, t in product(range(size), range(size)):
        phi[row, t] = sum((-1) ** m * math.comb(row, m) * binomial(-m, t) for m in range(row + 1))
    assert torch.equal(phi, phi.triu())
    assert torch.equal(phi.diagonal(), torch.ones(size))
    assert not torch.equal(phi, torch.eye(size))


# --- Theorem 3: test_laplace.py tests its statement


def test_goat_theorem_3_mass_moved_between_two_lags_moves_the_mean():
    # Erratum in the proof: it moves mass between two lags and claims to keep the mean. Keeping it takes three lags.
    lag = torch.arange(6, dtype=torch.float64)
    for a, b in product(range(6), range(6)):
        if a != b:
            move = torch.zeros(6, dtype=torch.float64)
            move[a], move[b] = 1, -1
            assert (move * lag).sum() != 0
    three = torch.tensor([1.0, 0, -2, 0, 1, 0], dtype=torch.float64)  # from lag 2 to lags 0 and 4
    assert three.sum() == (three * lag).sum() == 0


def seeded(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@thorough
@given(st.integers(0, 999), st.integers(1, 4), st.integers(1, 9))
def test_goat_equations_20_to_23_the_scaling_trick_is_exact(seed: int, frequencies: int, content: int):
    places = torch.arange(7)
    spectral, sink = Spectral(1, frequencies), KeySink(1, train_length=7)
    with torch.no_grad():
        spectral.alpha.copy_(seeded(seed, 1, frequencies))
        spectral.beta.copy_(seeded(seed + 1, 1, frequencies))
        sink.bump.fill_(1.5)
    q, k = seeded(seed, 2, 7, content)
    lanes = spectral.lanes(places, places, dtype=torch.float64)
    u = sink.log_prior_of_key(places, torch.float64)[0]
    width = content + 2 * frequencies + 1
    ones = torch.ones(7, 1, dtype=torch.float64)
    wide_q = torch.cat([q * math.sqrt(width / content), lanes.query[0] * math.sqrt(width), ones * math.sqrt(width)], -1)
    wide_k = torch.cat([k, lanes.key.reshape(7, -1), u[:, None]], -1)
    expected = q @ k.mT / math.sqrt(content) + (spectral + sink).log_prior(places, places, torch.float64)[0]
    torch.testing.assert_close(wide_q @ wide_k.mT / math.sqrt(width), expected, rtol=1e-10, atol=1e-10)


def test_goat_appendix_c_a_positive_definite_kernel_suppresses_displacements_too():
    """Erratum: only suppression of displacement 0 is impossible. ``1 + cos πd`` is such a kernel, and 0 at odd
    displacements.
    """
    distance = (torch.arange(20)[:, None] - torch.arange(20)).to(torch.float64)
    kernel = 1 + torch.cos(math.pi * distance)
    assert torch.linalg.eigvalsh(kernel).min() > -1e-12
    assert kernel[0, 1::2].abs().max() < 1e-12
    # It cannot represent the prior itself, as opposed to its logarithm, with a negative weight.
    assert torch.linalg.eigvalsh((-2 * torch.cos(distance)).exp()).min() < -1
    assert torch.linalg.eigvalsh((2 * torch.cos(distance)).exp()).min() > -1e-12


def test_goat_theorem_2_a_constant_takes_one_more_dimension():
    """Erratum: equation 70 with R frequencies and γ needs 2R + 1 dimensions, not 2R as stated after the proof."""
    distance = (torch.arange(30)[:, None] - torch.arange(30)).to(torch.float64)
    assert int(torch.linalg.matrix_rank(torch.cos(distance))) == 2
    assert int(torch.linalg.matrix_rank(0.3 + torch.cos(distance))) == 3


@pytest.mark.parametrize("width", [16, 64, 256])
def test_goat_section_5_gradients_of_default_and_key_are_equal(width: int):
    """Erratum: ``|∂z/∂u| = 1``, and ``|∂z/∂k| = |q| / sqrt(d_c)`` is also 1 for queries of unit variance."""
    norms = seeded(0, 2000, width).norm(dim=-1) / math.sqrt(width)
    assert float(norms.mean()) == pytest.approx(1, abs=0.05)


def test_goat_theorem_3_one_rate_has_its_mean_only_in_the_last_row():
    """By F.6, rows with fewer keys have a smaller mean lag."""
    prior = Laplace.from_mean_distance(10.0, 100)
    means = []
    for last in (5, 20, 50, 99):
        lag = torch.arange(last + 1)
        means.append(float((prior.log_prior_at(lag, torch.float64)[0].detach().softmax(-1) * lag).sum()))
    assert means == sorted(means)
    assert means[0] < 3
    assert means[-1] == pytest.approx(10, rel=1e-5)
