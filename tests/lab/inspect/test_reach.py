"""The reach of priors, against closed forms and against attention itself."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_priors import GeneralizedGaussian, KeySink, Laplace, Prior, SSMax, Uniform, Window, attend
from attention_priors.attention.attend import attend_with_weights
from attention_priors.attention.logit_scale import ResidualSSMax
from attention_priors.lab.inspect import effective_reach, head_roles, window_for
from attention_priors.lab.inspect.priors import last_prior
from attention_priors.priors import Axial
from thoroughness import examples


def test_reach_of_a_slope_is_logarithmic() -> None:
    """``Σ_{d > r} e^(-m d) / Σ_d e^(-m d) = e^(-m (r + 1))`` in an infinite text."""
    slopes = [0.01, 0.5, 2.0]
    found = effective_reach(Laplace(3, slopes=slopes), 100_000, (0.5, 0.9, 0.99))
    for column, slope in enumerate(slopes):
        for row, share in enumerate((0.5, 0.9, 0.99)):
            assert int(found[row, column]) == max(0, math.ceil(-math.log(1 - share) / slope - 1))


def test_reach_without_a_prior_is_a_share_of_the_text() -> None:
    assert effective_reach(Uniform(1), 1000, (0.5, 0.9, 1.0)).flatten().tolist() == [499, 899, 999]


def test_retrieval_heads_reach_farther_than_the_uniform_prior() -> None:
    prior = GeneralizedGaussian(2, init="neighbours")  # one head of each kind
    found = effective_reach(prior, 100_000, (0.5,))[0]
    assert int(found[0]) > 50_000
    assert int(found[1]) <= 2


def test_reach_of_a_sink_is_the_length_of_the_text() -> None:
    prior = KeySink(1, train_length=64)
    with torch.no_grad():
        prior.bump.fill_(50.0)
    assert int(effective_reach(prior, 5000, (0.5,))) == 4999


def test_priors_on_grids_and_invalid_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="prior must be over a line, got 'axial'"):
        effective_reach(Axial(1, "laplace"), 64)
    for length in (100.0, 0, True):
        with pytest.raises(ValueError, match=f"^length must be a positive integer, got {length}"):
            effective_reach(Laplace(1), length)  # pyright: ignore[reportArgumentType]


def test_every_content_range_has_a_window() -> None:
    """``e^1000`` overflows a float. A slope of 1 beyond 745 tokens underflows."""
    prior = Laplace(2, slopes=[1.0, 1e-3])
    found = [window_for(prior, 2000, 0.01, content_range=omega).tolist() for omega in (700.0, 740.0, 800.0, 1000.0)]
    assert found == [[704, 1999], [744, 1999], [804, 1999], [1004, 1999]]
    # Without tolerance, the window holds every key of non-zero weight, except hidden keys.
    assert window_for(prior, 2000, 0.0).tolist() == [1999, 1999]
    assert window_for(Window(1, 40), 2000, 0.01, content_range=1000.0).tolist() == [39]


def test_reach_at_a_million_tokens() -> None:
    found = effective_reach(Laplace(1, slopes=[1e-3]), 2**20, (0.99,))
    assert int(found) == math.ceil(math.log(100) / 1e-3 - 1)


@settings(max_examples=examples(12))
@given(
    seed=st.integers(0, 999), tolerance=st.sampled_from([0.0, 1e-6, 0.01, 0.3]), spread=st.sampled_from([0.0, 1.0, 4.0])
)
def test_a_window_loses_at_most_the_tolerance(seed: int, tolerance: float, spread: float) -> None:
    length, generator = 60, torch.Generator().manual_seed(seed)
    prior = Laplace(2, slopes=[0.1, 0.8])
    # Content of exactly that range: one feature of the key times one of the query.
    key = torch.rand(1, 1, length, 1, generator=generator, dtype=torch.float64)
    query = torch.full((1, 2, 1, 1), spread, dtype=torch.float64)
    unit = torch.eye(length, dtype=torch.float64).expand(1, 1, -1, -1)
    weights = attend(query, key, unit, prior, softmax_scale=1.0)[0, :, 0]
    sizes = window_for(prior, length, tolerance, spread)
    for head, size in enumerate(sizes.tolist()):
        assert float(weights[head, : length - 1 - size].sum()) <= tolerance + 1e-15
    # With adverse content, a smaller window would lose too much.
    for head, size in enumerate(sizes.tolist()):
        if 0 < size < length - 1:
            worst = torch.zeros(1, 1, length, 1, dtype=torch.float64)
            worst[:, :, : length - size] = 1
            lost = attend(query, worst, unit, prior, softmax_scale=1.0)[0, head, 0, : length - size].sum()
            assert float(lost) > tolerance


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda prior: effective_reach(prior, 0), "length must be a positive"),
        (lambda prior: effective_reach(prior, 9, (0.0,)), "shares must be above 0"),
        (lambda prior: effective_reach(prior, 9, (1.1,)), "shares must be above 0"),
        (lambda prior: window_for(prior, 9, 1.0), "tolerance must be in"),
        (lambda prior: window_for(prior, 9, 0.1, -1.0), "content_range must be"),
        (lambda prior: window_for(prior, 9, 0.1, math.inf), "content_range must be"),
        (lambda prior: effective_reach(prior, 9, logit_scale=SSMax(3)), "num_heads=3, but the prior has 2"),
    ],
)
def test_invalid_arguments_are_named(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(Laplace(2))


def test_reach_of_a_window_is_its_size() -> None:
    assert effective_reach(Window(1, 40), 1000, (0.5, 1.0)).flatten().tolist() == [19, 39]
    assert window_for(Window(1, 40), 1000, 0.0).tolist() == [39]


def test_priors_that_hide_all_keys_have_no_reach() -> None:
    class Blind(Window):
        def visible_at(self, distance: torch.Tensor) -> torch.Tensor:
            return torch.zeros_like(distance, dtype=torch.bool)

    with pytest.raises(ValueError, match="hides every key of 3"):
        effective_reach(Blind(1, 5), 3)


def test_the_logit_scale_sharpens_the_prior_that_it_multiplies() -> None:
    """``c K`` of a slope ``m`` is the slope ``c m``, and ``c = s ln n``."""
    slopes, length, s = [0.001, 0.02], 1000, 0.5
    scaled = Laplace(2, slopes=[slope * s * math.log(length) for slope in slopes])
    prior, scale = Laplace(2, slopes=slopes), SSMax(2, init=s)
    torch.testing.assert_close(
        effective_reach(prior, length, logit_scale=scale), effective_reach(scaled, length), rtol=0, atol=0
    )
    assert (
        window_for(prior, length, 0.1, 2.0, logit_scale=scale).tolist() == window_for(scaled, length, 0.1, 2.0).tolist()
    )
    assert head_roles(prior, length, logit_scale=scale) == head_roles(scaled, length) == ["long-tailed", "local"]
    assert effective_reach(prior, length)[1, 0] > effective_reach(scaled, length)[1, 0]
    # A scale of the content only changes nothing.
    content_alone = SSMax(2, init=s, include_prior=False)
    assert effective_reach(prior, length, logit_scale=content_alone).equal(effective_reach(prior, length))
    assert head_roles(prior, length, logit_scale=SSMax(2, init=0.0)) == ["uniform"] * 2


def test_every_head_has_its_own_logit_scale() -> None:
    prior, scale = Laplace(3, slopes=[0.05, 0.05, 0.05]), SSMax(3)
    with torch.no_grad():
        scale.s.copy_(torch.tensor([0.1, 1.0, -0.5]))
    found = effective_reach(prior, 400, logit_scale=scale)
    for head, s in enumerate(scale.s.tolist()):
        alone = effective_reach(Laplace(1, slopes=[0.05]), 400, logit_scale=SSMax(1, init=s))
        assert found[:, head].tolist() == alone[:, 0].tolist()


@pytest.mark.parametrize(
    ("prior", "scale"),
    [
        (Laplace(2), SSMax(2, init=0.7)),
        (Laplace(2), SSMax(2, init=-0.3)),
        (Laplace(2) + Window(2, 9), SSMax(2, init=-0.3)),
        (Window(2, 9), SSMax(2, init=0.0)),
        (KeySink(2, train_length=40, init="recency"), ResidualSSMax(2, init=0.5, train_length=16)),
        (GeneralizedGaussian(2, init="neighbours"), SSMax(2, init=0.7, include_prior=False)),
    ],
    ids=["slope", "negative", "window, negative", "window, zero", "sink, residual", "content alone"],
)
def test_the_last_querys_prior_is_attention_without_content(prior: Prior, scale: SSMax) -> None:
    nothing = torch.zeros(1, 2, 40, 4, dtype=torch.float64)
    weights = attend_with_weights(nothing, nothing, nothing, prior, logit_scale=scale)[1]
    torch.testing.assert_close(last_prior(prior, 40, scale), weights[0, :, -1].detach(), rtol=1e-9, atol=1e-12)
