import pytest
import torch
from prior_samples import SAMPLES, make, randomise
from torch import nn

from attention_priors.priors import (
    GeneralizedGaussian,
    KeySink,
    Laplace,
    Prior,
    Spectral,
    Structure,
    Uniform,
    Window,
)
from attention_priors.priors.sum import Sum

POSITIONS = torch.arange(10)
STATIONARY, FACTORED, OF_KEYS = Structure.STATIONARY, Structure.FACTORED, Structure.OF_KEYS
NAMES = list(SAMPLES)


@pytest.mark.parametrize(("left", "right"), [(a, b) for n, a in enumerate(NAMES) for b in NAMES[n:]])
def test_log_prior_sums_the_parts(left: str, right: str):
    a = randomise(make(left, SAMPLES[left][-1]), 1)
    b = randomise(make(right, SAMPLES[right][-1]), 2)
    if {a.over_grid, b.over_grid} == {True, False}:
        with pytest.raises(ValueError, match="all be over a line or all over a grid"):
            _ = a + b
        return
    found = (a + b).log_prior(POSITIONS, POSITIONS, torch.float64)
    expected = a.log_prior(POSITIONS, POSITIONS, torch.float64) + b.log_prior(POSITIONS, POSITIONS, torch.float64)
    torch.testing.assert_close(found, expected)
    assert torch.isfinite(found).any()


def test_table_over_distances_sums_the_parts():
    a, b = randomise(Spectral(3)), Laplace(3)
    distance = torch.arange(-9, 10)
    found = (a + b).log_prior_at(distance, torch.float64)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, a.log_prior_at(distance, torch.float64) + b.log_prior_at(distance, torch.float64))
    with pytest.raises(TypeError, match="KeySink is not stationary"):
        (a + KeySink(3, 8)).log_prior_at(distance)


def test_sums_flatten():
    a, b, c, d = Laplace(2), Spectral(2), Window(2, 4), Uniform(2)
    assert list(((a + b) + (c + d)).terms()) == [a, b, c, d]
    assert list((a + (b + (c + d))).terms()) == [a, b, c, d]
    nested = Sum([Sum([a, b]), Sum([c, d])])
    assert list(nested.terms()) == [a, b, c, d]
    assert nested.to_config() == (a + b + c + d).to_config()
    assert nested.structure == (a + b + c + d).structure


def test_parameters_of_the_parts_are_parameters_of_the_sum():
    a, b = Laplace(2, learn=True), Spectral(2)
    assert {id(parameter) for parameter in (a + b).parameters()} == {
        id(parameter) for part in (a, b) for parameter in part.parameters()
    }
    cast = nn.ModuleDict({"prior": a + b}).half()
    assert {parameter.dtype for parameter in cast.parameters()} == {torch.float32}


def test_resetting_a_sum_resets_every_part():
    prior = Laplace(2) + GeneralizedGaussian(2, init="roles")
    start = {key: value.clone() for key, value in prior.state_dict().items()}
    randomise(prior)
    prior.reset_parameters()
    for key, value in prior.state_dict().items():
        torch.testing.assert_close(value, start[key])


@pytest.mark.parametrize(
    ("prior", "structure"),
    [
        (Laplace(2) + Spectral(2), STATIONARY),
        (Spectral(2) + Uniform(2), STATIONARY | FACTORED),
        (Spectral(2) + KeySink(2, 8), Structure(0)),
        (KeySink(2, 8) + KeySink(2, 8), OF_KEYS),
        (GeneralizedGaussian(2) + Spectral(2), STATIONARY),
        (Window(2, 3) + Laplace(2), STATIONARY),
        (GeneralizedGaussian(2) + KeySink(2, 8), Structure(0)),
    ],
)
def test_structure_is_common_to_all_parts(prior: Sum, structure: Structure):
    assert prior.structure == structure


def test_natural_parameters_are_named_after_their_part():
    prior = Laplace(2) + Spectral(2, 3) + KeySink(2, 8) + Uniform(2)
    natural = prior.natural_parameters()
    assert set(natural) == {
        "laplace.slope",
        "spectral.alpha",
        "spectral.beta",
        "key_sink.slope",
        "key_sink.gain",
        "key_sink.bump",
    }
    torch.testing.assert_close(natural["laplace.slope"], Laplace(2).slope.detach())
    assert natural["spectral.alpha"].shape == (2, 3)


def test_different_numbers_of_heads_raise_an_error_with_the_priors():
    with pytest.raises(ValueError, match=r"equal num_heads, got Laplace\(2\), Spectral\(3\)"):
        _ = Laplace(2) + Spectral(3)


@pytest.mark.parametrize("other", [1, None, "laplace", torch.zeros(3), nn.Identity()])
def test_adding_other_objects_is_refused(other: object):
    with pytest.raises(TypeError):
        _ = Laplace(2) + other  # pyright: ignore[reportOperatorIssue]


def test_windows_intersect():
    prior = Window(1, 5) + Laplace(1) + Window(1, 2)
    distance = torch.arange(-6, 7)
    visible = prior.visible_at(distance)
    assert visible is not None
    assert visible.tolist() == (distance.abs() < 2).tolist()
    assert (Laplace(1) + Uniform(1)).visible_at(distance) is None


def test_log_prior_hides_what_any_part_hides():
    for prior in (Window(1, 5) + Laplace(1) + Window(1, 2), Window(1, 2) + Window(1, 5)):
        hidden = prior.log_prior(POSITIONS, POSITIONS)[0] == -torch.inf
        assert torch.equal(hidden, (POSITIONS[:, None] - POSITIONS).abs() >= 2)


def test_every_part_is_checked():
    prior: Prior = Laplace(2) + KeySink(2, 8, init="recency")
    prior.check(causal=True)
    with pytest.raises(ValueError, match="KeySink with a slope"):
        prior.check(causal=False)


def test_repr_shows_every_part():
    printed = repr(Laplace(2) + Window(2, 7))
    assert "Laplace(num_heads=2" in printed
    assert "Window(num_heads=2, size=7)" in printed


def test_natural_parameters_of_equal_classes_are_numbered():
    parameters = (Laplace(2) + Laplace(2, slopes=[1, 2])).natural_parameters()

    torch.testing.assert_close(parameters["laplace.slope"], Laplace(2).slope.detach())
    torch.testing.assert_close(parameters["laplace_2.slope"], torch.tensor([1.0, 2.0]))


def test_lanes_of_a_sum_are_concatenated():
    prior = Spectral(2, num_frequencies=3, init="recency") + Spectral(2, num_frequencies=2, init="recency")
    positions = torch.arange(7)
    lanes = prior.lanes(positions, positions, dtype=torch.float64)
    torch.testing.assert_close(lanes.query @ lanes.key.T, prior.log_prior(positions, positions, torch.float64))


def test_log_priors_of_keys_are_summed():
    sinks = [KeySink(2, 16, init="recency"), KeySink(2, 16, init={"bump": 2.0})]
    positions = torch.arange(7)
    expected = sinks[0].log_prior_of_key(positions) + sinks[1].log_prior_of_key(positions)
    torch.testing.assert_close((sinks[0] + sinks[1]).log_prior_of_key(positions), expected)
