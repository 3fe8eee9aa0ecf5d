"""Theorems of the papers about attention with a prior, checked on the library's results."""

import math
from itertools import product
from typing import Any

import pytest
import torch
from attention_cases import PRIORS, examples, places, priors
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from attention_priors import GeneralizedGaussian, Laplace, Prior, Spectral, Uniform, attend
from attention_priors.attention.problem import make_problem
from attention_priors.attention.reference import reference


def attention_weights(query: Tensor, key: Tensor, prior: Prior | None, *, causal: bool = True) -> Tensor:
    """Return the weights of ``attend`` itself: with unit vectors as values, the output is the weights."""
    batch, heads = query.shape[:2]
    num_keys = key.shape[2]
    unit = torch.eye(num_keys, dtype=query.dtype).expand(batch, heads, -1, -1)
    return attend(query, key, unit, prior, causal=causal, **places(prior, num_keys))


def contents(seed: int, length: int = 12, heads: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    query, key = (torch.randn(1, heads, length, 5, generator=generator, dtype=torch.float64) for _ in "qk")
    return query, key


def drawn_prior(data: st.DataObject, name: str, seed: int) -> Prior | None:
    return data.draw(priors(name, 2, True, torch.Generator().manual_seed(seed)))


def prior_weights(prior: Prior | None, length: int) -> Tensor:
    """Return π, the weights without content."""
    zero = torch.zeros(1, 2, length, 5, dtype=torch.float64)
    return attention_weights(zero, zero, prior)


@pytest.mark.parametrize("name", PRIORS)
@examples(3)
@given(data=st.data(), seed=st.integers(0, 999))
def test_bam_definition_1_attention_is_the_expectation_of_its_values(name: str, data: st.DataObject, seed: int) -> None:
    """BAM, Definition 1: ``Σ_j p_ij v_j`` with the probabilities ``p_ij = exp(score_ij) / Σ_z exp(score_iz)``."""
    query, key = contents(seed)
    prior = drawn_prior(data, name, seed)
    value = torch.randn(1, 2, 12, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    positions = torch.arange(12)
    score = query @ key.mT / math.sqrt(5)
    if prior is not None:
        score = score + prior.log_prior(positions, positions, torch.float64)
    score = score.masked_fill(positions > positions.unsqueeze(-1), float("-inf"))
    exponentials = (score - score.amax(-1, keepdim=True)).exp()
    p = exponentials / exponentials.sum(-1, keepdim=True)
    torch.testing.assert_close(attention_weights(query, key, prior), p, rtol=1e-8, atol=1e-12)
    expectation = (p.unsqueeze(-1) * value.unsqueeze(-3)).sum(-2)
    torch.testing.assert_close(
        attend(query, key, value, prior, **places(prior, 12)), expectation, rtol=1e-8, atol=1e-12
    )


@pytest.mark.parametrize("name", PRIORS)
@examples(3)
@given(data=st.data(), seed=st.integers(0, 999))
def test_bam_definition_2_weights_are_a_joint_probability_of_content_and_position(
    name: str, data: st.DataObject, seed: int
) -> None:
    """BAM, Definition 2: ``p_ij = p(content | position) · p(position)``. Where scores add up, the content depends on
    the position by one number per query, ``p(content | position) = p(content) / Z``. ``p(position)`` does not depend on
    the content.
    """
    prior = drawn_prior(data, name, seed)
    position = prior_weights(prior, 12)
    impossible = position == 0
    assert impossible[..., torch.ones(12, 12, dtype=torch.bool).triu(1)].all()
    for drawn in (seed, seed + 1):
        query, key = contents(drawn)
        likelihood = (query @ key.mT / math.sqrt(5)).exp()
        joint, content = attention_weights(query, key, prior), attention_weights(query, key, None)
        torch.testing.assert_close(joint.sum(-1), torch.ones_like(joint[..., 0]))
        assert (joint[impossible] == 0).all()
        conditional = likelihood / (position * likelihood).sum(-1, keepdim=True)
        torch.testing.assert_close(joint, conditional * position, rtol=1e-8, atol=1e-12)
        z = (content * position).sum(-1, keepdim=True)
        seen = content > 0
        torch.testing.assert_close((content / z)[seen], conditional[seen], rtol=1e-8, atol=1e-12)
        # Conversely, dividing the joint probability by the content's part gives p(position) for every content.
        rest = joint / likelihood
        torch.testing.assert_close(rest / rest.sum(-1, keepdim=True), position, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("name", PRIORS)
@examples(3)
@given(data=st.data(), seed=st.integers(0, 999))
def test_bam_theorem_1_posterior_is_the_product_of_the_marginals(name: str, data: st.DataObject, seed: int) -> None:
    """BAM, Theorem 1: ``p = p_content · p_position / Z`` with ``Z = Σ p_content p_position``, which is
    ``Z_joint / (Z_content Z_position)``.
    """
    query, key = contents(seed)
    prior = drawn_prior(data, name, seed)
    content, position = attention_weights(query, key, None), prior_weights(prior, 12)
    product = content * position
    z = product.sum(-1, keepdim=True)
    joint = attention_weights(query, key, prior)
    torch.testing.assert_close(joint, product / z, rtol=1e-8, atol=1e-12)

    value = torch.zeros(1, 2, 12, 1, dtype=torch.float64)
    zero = torch.zeros_like(query)
    _, joint_lse = attend(query, key, value, prior, return_lse=True, **places(prior, 12))
    _, content_lse = attend(query, key, value, return_lse=True)
    _, position_lse = attend(zero, zero, value, prior, return_lse=True, **places(prior, 12))
    # With a sharply peaked prior, Z is a difference of numbers as large as the log-prior.
    size = 1 + float(position_lse.detach().abs().max())
    torch.testing.assert_close(
        joint_lse - content_lse - position_lse, z.squeeze(-1).log(), rtol=1e-8, atol=1e-13 * size
    )


@examples(8)
@given(seed=st.integers(0, 999), temperature=st.floats(0.1, 5.0))
def test_goat_definition_2_1_attention_alone_minimises_the_cost_less_the_entropy(seed: int, temperature: float) -> None:
    """GOAT, Definition 2.1: only ``softmax(s / τ)`` minimises ``<p, -s> - τ H(p)``, with unscaled scores ``s``."""
    query, key = contents(seed)
    unit = torch.eye(12, dtype=torch.float64).expand(1, 2, -1, -1)
    best = attend(query, key, unit, causal=False, softmax_scale=1 / temperature)
    score = query @ key.mT

    def objective(p: Tensor) -> Tensor:
        return -(p * score).sum(-1) + temperature * torch.special.xlogy(p, p).sum(-1)

    # Among distributions, the cost is stationary there: all keys have equal gradients.
    gradient = -score + temperature * (best.log() + 1)
    torch.testing.assert_close(gradient, gradient[..., :1].expand_as(gradient), rtol=0, atol=1e-9)
    # All other distributions cost more, by τ KL(p ‖ best): random, uniform, one-hot and nearby ones.
    drawn = torch.rand(best.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    others = [drawn / drawn.sum(-1, keepdim=True), torch.full_like(best, 1 / 12)]
    others += [row.expand_as(best) for row in unit[0, 0]]
    for other, step in product(others, (1.0, 0.01)):
        p = best.lerp(other, step)
        excess = objective(p) - objective(best)
        apart = (p - best).abs().amax(-1) > 1e-4  # a query may see only one key
        assert (excess[apart] > 0).all()
        divergence = (torch.special.xlogy(p, p) - p * best.log()).sum(-1)
        torch.testing.assert_close(excess, temperature * divergence, rtol=1e-6, atol=1e-11)


@pytest.mark.parametrize("name", PRIORS)
@examples(3)
@given(data=st.data(), seed=st.integers(0, 999))
def test_goat_propositions_2_2_and_3_1_attention_is_the_minimum(name: str, data: st.DataObject, seed: int) -> None:
    """GOAT, Propositions 2.2 and 3.1: ``softmax(s + log π)`` is the only minimum of ``-<p, s> + KL(p ‖ π)``, and
    the minimum is ``-log Σ π e^s``.
    """
    query, key = contents(seed)
    prior = drawn_prior(data, name, seed)
    best, position = attention_weights(query, key, prior), prior_weights(prior, 12)
    score = query @ key.mT / math.sqrt(5)

    def objective(p: Tensor) -> Tensor:
        divergence = torch.where(p > 0, p * (p.clamp(min=1e-300) / position.clamp(min=1e-300)).log(), 0.0)
        return (-p * score + divergence).sum(-1)

    minimum = objective(best)
    torch.testing.assert_close(minimum, -(position * score.exp()).sum(-1).log(), rtol=1e-8, atol=1e-10)
    generator = torch.Generator().manual_seed(seed)
    for size in (1e-3, 0.1, 1.0, 5.0):
        # Another distribution on the support of π: the best one with perturbed logits.
        moved = best * (size * torch.randn(best.shape, generator=generator, dtype=torch.float64)).exp()
        other = moved / moved.sum(-1, keepdim=True)
        worse = objective(other) - minimum
        assert (worse >= -1e-10).all()
        # The excess is exactly KL(other ‖ best).
        excess = torch.where(other > 0, other * (other.clamp(min=1e-300) / best.clamp(min=1e-300)).log(), 0.0).sum(-1)
        torch.testing.assert_close(worse, excess, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", PRIORS)
@examples(3)
@given(data=st.data(), seed=st.integers(0, 999), strength=st.sampled_from([0.01, 0.3, 2.0]))
def test_goat_theorem_5_1_collapse_to_the_prior(name: str, data: st.DataObject, seed: int, strength: float) -> None:
    """GOAT, Theorem 5.1: content scores that differ by at most ω give ``π e^-ω <= p <= π e^ω``."""
    query, key = contents(seed)
    query = query * strength
    prior = drawn_prior(data, name, seed)
    joint, position = attention_weights(query, key, prior), prior_weights(prior, 12)
    score = query @ key.mT / math.sqrt(5)
    visible = torch.ones(12, 12, dtype=torch.bool).tril()
    highest = score.masked_fill(~visible, float("-inf")).amax(-1, keepdim=True)
    lowest = score.masked_fill(~visible, float("inf")).amin(-1, keepdim=True)
    spread = highest - lowest
    slack = 1e-12
    assert (joint >= position * (-spread).exp() * (1 - 1e-9) - slack).all()
    assert (joint <= position * spread.exp() * (1 + 1e-9) + slack).all()
    # The bounds are not trivial: content changes the weights.
    if name in ("none", "uniform"):
        assert float((joint - position).abs().max()) > 1e-4


@pytest.mark.parametrize("name", PRIORS)
@examples(3)
@given(data=st.data(), seed=st.integers(0, 999), sink=st.integers(0, 11), size=st.floats(0.01, 10.0))
def test_goat_definition_5_3_noise_in_the_context_moves_the_output_by_its_mass_at_most(
    name: str, data: st.DataObject, seed: int, sink: int, size: float
) -> None:
    """GOAT, Definition 5.3: ``Ψ = Σ_k p_ik = 1 - p_ij*`` over all keys ``k`` except the sink ``j*``. If their values
    change by at most ``ε``, the output changes by at most ``ε Ψ`` (equation 29). It changes by exactly ``ε Ψ`` if all
    values change in one direction.
    """
    query, key = contents(seed)
    prior = drawn_prior(data, name, seed)
    weights = attention_weights(query, key, prior)
    context = [k for k in range(12) if k != sink]
    sensitivity = weights[..., context].sum(-1)
    torch.testing.assert_close(sensitivity, 1 - weights[..., sink], rtol=1e-9, atol=1e-12)

    value, drawn = torch.randn(2, 1, 2, 12, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    one_way, any_way = torch.zeros_like(value), torch.zeros_like(value)
    one_way[..., context, 0] = size
    any_way[..., context, :] = size * (drawn / drawn.norm(dim=-1, keepdim=True).clamp(min=1))[..., context, :]
    where = places(prior, 12)
    before = attend(query, key, value, prior, **where)
    found, most = (
        (attend(query, key, value + noise, prior, **where) - before).norm(dim=-1) for noise in (any_way, one_way)
    )
    torch.testing.assert_close(most, size * sensitivity, rtol=1e-8, atol=1e-12)
    assert (found <= most * (1 + 1e-9) + 1e-12).all()


@examples(4)
@given(seed=st.integers(0, 999), sink=st.integers(0, 9))
def test_goat_theorem_5_4_with_a_uniform_prior_sensitivity_tends_to_1(seed: int, sink: int) -> None:
    """GOAT, Theorem 5.4, part 1 (equation 30): content that vanishes leaves ``Ψ = (L - 1) / L``, which tends to 1."""
    generator = torch.Generator().manual_seed(seed)
    query = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    for prior in (None, Uniform(1), GeneralizedGaussian(1, init="uniform")):
        limits = []
        for length in (10, 100, 1000, 10_000):
            content = torch.rand(1, 1, length, 1, generator=generator, dtype=torch.float64)
            is_context = torch.ones(1, 1, length, 1, dtype=torch.float64)
            is_context[:, :, sink] = 0
            limit = (length - 1) / length
            for omega in (1.0, 1e-3, 1e-6, 0.0):  # range of the content's scores
                sensitivity = attend(query, omega * content, is_context, prior, softmax_scale=1.0).item()
                assert abs(sensitivity - limit) <= math.expm1(omega) / length + 1e-12
            limits.append(sensitivity)
        assert limits == sorted(limits)
        assert 1 - limits[-1] == pytest.approx(1e-4)


@examples(8)
@given(seed=st.integers(0, 999), slope=st.floats(0.01, 3.0), num_queries=st.integers(1, 20), causal=st.just(True))
def test_goat_proposition_f6_key_only_slope_is_recency(seed: int, slope: float, num_queries: int, causal: bool) -> None:
    """GOAT, Proposition F.6: under a causal mask, a key bias ``m j`` gives the weights of ``-m |i - j|``."""
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (
        torch.randn(1, 2, n, 4, generator=generator, dtype=torch.float64) for n in (num_queries, 20, 20)
    )
    prior = Laplace(2, slopes=[slope, 2 * slope])
    # Uses the prior's slopes, which are rounded to float32.
    slopes = prior.log_slope.detach().double().exp()
    only_keys = (slopes.unsqueeze(-1) * torch.arange(20.0, dtype=torch.float64)).unsqueeze(-2)
    hidden = torch.ones(num_queries, 20, dtype=torch.bool).triu(21 - num_queries)
    mask = only_keys.masked_fill(hidden, float("-inf")).unsqueeze(0)
    expected = attend(query, key, value, causal=False, attn_mask=mask)
    by_table = attend(query, key, value, prior, backend="toeplitz")
    by_keys = attend(query, key, value, key_bias=only_keys.squeeze(-2).unsqueeze(0), backend="toeplitz")
    for found in (by_table, by_keys):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_goat_proposition_f6_lanes_without_the_mask_are_another_prior() -> None:
    """Proposition F.6 needs the mask: without it, ``m j`` prefers the last key and ``-m |i - j|`` a near one."""
    prior = Laplace(1, slopes=[0.5])
    zero = torch.zeros(1, 1, 8, 2, dtype=torch.float64)
    unit = torch.eye(8, dtype=torch.float64).expand(1, 1, -1, -1)
    weights = attend(zero, zero, unit, prior, causal=False)
    assert weights[0, 0].argmax(-1).tolist() == list(range(8))


@pytest.mark.parametrize("backend", ["auto", "blockwise", "reference"])
def test_dropout_keeps_the_mean_output(backend: str) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 2, 6, 4, generator=generator, dtype=torch.float64) for _ in "qkv")
    prior = Laplace(2)
    many = [x.expand(4000, -1, -1, -1) for x in (query, key, value)]
    whole, lse = attend(query, key, value, prior, return_lse=True)

    def dropped(seed: int) -> tuple[Tensor, Tensor]:
        torch.manual_seed(seed)
        return attend(*many, prior, dropout_p=0.5, return_lse=True, backend=backend)  # pyright: ignore[reportArgumentType, reportCallIssue]

    first, first_lse = dropped(0)
    again, _ = dropped(0)
    other, _ = dropped(1)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    # Six standard errors of the mean.
    error = (first.mean(0) - whole[0]).abs()
    assert (error <= 6 * first.std(0) / math.sqrt(4000)).all()
    assert (first.std(0) > 0.1).any()
    torch.testing.assert_close(first_lse, lse.expand(4000, -1, -1))


def test_recomputed_blocks_drop_the_same_weights() -> None:
    """The backward pass recomputes blocks and must drop the same weights again."""
    torch.manual_seed(0)
    # float32, so that one block of queries does not hold all pairs: 2 · 4 · 900 · 900 > 2^21.
    query, key, value = (torch.randn(2, 4, 900, 2, requires_grad=True) for _ in "qkv")

    torch.manual_seed(1)
    out = attend(query, key, value, dropout_p=0.3)
    (gradient,) = torch.autograd.grad(out.sum(), value)
    # d out / d value are the kept weights, so the sum of `value · gradient` is the output itself.
    torch.testing.assert_close((gradient * value).sum(), out.sum(), rtol=1e-4, atol=1e-2)


def test_reference_returns_the_weights() -> None:
    """Unit vectors as values give the same weights, and each row sums to one."""
    query, key = contents(0)
    prior = GeneralizedGaussian(2, init="spread") + Spectral(2)
    nothing: dict[str, Any] = dict.fromkeys(
        (
            "logit_scale",
            "softmax_scale",
            "query_positions",
            "key_positions",
            "document_ids",
            "key_padding_mask",
            "attn_mask",
        )
    )
    problem = make_problem(query, key, key, prior, causal=True, relative=None, dropout_p=0.0, **nothing)
    _, _, weights = reference(problem)
    torch.testing.assert_close(weights, attention_weights(query, key, prior), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))
