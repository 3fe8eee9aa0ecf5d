"""The Bayesian account of attention: closed forms on random logits in float64, and attend()."""

import math
from decimal import Context, Decimal, localcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from attention_priors import GeneralizedGaussian, KeySink, Laplace, Spectral, SSMax, Window, attend
from attention_priors.attention.attend import attend_with_weights
from attention_priors.encodings import ShawVectors
from attention_priors.lab.inspect import AttentionLogits, attention_logits, decompose, decompose_attention
from thoroughness import examples

drawn = settings(max_examples=examples(25))


@st.composite
def logits(draw: st.DrawFn, blind: bool = True) -> AttentionLogits:
    """Draw logits of any size and temperature, with some keys hidden. With ``blind``, some queries see no key."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    shape = (draw(st.integers(1, 3)), draw(st.integers(1, 6)), draw(st.integers(1, 9)))
    sizes = (draw(st.sampled_from([0.0, 1e-3, 1.0, 30.0])) for _ in "fg")
    content, position = (size * torch.randn(shape, generator=generator, dtype=torch.float64) for size in sizes)
    visible = torch.rand(shape, generator=generator) < draw(st.sampled_from([0.3, 0.8, 1.1]))
    if not blind:
        visible[..., draw(st.integers(0, shape[-1] - 1))] = True
    return AttentionLogits(content, position, visible)


def seeded(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@drawn
@given(logits(blind=False))
def test_bam_theorem_1_posterior_is_the_product_of_the_marginals(given: AttentionLogits) -> None:
    found = decompose(given)
    product = found.content * found.position
    close(found.overlap, product.sum(-1))
    close(found.posterior, product / found.overlap.unsqueeze(-1))
    close(found.posterior, given.total.softmax(-1))
    for marginal in (found.content, found.position, found.posterior):
        close(marginal.sum(-1), torch.ones_like(found.overlap))
        assert (marginal[~given.visible] == 0).all()


@drawn
@given(logits(blind=False))
def test_bam_appendix_i_overlap_is_the_ratio_of_the_normalisers(given: AttentionLogits) -> None:
    """``Z = Z_joint / (Z_content Z_position)``. BAM prints the reciprocal beside the sum."""
    found = decompose(given)
    normalisers = [
        x.masked_fill(~given.visible, -torch.inf).logsumexp(-1)
        for x in (given.content + given.position, given.content, given.position)
    ]
    close(found.log_overlap, normalisers[0] - normalisers[1] - normalisers[2])
    close(found.interaction_free_energy, -found.overlap.log())


@drawn
@given(logits(blind=False))
def test_divergences_match_their_definitions(given: AttentionLogits) -> None:
    found = decompose(given)

    def divergence(p: Tensor, q: Tensor) -> Tensor:
        return torch.where(p > 0, p * (p.clamp(min=1e-300) / q.clamp(min=1e-300)).log(), 0.0).sum(-1)

    close(found.divergence_from_position, divergence(found.posterior, found.position))
    close(found.divergence_from_content, divergence(found.posterior, found.content))
    # KL(p ‖ p_content p_position) = -ln Z is the sum of both divergences and the posterior's entropy.
    entropy = -torch.special.xlogy(found.posterior, found.posterior).sum(-1)
    close(found.interaction_free_energy, found.divergence_from_position + found.divergence_from_content + entropy)
    assert (found.position_share >= -1e-12).all()
    assert (found.position_share <= 1 + 1e-12).all()


@drawn
@given(st.integers(0, 2**20), st.floats(-6, 2), st.floats(-6, 2))
def test_float32_stays_exact_for_weak_logits(seed: int, content: float, position: float) -> None:
    """Spreads of content and position range from 1e-6 to 100 nats, with some keys hidden."""
    generator = torch.Generator().manual_seed(seed)
    f, g = (10**size * torch.randn(4, 30, generator=generator) for size in (content, position))
    visible = torch.rand(4, 30, generator=generator) < 0.9
    found = decompose(AttentionLogits(f, g, visible))
    exact = decompose(AttentionLogits(f.double(), g.double(), visible))
    for name in ("divergence_from_position", "divergence_from_content", "position_share", "agreement"):
        value = getattr(found, name)
        assert value.dtype == torch.float32
        torch.testing.assert_close(value.double(), getattr(exact, name), rtol=1e-6, atol=1e-30)
    assert (found.position_share >= 0).all()
    assert (found.position_share <= 1).all()


def test_divergences_of_weak_logits_are_half_of_their_variances() -> None:
    """To leading order, ``KL(p ‖ p_position) = Var(f) / 2``, and vice versa, without loss of digits."""
    torch.manual_seed(0)
    f, g = (size * torch.randn(5, 40, dtype=torch.float64) for size in (1e-7, 3e-7))
    found = decompose(AttentionLogits(f, g, torch.ones(5, 40, dtype=torch.bool)))
    for value, of in ((found.divergence_from_position, f), (found.divergence_from_content, g)):
        torch.testing.assert_close(value, of.var(-1, correction=0) / 2, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("size", [3e-3, 9.9e-3, 1.01e-2, 3e-2, 1.0])
def test_divergences_are_exact_on_both_sides_of_the_series(size: float) -> None:
    f, g = [0.0, size, -size / 3], [0.4 * size, 0.0, size]
    of_content, of_position = (torch.tensor([row], dtype=torch.float64) for row in (f, g))
    found = decompose(AttentionLogits(of_content, of_position, torch.ones(1, 3, dtype=torch.bool)))

    def softmax(x: list[Decimal]) -> list[Decimal]:
        e = [v.exp() for v in x]
        return [v / sum(e) for v in e]

    with localcontext(Context(prec=50)):
        content, position = ([Decimal(v) for v in row] for row in (f, g))
        p = softmax([a + b for a, b in zip(content, position, strict=True)])
        marginals = softmax(position), softmax(content)
        exact = [float(sum(a * (a / b).ln() for a, b in zip(p, q, strict=True))) for q in marginals]
    parts = (found.divergence_from_position, found.divergence_from_content)
    assert [float(part) for part in parts] == pytest.approx(exact, rel=1e-12, abs=0)


def test_the_share_of_weak_logits_is_the_share_of_variances() -> None:
    torch.manual_seed(0)
    f, g = (size * torch.randn(5, 40, dtype=torch.float64) for size in (1e-7, 3e-7))
    share = decompose(AttentionLogits(f, g, torch.ones(5, 40).bool())).position_share
    variances = f.var(-1, correction=0), g.var(-1, correction=0)
    torch.testing.assert_close(share, variances[1] / (variances[0] + variances[1]), rtol=1e-5, atol=0.0)


def test_constants_over_all_keys_change_nothing() -> None:
    torch.manual_seed(0)
    f, g = (torch.randn(4, 9, dtype=torch.float64) for _ in "fg")
    visible = torch.rand(4, 9) < 0.5
    plain = decompose(AttentionLogits(f, g, visible))
    far = decompose(AttentionLogits(f - 2.0**20, g - 2.0**18, visible))
    for name in ("content", "position", "posterior", "log_overlap", "agreement", "position_share"):
        torch.testing.assert_close(getattr(far, name), getattr(plain, name), rtol=1e-8, atol=1e-8)


def test_all_parts_have_the_dtype_of_the_logits() -> None:
    found = decompose(AttentionLogits(torch.randn(2, 3), torch.randn(2, 3), torch.ones(2, 3).bool()))
    assert {value.dtype for value in vars(found).values()} == {torch.float32}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_keys_of_weight_0_give_no_nan(dtype: torch.dtype) -> None:
    far = torch.finfo(dtype).min
    f = torch.tensor([[0.0, -2000.0, 5.0], [3.0, 0.0, -1e-9]], dtype=dtype, requires_grad=True)
    g = torch.tensor([[0.0, 0.0, -3000.0], [0.0, far, 0.0]], dtype=dtype, requires_grad=True)
    visible = torch.tensor([[True, True, True], [True, True, False]])
    found = decompose(AttentionLogits(f, g, visible))
    parts = torch.stack([found.divergence_from_position, found.divergence_from_content, found.position_share])
    expected = [[math.log(2), 0.0], [5.0 + math.log1p(math.exp(-5.0)), math.log1p(math.exp(-3.0))], [0.0, 1.0]]
    expected[2][0] = expected[1][0] / (expected[1][0] + expected[0][0])
    torch.testing.assert_close(parts, torch.tensor(expected, dtype=dtype))
    for grad in torch.autograd.grad(parts.sum(), [f, g]):
        assert torch.isfinite(grad).all()


@drawn
@given(logits(blind=False))
def test_a_uniform_prior_has_overlap_1_over_n(given: AttentionLogits) -> None:
    """BAM states ``Z = 1`` if and only if content and position are independent. With a uniform position, Z is 1/n."""
    found = decompose(AttentionLogits(given.content, torch.zeros((), dtype=torch.float64), given.visible))
    number = given.visible.sum(-1)
    close(found.overlap, 1 / number.double())
    close(found.agreement, torch.zeros_like(found.agreement))
    close(found.divergence_from_content, torch.zeros_like(found.agreement))
    close(found.posterior, found.content)


def test_overlap_is_1_only_for_one_point_mass() -> None:
    """Z is not largest for equal marginals: two equal marginals over two keys have ``Z = 1/2``."""

    def overlap(content: list[float], position: list[float]) -> float:
        f, g = (torch.tensor([row], dtype=torch.float64) for row in (content, position))
        return float(decompose(AttentionLogits(f, g, torch.ones(1, 3, dtype=torch.bool))).overlap)

    assert overlap([800.0, 0.0, 0.0], [800.0, 0.0, 0.0]) == 1
    assert overlap([0.0, 0.0, -800.0], [0.0, 0.0, -800.0]) == pytest.approx(0.5)
    # This content overlaps more with another prior than with itself.
    content = [math.log(0.6), math.log(0.3), math.log(0.1)]
    assert overlap(content, [800.0, 0.0, 0.0]) == pytest.approx(0.6)
    assert overlap(content, content) == pytest.approx(0.46)


@drawn
@given(logits())
def test_queries_without_keys_have_no_results(given: AttentionLogits) -> None:
    f, g = given.content.clone().requires_grad_(), given.position.clone().requires_grad_()
    found = decompose(AttentionLogits(f, g, given.visible))
    blind = ~given.visible.any(-1)
    values = (
        found.log_overlap, found.agreement, found.divergence_from_content, found.divergence_from_position,
        found.content.sum(-1), found.position.sum(-1), found.posterior.sum(-1), found.overlap,
    )  # fmt: skip
    for value in values:
        assert (value[blind] == 0).all()
        assert torch.isfinite(value).all()
    assert (found.position_share[blind] == 0.5).all()
    total = torch.stack([value.sum() for value in (*values, found.position_share)]).sum()
    grads = torch.autograd.grad(total, [f, g])
    for grad in grads:
        assert torch.isfinite(grad).all()
        assert (grad[~given.visible] == 0).all()


@settings(max_examples=examples(5))
@given(logits())
def test_gradients_match_finite_differences(given: AttentionLogits) -> None:
    def of(f: Tensor, g: Tensor) -> tuple[Tensor, ...]:
        found = decompose(AttentionLogits(f, g, given.visible))
        return found.posterior, found.agreement, found.divergence_from_content, found.divergence_from_position

    f, g = (x[:1, :3].clone().requires_grad_() for x in (given.content.clamp(-3, 3), given.position.clamp(-3, 3)))
    given = AttentionLogits(given.content[:1, :3], given.position[:1, :3], given.visible[:1, :3])
    assert torch.autograd.gradcheck(of, (f, g))


PRIORS = {
    "none": None,
    "local": GeneralizedGaussian(2, init="laplace"),
    "retrieval": GeneralizedGaussian(2, init="neighbours"),
    "window": Window(2, 4),
    "sum": Spectral(2) + KeySink(2, train_length=8),
}


@pytest.mark.parametrize("scale", [None, SSMax(2, init=0.7), SSMax(2, init=0.7, include_prior=False)])
@pytest.mark.parametrize("name", PRIORS)
def test_the_account_matches_attend(name: str, scale: SSMax | None) -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 2, 7, 5, generator=generator, dtype=torch.float64)
    key = torch.randn(2, 1, 9, 5, generator=generator, dtype=torch.float64)
    padding = torch.zeros(2, 9, dtype=torch.bool)
    padding[1, :3] = True
    options = {"logit_scale": scale, "key_padding_mask": padding}
    unit = torch.eye(9, dtype=torch.float64).expand(2, 1, -1, -1)
    found = decompose_attention(query, key, PRIORS[name], **options)
    close(found.posterior, attend(query, key, unit, PRIORS[name], **options))
    # Without the prior's own mask, content is attention with the uniform prior.
    if name != "window":
        close(found.content, attend(query, key, unit, None, **options))
    # The logit scale is an inverse temperature that depends only on the number of visible keys.
    alone = decompose_attention(0 * query, key, PRIORS[name], **options)
    close(found.position, alone.posterior)


def option_sets() -> dict[str, dict[str, Any]]:
    torch.manual_seed(0)
    return {
        "softmax_scale": {"softmax_scale": 0.9},
        "positions": {"query_positions": torch.tensor([30, 2, 7, 50, 9]), "key_positions": 3 * torch.arange(7)},
        "query_positions": {"query_positions": torch.tensor([5, 2, 4, 6, 6])},
        "documents": {"document_ids": torch.tensor([[0, 0, 0, 1, 1, 2, 2], [0, 0, 1, 1, 1, 1, 1]])},
        "padding": {"key_padding_mask": torch.tensor([[1, 1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0]]).bool()},
        "blind": {"key_padding_mask": torch.ones(2, 7).bool()},
        "mask": {"attn_mask": torch.randn(5, 7, dtype=torch.float64).masked_fill(torch.rand(5, 7) < 0.3, -torch.inf)},
        "both ways": {"causal": False},
        "shaw": {"relative": ShawVectors(8, 3)},
    }


@pytest.mark.parametrize("negative", [False, True])
@pytest.mark.parametrize("name", option_sets())
def test_every_option_matches_attend(name: str, negative: bool) -> None:
    scale, options = SSMax(4), option_sets()[name]
    query, key = torch.randn(2, 4, 5, 8, dtype=torch.float64), torch.randn(2, 2, 7, 8, dtype=torch.float64)
    with torch.no_grad():
        scale.s.copy_(torch.tensor([0.5, -0.5, 0.0, 2.0]) if negative else torch.ones(4))
        for parameter in options.get("relative", nn.Module()).parameters():
            parameter.normal_()
    prior = GeneralizedGaussian(4, init="spread")
    weights = attend_with_weights(query, key, key, prior, logit_scale=scale, **options)[1]
    logits = attention_logits(query, key, prior, logit_scale=scale, **options)
    torch.testing.assert_close(decompose(logits).posterior, weights, rtol=1e-10, atol=1e-10)
    if name == "shaw":
        del options["relative"]
        plain = decompose(attention_logits(query, key, prior, logit_scale=scale, **options))
        assert not torch.allclose(plain.posterior, weights)


def test_a_float_mask_counts_as_position() -> None:
    query = torch.randn(1, 2, 4, 3, dtype=torch.float64)
    mask = torch.randn(4, 4, dtype=torch.float64).masked_fill(torch.eye(4, dtype=torch.bool).roll(1, 1), -torch.inf)
    logits = attention_logits(query, query, Laplace(2), attn_mask=mask, causal=False)
    bare = attention_logits(query, query, Laplace(2), causal=False)
    assert torch.equal(logits.visible, ~torch.isinf(mask).expand(1, 2, 4, 4))
    seen = logits.visible
    close(logits.position[seen] - bare.position[seen], mask.expand(1, 2, 4, 4)[seen])
    close(logits.content, bare.content)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("position", torch.zeros(3, 5)), ("visible", torch.ones(3, 5, dtype=torch.bool)), ("visible", torch.ones(3, 4))],
)
def test_invalid_arguments_are_named(name: str, wrong: Tensor) -> None:
    parts = {"content": torch.zeros(3, 4), "position": torch.zeros(4), "visible": torch.ones(4, dtype=torch.bool)}
    with pytest.raises(ValueError, match=f"^{name} must"):
        AttentionLogits(**parts | {name: wrong})


@drawn
@given(st.integers(0, 9999), st.integers(2, 9), st.floats(0, 5))
def test_bam_appendix_k_2_the_overlap_is_at_most_either_largest_weight_and_both_norms(seed: int, n: int, size: float):
    f, g = size * seeded(seed, 2, 1, n)
    found = decompose(AttentionLogits(f, g, torch.ones(1, n, dtype=torch.bool)))
    for most in (found.content.max(), found.position.max(), found.content.norm() * found.position.norm()):
        assert 0 < float(found.overlap) <= float(most) * (1 + 1e-10)


def test_bam_appendix_k_3_the_logit_scale_is_not_z():
    """Erratum (2.5, H.4): Z shifts a row by a constant, which a softmax ignores. s ln n changes the weights."""
    f, g = seeded(0, 2, 3, 9)
    p = decompose(AttentionLogits(f, g, torch.ones(3, 9, dtype=torch.bool)))
    torch.testing.assert_close((f + g - p.log_overlap.unsqueeze(-1)).softmax(-1), p.posterior, rtol=1e-10, atol=1e-10)
    assert float(((2 * (f + g)).softmax(-1) - p.posterior).abs().amax(-1).min()) > 0.01


@pytest.mark.parametrize("length", [10, 1000, 100_000])
def test_goat_section_5_content_of_high_entropy_need_not_leave_the_prior(length: int):
    """Erratum: content of small range is not ambiguous. It may exclude one single key."""
    f, g = torch.zeros(2, 1, length, dtype=torch.float64)
    f[0, 0], g[0, 0] = -20, 15
    p = decompose(AttentionLogits(f, g, torch.ones(1, length, dtype=torch.bool)))
    entropy = -torch.special.xlogy(p.content, p.content).sum()
    assert float(entropy) > 0.95 * math.log(length)
    assert float(p.position[0, 0]) > 0.9
    assert float(p.posterior[0, 0]) < 1e-3
