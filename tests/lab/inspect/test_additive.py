"""Positions added to embeddings: the split of the logits, and the cases of the linear toy encoding."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attention_priors.lab.inspect import Projected, additive_logits, linear_audit
from thoroughness import examples

drawn = settings(max_examples=examples(15))
CAUSAL = torch.ones(12, 12, dtype=torch.bool).tril()


def numbers(seed: int, *sizes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*size, generator=generator, dtype=torch.float64) for size in sizes]


@drawn
@given(st.integers(0, 2**20), st.booleans(), st.booleans())
def test_summands_add_up_to_the_logits(seed: int, of_query: bool, of_key: bool) -> None:
    e, p, weights_q, weights_k, bias_q, bias_k = numbers(
        seed, (2, 1, 5, 6), (5, 6), (3, 6, 4), (3, 6, 4), (3, 1, 4), (3, 1, 4)
    )
    query = Projected(e @ weights_q, p @ weights_q, bias_q if of_query else None)
    key = Projected(e @ weights_k, p @ weights_k, bias_k if of_key else None)
    found = additive_logits(query, key)
    q, k = ((e + p) @ w for w in (weights_q, weights_k))
    q, k = q + bias_q if of_query else q, k + bias_k if of_key else k
    torch.testing.assert_close(found.total, q @ k.mT / 2, rtol=1e-10, atol=1e-10)
    # Each summand depends only on the parts in its name.
    moved = additive_logits(query._replace(content=2 * query.content), key._replace(position=3 * key.position))
    torch.testing.assert_close(moved.content_position, 6 * found.content_position)
    torch.testing.assert_close(moved.position_content, found.position_content)
    if not (of_query or of_key):
        assert (found.bias == 0).all()


def test_spreads_ignore_constants_per_query() -> None:
    e, p = numbers(0, (5, 4), (5, 4))
    zero = torch.zeros(5, 4, dtype=torch.float64)
    visible = torch.ones(5, 5, dtype=torch.bool).tril()
    found = additive_logits(Projected(e, zero), Projected(e, p))
    spreads = found.spreads(visible)
    rows = [found.content_position[i, : i + 1].std(correction=0) for i in range(1, 5)]
    torch.testing.assert_close(spreads["content_position"], torch.stack(rows).mean())
    assert spreads["position_content"] == spreads["position_position"] == 0
    # A constant over all keys does not matter.
    shifted = additive_logits(Projected(e, zero), Projected(e, p, torch.ones(1, 4, dtype=torch.float64)))
    assert float(shifted.spreads(visible)["bias"]) == pytest.approx(0, abs=1e-15)
    with pytest.raises(ValueError, match="no query sees two keys"):
        found.spreads(torch.eye(5, dtype=torch.bool))
    e.requires_grad_(True)
    p.requires_grad_(True)
    spreads = additive_logits(Projected(e, zero), Projected(e, p)).spreads(visible)
    for gradient in torch.autograd.grad(torch.stack([*spreads.values()]).sum(), (e, p)):
        assert bool(gradient.isfinite().all())
        assert bool((gradient != 0).any())


def test_spreads_need_two_keys_in_every_head() -> None:
    split = additive_logits(Projected(torch.randn(2, 5, 4), torch.zeros(2, 5, 4)),
                            Projected(torch.randn(2, 5, 4), torch.zeros(2, 5, 4)))  # fmt: skip
    visible = torch.stack([torch.ones(5, 5).tril().bool(), torch.eye(5).bool()])
    with pytest.raises(ValueError, match="no query sees two keys"):
        split.spreads(visible)


@pytest.mark.parametrize(
    ("of_query", "of_key", "case"),
    [(0.0, 0.0, "i"), (0.0, 1.0, "ii"), (1.0, 0.0, "iii"), (1.0, 1.0, "iv"), (1e-5, 1e-5, "i")],
)
@drawn
@given(seed=st.integers(0, 2**20))
def test_four_cases_are_told_apart(of_query: float, of_key: float, case: str, seed: int) -> None:
    e, weights_q, weights_k = numbers(seed, (12, 6), (6, 4), (6, 4))
    one = torch.ones(6, dtype=torch.float64)
    # Q and K whose product with the vector of ones has the requested size.
    weights_q, weights_k = (
        w + torch.outer(one, size * w.norm() * torch.ones(4, dtype=torch.float64) / 2 - one @ w) / 6
        for w, size in ((weights_q, of_query), (weights_k, of_key))
    )
    found = linear_audit(e @ weights_q, one @ weights_q, e @ weights_k, one @ weights_k, CAUSAL)
    assert found.cases == [case]
    x = e + torch.arange(12, dtype=torch.float64).unsqueeze(-1)
    torch.testing.assert_close(found.logits.total, (x @ weights_q) @ (x @ weights_k).mT / 2, rtol=1e-10, atol=1e-9)
    # The slope is the change of the logit when a token moves one position further.
    for i in (3, 11):
        further = e @ weights_k + (torch.arange(12, dtype=torch.float64) + 1).unsqueeze(-1) * (one @ weights_k)
        gain = (x[i] @ weights_q) @ (further - x @ weights_k).mT / 2
        torch.testing.assert_close(gain, found.slope[i].expand(12), rtol=1e-9, atol=1e-9)


def test_skew_and_the_start_of_the_quadratic_term() -> None:
    """One feature, so that all values are known: ``(Q e_i)ᵀ K 1 = 1``, ``(Q 1)ᵀ K 1 = 0.1``, content from -2 to 2."""
    query_content = torch.ones(12, 1, dtype=torch.float64)
    key_content = torch.tensor([-2.0, 2.0], dtype=torch.float64).repeat(6).unsqueeze(-1)
    ones = torch.ones(1, dtype=torch.float64)
    found = linear_audit(query_content, 0.1 * ones, key_content, ones, CAUSAL, softmax_scale=1.0)
    torch.testing.assert_close(found.slope, 1 + 0.1 * torch.arange(12, dtype=torch.float64))
    # Over i keys, the drift is i (1 + i / 10). The content has a range of 4: 3.9 is less, 5.6 is more.
    assert found.skewed.tolist() == [False] * 4 + [True] * 8
    torch.testing.assert_close(found.quadratic_from, torch.full((12,), 10.0, dtype=torch.float64))
    # i · range((Q 1)ᵀ K e_j) = 0.4 i exceeds 4 from i = 11 on.
    assert found.drowned.tolist() == [False] * 11 + [True]
    never = linear_audit(query_content, 0 * ones, key_content, ones, CAUSAL)
    assert torch.isinf(never.quadratic_from).all()


def test_position_and_content_in_separate_subspaces_are_case_iv() -> None:
    """``Q 1`` and ``K 1`` overlap with each other but not with content: only the quadratic summand shows them."""
    query_content, key_content = (torch.nn.functional.pad(x, (0, 2)) for x in numbers(0, (12, 2), (12, 2)))
    one = torch.tensor([0.0, 0.0, 0.3, 0.4], dtype=torch.float64)
    found = linear_audit(query_content, one, key_content, one, CAUSAL)
    assert found.query_share == found.key_share == 0
    places = torch.arange(12, dtype=torch.float64)
    quadratic = (0.25 / 2 * torch.outer(places, places)).tril().norm()
    whole = (query_content @ key_content.mT / 2).tril().norm()
    assert float(found.quadratic_share) == pytest.approx(float(quadratic / whole))
    assert found.cases == ["iv"]
    assert (found.quadratic_from == 0).all()  # from the start, because no other part exists
    assert found.skewed[-1]
    # If they are also orthogonal to each other, they have no effect.
    apart = linear_audit(
        query_content, one * torch.tensor([1, 1, 1, 0]), key_content, one - one * torch.tensor([1, 1, 1, 0]), CAUSAL
    )
    assert apart.cases == ["i"]
    assert torch.isinf(apart.quadratic_from).all()


@pytest.mark.parametrize(
    ("of_query", "of_key", "case"), [(0.0, 0.0, "i"), (1.0, 0.0, "i"), (0.0, 1.0, "i"), (1.0, 1.0, "iv")]
)
def test_without_content_only_positions_matter(of_query: float, of_key: float, case: str) -> None:
    nothing, one = torch.zeros(12, 4, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
    found = linear_audit(nothing, of_query * one, nothing, of_key * one, CAUSAL)
    assert found.cases == [case]
    for name in ("query_share", "key_share", "quadratic_share", "slope", "drift", "quadratic_from"):
        assert not getattr(found, name).isnan().any(), name
    assert float(found.quadratic_share) == (torch.inf if case == "iv" else 0.0)
    assert torch.isinf(found.quadratic_from).all() == (case == "i")


def test_places_may_be_fractional() -> None:
    """A normalisation makes places fractional. The summands then use these places."""
    e, query_one, key_one, query_places, key_places = numbers(0, (12, 4), (4,), (4,), (12,), (12,))
    found = linear_audit(e, query_one, e, key_one, CAUSAL, query_places=query_places, key_places=key_places)
    query, key = e + torch.outer(query_places, query_one), e + torch.outer(key_places, key_one)
    torch.testing.assert_close(found.logits.total, query @ key.mT / 2)
    torch.testing.assert_close(found.slope, query @ key_one / 2)
    apart = [float(key_places[: i + 1].max() - key_places[: i + 1].min()) for i in range(12)]
    torch.testing.assert_close(found.drift, found.slope * torch.tensor(apart, dtype=torch.float64))


def test_skew_has_no_sign() -> None:
    query_content, ones = torch.ones(12, 1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    key_content = torch.tensor([-2.0, 2.0], dtype=torch.float64).repeat(6).unsqueeze(-1)
    up, down = (linear_audit(query_content, 0 * ones, key_content, s * ones, CAUSAL) for s in (1.0, -1.0))
    assert up.skewed.any()
    assert torch.equal(up.skewed, down.skewed)
    assert torch.equal(up.drift, -down.drift)


@pytest.mark.parametrize(("share", "case"), [(0.049, "i"), (0.051, "iii"), (0.09, "iii")])
def test_the_threshold_of_a_case_is_5_percent(share: float, case: str) -> None:
    # One feature, with all content 1 and K 1 = 0: Q 1 has that share of it.
    places = torch.arange(12, dtype=torch.float64)
    content = torch.ones(12, 1, dtype=torch.float64)
    spread = (places.square().unsqueeze(-1).expand(12, 12)[CAUSAL].mean()).sqrt()
    one = torch.ones(1, dtype=torch.float64)
    found = linear_audit(content, share / spread * one, content, 0 * one, CAUSAL, softmax_scale=1.0)
    assert float(found.query_share) == pytest.approx(share)
    assert found.cases == [case]


def test_numbers_in_nats_include_the_softmax_scale() -> None:
    e, q, k = numbers(0, (12, 4), (4,), (4,))
    plain, half = (linear_audit(e, q, e, k, CAUSAL, softmax_scale=s) for s in (1.0, 0.5))
    torch.testing.assert_close(half.logits.total, plain.logits.total / 2)
    torch.testing.assert_close(half.slope, plain.slope / 2)
    torch.testing.assert_close(half.drift, plain.drift / 2)
    assert torch.equal(half.skewed, plain.skewed)


def test_queries_without_visible_keys_are_not_skewed() -> None:
    e, q, k = numbers(0, (12, 4), (4,), (4,))
    visible = CAUSAL.clone()
    visible[3] = False
    found = linear_audit(e, q, e, k, visible)
    assert float(found.drift[3]) == 0
    assert not found.skewed[3]
    assert not found.drowned[3]


def test_half_precision_is_audited_in_float32() -> None:
    """Sums over all pairs of 2100 tokens, and places beyond 2048, exceed float16."""
    e, q, k = (x.half() for x in numbers(0, (2100, 8), (8,), (8,)))
    visible = torch.ones(2100, 2100, dtype=torch.bool).tril()
    found, exact = (linear_audit(e.to(d), q.to(d), e.to(d), k.to(d), visible) for d in (torch.float16, torch.float64))
    assert found.cases == exact.cases == ["iv"]
    assert found.slope.dtype == found.logits.total.dtype == torch.float32
    for name in ("query_share", "key_share", "quadratic_share", "drift"):
        torch.testing.assert_close(getattr(found, name).double(), getattr(exact, name), rtol=1e-4, atol=1e-1)


def test_invalid_arguments_are_named() -> None:
    x, one = numbers(0, (12, 3), (3,))
    with pytest.raises(ValueError, match="threshold must be"):
        linear_audit(x, one, x, one, CAUSAL, threshold=-0.1)
    with pytest.raises(ValueError, match="no query sees a key"):
        linear_audit(x, one, x, one, ~torch.ones(12, 12, dtype=torch.bool))
