import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import gennorm

from attention_priors.priors import GeneralizedGaussian, Laplace, alibi_slopes
from thoroughness import examples

EPSILON = 1e-5
MODERATE = st.floats(-3, 3, width=32)
DISTANCES = torch.arange(-200, 201)
thorough = settings(max_examples=examples(40))


def ggd(theta_alpha: float, theta_beta: float, theta_mu: float = 0.0) -> GeneralizedGaussian:
    prior = GeneralizedGaussian(1)
    with torch.no_grad():
        prior.theta_alpha.fill_(theta_alpha)
        prior.theta_beta.fill_(theta_beta)
        prior.theta_mu.fill_(theta_mu)
    return prior


def table(prior: GeneralizedGaussian, distance: torch.Tensor = DISTANCES) -> torch.Tensor:
    return prior.log_prior_at(distance, torch.float64).detach()[0]


def up_to_a_constant(values: torch.Tensor) -> torch.Tensor:
    return values - values.mean()


# ---- the formula


@thorough
@given(MODERATE, MODERATE, MODERATE, st.integers(-(2**20), 2**20))
def test_log_prior_matches_the_formula(theta_alpha: float, theta_beta: float, theta_mu: float, distance: int):
    offset = -distance  # j - i
    expected = -math.exp(theta_alpha) * (abs(offset - 2 * math.sinh(theta_mu)) + EPSILON) ** theta_beta
    found = table(ggd(theta_alpha, theta_beta, theta_mu), torch.tensor([distance])).item()
    assert found == pytest.approx(expected, rel=1e-9)


@thorough
@given(MODERATE, st.floats(0.25, 4, width=32), MODERATE)
def test_is_the_generalized_normal_density_of_its_natural_parameters(
    theta_alpha: float, theta_beta: float, theta_mu: float
):
    offsets = torch.arange(-20, 21)
    location, scale = 2 * math.sinh(theta_mu), math.exp(-theta_alpha / theta_beta)
    away = (offsets.double() - location).abs().numpy() + EPSILON
    log_density = gennorm.logpdf(location + away, theta_beta, loc=location, scale=scale)
    expected = torch.tensor(log_density - gennorm.logpdf(location, theta_beta, loc=location, scale=scale))
    torch.testing.assert_close(table(ggd(theta_alpha, theta_beta, theta_mu), -offsets), expected, rtol=1e-9, atol=1e-9)


@thorough
@given(MODERATE, MODERATE)
def test_natural_parameters_match_the_trained_ones(theta_alpha: float, theta_beta: float):
    natural = ggd(theta_alpha, theta_beta, 0.7).natural_parameters()
    assert set(natural) == {"alpha", "beta", "mu", "theta_alpha"}
    assert natural["theta_alpha"].item() == pytest.approx(theta_alpha)
    assert natural["beta"].item() == pytest.approx(theta_beta)
    assert natural["mu"].item() == pytest.approx(2 * math.sinh(0.7), rel=1e-6)
    if abs(theta_beta) > 0.1:
        assert natural["alpha"].item() == pytest.approx(math.exp(-theta_alpha / theta_beta), rel=1e-4)


def test_scale_is_undefined_at_shape_zero():
    for theta_alpha in (-1.0, 0.0, 1.0):
        natural = ggd(theta_alpha, 0.0).natural_parameters()
        assert math.isnan(natural["alpha"].item())
        assert natural["theta_alpha"].item() == theta_alpha


def test_scale_is_the_distance_that_costs_one_nat_and_theta_alpha_gives_the_cost_of_one_token():
    prior = ggd(-4.5, 1.5)
    alpha = prior.natural_parameters()["alpha"].item()
    assert alpha == pytest.approx(math.exp(3.0), rel=1e-5)
    near, far = table(prior, torch.tensor([math.floor(alpha), math.ceil(alpha)])).tolist()
    assert far < -1 < near
    theta_alpha = prior.natural_parameters()["theta_alpha"].item()
    assert table(prior, torch.tensor([1])).item() == pytest.approx(-math.exp(theta_alpha), rel=1e-4)


def test_positive_location_moves_the_peak_to_keys_after_the_query():
    prior = ggd(0.0, 2.0, math.asinh(5 / 2))
    assert DISTANCES[table(prior).argmax()].item() == -5  # j - i = 5
    assert DISTANCES[table(ggd(0.0, 2.0, -math.asinh(5 / 2))).argmax()].item() == 5


@thorough
@given(MODERATE, MODERATE, MODERATE)
def test_mirrored_location_mirrors_the_prior(theta_alpha: float, theta_beta: float, theta_mu: float):
    torch.testing.assert_close(
        table(ggd(theta_alpha, theta_beta, theta_mu)),
        table(ggd(theta_alpha, theta_beta, -theta_mu)).flip(0),
        rtol=1e-12,
        atol=0,
    )


# ---- special cases


@pytest.mark.parametrize("slope", [0.5, 1 / 256, 3.0])
def test_is_laplace_at_shape_one(slope: float):
    laplace = Laplace(1, slopes=[slope]).log_prior_at(DISTANCES, torch.float64)[0].detach()
    found = table(ggd(math.log(slope), 1.0))
    torch.testing.assert_close(up_to_a_constant(found), up_to_a_constant(laplace), rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(found - laplace, torch.full_like(found, -slope * EPSILON), rtol=1e-3, atol=1e-9)


@pytest.mark.parametrize("theta_alpha", [-2.0, 0.0, 2.0])
def test_is_uniform_at_shape_zero(theta_alpha: float):
    found = table(ggd(theta_alpha, 0.0))
    torch.testing.assert_close(found, torch.full_like(found, -math.exp(theta_alpha)), rtol=1e-6, atol=0)
    assert (found == found[0]).all()


@pytest.mark.parametrize("theta_alpha", [-6.0, -2.0, 0.0])
@pytest.mark.parametrize("theta_mu", [0.0, 1.0])
def test_is_a_gaussian_at_shape_two(theta_alpha: float, theta_mu: float):
    scale = math.exp(-theta_alpha / 2)
    gaussian = torch.distributions.Normal(
        torch.tensor(2 * math.sinh(theta_mu), dtype=torch.float64), scale / math.sqrt(2)
    ).log_prob(-DISTANCES.double())
    found = table(ggd(theta_alpha, 2.0, theta_mu))
    peak = int(found.argmax())
    torch.testing.assert_close(found - found[peak], gaussian - gaussian[peak], rtol=1e-5, atol=1e-4)


# ---- initial parameters


def starts(init: str, heads: int, **arguments: bool) -> tuple[list[float], list[float], list[float]]:
    prior = GeneralizedGaussian(heads, init=init, **arguments)
    theta_beta = prior.beta.tolist() if prior.keep_sign else prior.theta_beta.tolist()
    return prior.theta_alpha.tolist(), theta_beta, prior.theta_mu.tolist()


def test_uniform_init_is_all_zeros():
    assert starts("uniform", 4) == ([0.0] * 4, [0.0] * 4, [0.0] * 4)
    assert GeneralizedGaussian(4).init == "uniform"


@pytest.mark.parametrize("heads", [1, 4, 6])
def test_laplace_init_is_alibi(heads: int):
    theta_alpha, beta, theta_mu = starts("laplace", heads)
    assert theta_alpha == pytest.approx(alibi_slopes(heads).log().tolist(), rel=1e-6)
    assert beta == [1.0] * heads
    assert theta_mu == [0.0] * heads
    found = GeneralizedGaussian(heads, init="laplace").log_prior_at(DISTANCES, torch.float64)
    alibi = Laplace(heads).log_prior_at(DISTANCES, torch.float64)
    torch.testing.assert_close(found, alibi, rtol=1e-5, atol=1.1e-5)


def test_linear_init_spans_shapes_0_to_1():
    assert starts("linear", 5) == ([0.0] * 5, [0.0, 0.25, 0.5, 0.75, 1.0], [0.0] * 5)
    assert starts("linear", 1) == ([0.0], [0.0], [0.0])


def test_spread_init_spans_negative_and_positive_shapes():
    assert starts("spread", 7)[1] == pytest.approx([-0.5, -0.25, 0.0, 0.25, 0.5, 0.75, 1.0], abs=1e-6)
    assert starts("spread", 7)[0] == [0.0] * 7
    assert starts("spread", 7)[2] == [0.0] * 7
    assert starts("spread", 1)[1] == [-0.5]


def test_roles_init_has_retrieval_and_local_heads():
    theta_alpha, beta, theta_mu = starts("roles", 8)
    assert beta == [-0.5] * 4 + [1.0] * 4
    assert [math.exp(value) for value in theta_alpha] == pytest.approx([1.0] * 4 + [1 / 2, 1 / 4, 1 / 8, 1 / 16])
    assert theta_mu == [0.0] * 8
    assert starts("roles", 5)[1] == [-0.5] * 2 + [1.0] * 3
    assert starts("roles", 1)[1] == [1.0]
    assert math.exp(starts("roles", 1)[0][0]) == pytest.approx(0.5)


def test_neighbours_init_peaks_at_previous_tokens():
    theta_alpha, beta, theta_mu = starts("neighbours", 8)
    assert beta == [-0.5] * 4 + [1.0] * 4
    assert theta_alpha == [0.0] * 8
    assert [2 * math.sinh(value) for value in theta_mu] == pytest.approx([0.0] * 4 + [-1.0, -2.0, -3.0, -4.0])
    prior = GeneralizedGaussian(6, init="neighbours")
    for head, back in ((3, 1), (4, 2), (5, 3)):
        assert prior.log_prior_at(torch.arange(20))[head].argmax() == back
    assert [name for name, parameter in prior.named_parameters() if parameter.requires_grad] == [
        "theta_alpha",
        "theta_beta",
    ]


def test_previous_init_has_neighbours_alone():
    free = GeneralizedGaussian(3, init="previous")
    for prior in (free, GeneralizedGaussian(3, init="previous", keep_sign=True)):
        torch.testing.assert_close(prior.beta, torch.ones(3))
        torch.testing.assert_close(prior.mu, torch.tensor([-1.0, -2.0, -3.0]))
        assert prior.theta_alpha.tolist() == [0.0] * 3
    distance = torch.arange(20)
    near = GeneralizedGaussian(6, init="neighbours").log_prior_at(distance)[3:]
    torch.testing.assert_close(free.log_prior_at(distance), near)


def test_phrases_init_has_neighbours_and_a_window_of_twenty_tokens():
    near, phrases = GeneralizedGaussian(6, init="neighbours"), GeneralizedGaussian(6, init="phrases", keep_sign=True)
    assert torch.allclose(phrases.beta, torch.tensor([-0.5, -0.5, -0.5, 1, 1, 2]))
    assert torch.allclose(phrases.alpha[3:], torch.tensor([1.0, 1, 20]))
    distance = torch.arange(100)
    torch.testing.assert_close(phrases.log_prior_at(distance)[:5], near.log_prior_at(distance)[:5])
    torch.testing.assert_close(
        phrases.log_prior_at(distance)[5], -(((distance + EPSILON) / 20) ** 2), rtol=1e-4, atol=1e-5
    )


def test_sampled_init_is_standard_normal_and_seeded():
    torch.manual_seed(5)
    first = starts("sampled", 4000)
    torch.manual_seed(5)
    assert starts("sampled", 4000) == first
    assert starts("sampled", 4000) != first
    for values in first[:2]:
        assert torch.tensor(values).mean().abs() < 0.06
        assert (torch.tensor(values).std() - 1).abs() < 0.06
    assert abs(torch.corrcoef(torch.tensor(first[:2]))[0, 1]) < 0.06
    assert first[2] == [0.0] * 4000


def test_uniform_init_gives_alpha_no_gradient_until_beta_moves():
    def gradients(theta_beta: float) -> tuple[float, float]:
        prior = ggd(0.0, theta_beta)
        prior.log_prior_at(torch.arange(8)).softmax(-1)[0, 0].log().backward()
        assert prior.theta_alpha.grad is not None
        assert prior.theta_beta.grad is not None
        return abs(prior.theta_alpha.grad.item()), abs(prior.theta_beta.grad.item())

    at_uniform, moved = gradients(0.0), gradients(0.1)
    assert at_uniform[0] < 1e-6 < 0.1 < at_uniform[1]
    assert moved[0] > 0.1


# ---- keep_sign


@pytest.mark.parametrize(
    ("init", "heads"),
    [("laplace", 6), ("roles", 6), ("neighbours", 6), ("previous", 6), ("phrases", 6), ("spread", 6), ("spread", 12)],
)
def test_keep_sign_starts_at_the_same_shape(init: str, heads: int):
    free, kept = starts(init, heads), starts(init, heads, keep_sign=True)
    for free_beta, kept_beta in zip(free[1], kept[1], strict=True):
        if abs(free_beta) >= 0.06:
            assert kept_beta == pytest.approx(free_beta, rel=1e-5)
        else:
            assert abs(kept_beta) == pytest.approx(0.06, rel=1e-5)
            assert kept_beta * free_beta > 0
    assert sum(abs(beta) >= 0.06 for beta in free[1]) >= heads - 1
    assert kept[0] == free[0]


@thorough
@given(st.floats(-1e6, 1e6, width=32), st.sampled_from(GeneralizedGaussian.signed_inits))
def test_keep_sign_keeps_the_sign_of_every_head_for_any_parameters(raw: float, init: str):
    prior = GeneralizedGaussian(6, init=init, keep_sign=True)
    before = torch.sign(prior.beta)
    assert before.tolist() == torch.sign(GeneralizedGaussian(6, init=init).beta).tolist()
    with torch.no_grad():
        prior.theta_beta.fill_(raw)
    assert torch.equal(torch.sign(prior.beta), before)
    assert (prior.beta.abs() >= 0.05 - 1e-7).all()
    expected = max(raw, 0.0) + math.log1p(math.exp(-2 * abs(raw))) / 2 + 0.05
    torch.testing.assert_close(prior.beta, before * expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(prior.natural_parameters()["beta"], prior.beta)


def test_keep_sign_enters_the_log_prior():
    prior = GeneralizedGaussian(2, init="roles", keep_sign=True)
    with torch.no_grad():
        prior.theta_beta.copy_(torch.tensor([0.3, -0.2]))
    strength = prior.theta_alpha.double().exp()[:, None]
    expected = -strength * (DISTANCES.abs() + EPSILON).double() ** prior.beta.double()[:, None]
    torch.testing.assert_close(prior.log_prior_at(DISTANCES, torch.float64), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("init", ["uniform", "linear", "sampled"])
def test_keep_sign_needs_a_definite_sign(init: str):
    with pytest.raises(
        ValueError, match=rf"keep_sign=True .*laplace, spread, roles, neighbours, previous, phrases.*init='{init}'"
    ):
        GeneralizedGaussian(4, init=init, keep_sign=True)


def test_keep_sign_survives_loading_and_casting():
    prior = GeneralizedGaussian(4, init="roles", keep_sign=True)
    with torch.no_grad():
        prior.theta_beta.copy_(torch.tensor([-2.0, 0.1, 1.0, -1.0]))
    again = GeneralizedGaussian(4, init="roles", keep_sign=True)
    again.load_state_dict(prior.state_dict())
    torch.testing.assert_close(again.half().beta, prior.beta, rtol=0, atol=0)
