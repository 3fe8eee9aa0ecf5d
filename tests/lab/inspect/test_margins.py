"""Sinks by margin: the bounds hold on random logits in float64, and are attained where the paper says so."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_priors.lab.inspect import (
    AttentionLogits,
    collapse_bounds,
    content_range,
    context_sensitivity,
    decompose,
    sensitivity_bound,
    sink_margin,
)
from thoroughness import examples

drawn = settings(max_examples=examples(30))


@st.composite
def logits(draw: st.DrawFn) -> AttentionLogits:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    shape = (draw(st.integers(1, 3)), draw(st.integers(1, 5)), draw(st.integers(1, 9)))
    sizes = (draw(st.sampled_from([0.0, 0.1, 3.0])) for _ in "fg")
    content, position = (size * torch.randn(shape, generator=generator, dtype=torch.float64) for size in sizes)
    return AttentionLogits(
        content, position, torch.rand(shape, generator=generator) < draw(st.sampled_from([0.5, 1.1]))
    )


@drawn
@given(logits())
def test_goat_theorem_5_1_collapse_to_the_prior(given: AttentionLogits) -> None:
    low, high = collapse_bounds(given)
    p = decompose(given).posterior
    assert (p >= low * (1 - 1e-12)).all()
    assert (p <= high * (1 + 1e-12)).all()


def test_goat_theorem_5_1_bounds_are_approached_by_two_keys() -> None:
    """A key of small prior that content favours by ω has the weight ``π e^ω``, up to terms of the order of π."""
    omega, faint = 2.0, 1e-9
    position = torch.tensor([[0.0, math.log(faint)]], dtype=torch.float64)
    visible = torch.ones(1, 2, dtype=torch.bool)
    for content, which in (([0.0, omega], 1), ([omega, 0.0], 0)):
        given = AttentionLogits(torch.tensor([content], dtype=torch.float64), position, visible)
        bound = collapse_bounds(given)[which][0, 1]
        assert float(decompose(given).posterior[0, 1] / bound) == pytest.approx(1, rel=1e-7)
    # Without content, both equal the prior.
    given = AttentionLogits(torch.zeros(1, 2, dtype=torch.float64), position, visible)
    for bound in collapse_bounds(given):
        torch.testing.assert_close(bound, decompose(given).posterior)


def test_bounds_of_strong_content_are_finite() -> None:
    """``e^ω`` overflows in float32 above 88.7 nats. Hidden keys, and keys of tiny prior, must not give nan."""
    content = torch.tensor([[100.0, 0.0, 5.0], [3.0, 2.0, 90.0], [1.0, 2.0, 3.0]], requires_grad=True)
    position = torch.tensor([[0.0, -150.0, 0.0], [0.0, 0.0, -200.0], [0.0, 0.0, 0.0]])
    visible = torch.tensor([[True, True, False], [True, True, True], [False, False, False]])
    low, high = collapse_bounds(AttentionLogits(content, position, visible))
    both = low.sum() + high.clamp(max=1).sum()
    assert torch.isfinite(torch.autograd.grad(both, content)[0]).all()
    low, high = low.detach(), high.detach()
    assert not (low.isnan() | high.isnan()).any()
    assert float(high[0, 1]) == pytest.approx(math.exp(-50.0), rel=1e-4)
    assert float(high[1, 2]) == 0  # e^-112.7
    assert float(high[2].sum()) == float(low[2].sum()) == float(high[0, 2]) == float(low[0, 2]) == 0


def test_the_upper_bound_is_finite_in_float32() -> None:
    logits = AttentionLogits(torch.tensor([[200.0, 0.0]]), torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool))
    assert collapse_bounds(logits)[1].isfinite().all()


def test_a_query_without_keys_has_no_range() -> None:
    visible = torch.tensor([[False, False], [True, True], [True, False]])
    found = content_range(AttentionLogits(torch.tensor([[1.0, 4.0]] * 3), torch.zeros(3, 2), visible))
    assert found.tolist() == [0, 3, 0]


@drawn
@given(logits(), st.integers(0, 8))
def test_goat_definition_5_2_margin(given: AttentionLogits, key: int) -> None:
    key %= given.content.shape[-1]
    found = sink_margin(given, key)
    z = given.total
    for place in torch.cartesian_prod(torch.arange(z.shape[0]), torch.arange(z.shape[1])).tolist():
        row, visible = z[tuple(place)], given.visible[tuple(place)]
        others = [k for k in range(len(row)) if k != key and visible[k]]
        margin = float(found.total[tuple(place)])
        if not visible[key]:
            assert margin == -math.inf
        elif not others:
            assert margin == math.inf
        else:
            assert margin == pytest.approx(min(float(row[key] - row[k]) for k in others), abs=1e-12)
            parts = float(found.content[tuple(place)] + found.position[tuple(place)])
            assert parts == pytest.approx(margin, abs=1e-10)
            g = given.position[tuple(place)]
            alone = min(float(g[key] - g[k]) for k in others)
            assert float(found.position_alone[tuple(place)]) == pytest.approx(alone, abs=1e-12)
            assert (margin > 0) == bool(row.argmax() == key) or margin == 0


def test_a_split_margin_is_undefined_without_a_runner_up_or_a_sink() -> None:
    visible = torch.tensor([[True, True, False], [True, False, False], [False, True, True], [False, False, False]])
    found = sink_margin(AttentionLogits(torch.randn(4, 3), torch.randn(4, 3), visible), 0)
    for part in (found.content, found.position):
        assert part.isnan().tolist() == [False, True, True, True]
    for margin in (found.total, found.position_alone):
        assert margin[1:].tolist() == [math.inf, -math.inf, -math.inf]


@drawn
@given(logits(), st.integers(0, 8))
def test_goat_theorem_5_4_context_sensitivity(given: AttentionLogits, key: int) -> None:
    key %= given.content.shape[-1]
    margin = sink_margin(given, key)
    seen = given.visible[..., key]
    posterior = decompose(given).posterior
    sensitivity = context_sensitivity(posterior, key)
    others = torch.arange(posterior.shape[-1]) != key
    torch.testing.assert_close(sensitivity[seen], posterior[..., others].sum(-1)[seen])
    number = given.visible.sum(-1)
    for bound in (
        sensitivity_bound(margin.total, number),
        sensitivity_bound(margin.position_alone - content_range(given), number),
    ):
        assert (sensitivity[seen] <= bound[seen] * (1 + 1e-12) + 1e-15).all()


def test_goat_theorem_5_4_is_attained_and_needs_the_total_margin() -> None:
    visible = torch.ones(1, 5, dtype=torch.bool)
    position = torch.tensor([[1.3, 0.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    still = AttentionLogits(torch.zeros(1, 5, dtype=torch.float64), position, visible)
    bound = sensitivity_bound(torch.tensor([1.3], dtype=torch.float64), 5)
    assert float(bound) == pytest.approx(4 / (math.exp(1.3) + 4))
    torch.testing.assert_close(context_sensitivity(decompose(still).posterior, 0), bound)
    # If content opposes the sink, the prior's margin alone promises too much.
    against = AttentionLogits(torch.tensor([[-1.0, 0.0, 0.0, 0.0, 0.0]], dtype=torch.float64), position, visible)
    assert float(context_sensitivity(decompose(against).posterior, 0)) > float(bound)


def test_goat_theorem_5_4_a_fixed_margin_does_not_bound_it_away_from_1() -> None:
    """The paper claims a bound away from 1 at every length. For that, the margin must grow like ln n."""
    lengths = torch.tensor([10.0, 1e3, 1e6, 1e9], dtype=torch.float64)
    fixed = sensitivity_bound(torch.full((4,), 5.0, dtype=torch.float64), lengths)
    assert (fixed.diff() > 0).all()
    assert float(1 - fixed[-1]) < 1e-6
    growing = sensitivity_bound(lengths.log() + 5.0, lengths)
    assert float(growing.max()) < math.exp(-5.0)


@drawn
@given(logits(), st.integers(0, 999))
def test_goat_equation_29_bounds_the_effect_of_noise(given: AttentionLogits, seed: int) -> None:
    p = decompose(given).posterior
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(*p.shape[:-2], p.shape[-1], 3, generator=generator, dtype=torch.float64)
    noise = noise / noise.norm(dim=-1, keepdim=True)
    noise[..., 0, :] = 0
    moved = (p @ noise).norm(dim=-1)
    assert (moved <= context_sensitivity(p, 0) * (1 + 1e-12) + 1e-15).all()


def test_sensitivity_is_exact_near_0() -> None:
    weights = torch.tensor([1.0, 1e-20], dtype=torch.float64)
    assert float(context_sensitivity(weights, 0)) == 1e-20
    assert float(sensitivity_bound(torch.tensor(800.0, dtype=torch.float64), 7)) < 1e-300
    assert float(sensitivity_bound(torch.tensor(0.0), 1)) == 0


@pytest.mark.parametrize("key", [-1, 4])
def test_missing_keys_are_refused(key: int) -> None:
    logits = AttentionLogits(torch.zeros(2, 4), torch.zeros(4), torch.ones(4, dtype=torch.bool))
    with pytest.raises(ValueError, match=f"key must be from 0 to 3, got {key}"):
        sink_margin(logits, key)
    with pytest.raises(ValueError, match=f"key must be from 0 to 3, got {key}"):
        context_sensitivity(torch.full((2, 4), 0.25), key)
