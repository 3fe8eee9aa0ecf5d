"""Certified pruning: the lost weight is within the certificate, and the certificate within the tolerance."""

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from attention_cases import PRIORS, WITHOUT_NETWORKS, Case, cases, examples
from attention_errors import Cotangents, compute, errors, gradient_scales, tolerance_of
from attention_oracle import oracle
from hypothesis import given
from hypothesis import strategies as st
from pruning_cases import attend_pruned, prunable_cases, pruned_above, small_blocks, spread

from attention_priors import (
    GeneralizedGaussian,
    KeyBounds,
    KeySink,
    Laplace,
    Prior,
    SSMax,
    Window,
    attend,
    explain,
    pruning_report,
)
from attention_priors.attention import operator
from attention_priors.attention.operator import read_inputs
from attention_priors.attention.plan import make_plan
from attention_priors.attention.problem import make_problem
from attention_priors.attention.pruning import band
from attention_priors.attention.pruning import certificate as pruning
from attention_priors.attention.pruning import report as pruning_effects
from attention_priors.attention.tiles import backend
from attention_priors.attention.tiles.backend import operator_inputs
from attention_priors.attention.tiles.block_problem import all_of
from thoroughness import every_other_deep, every_other_slow

TOLERANCES = st.sampled_from([1e-9, 1e-6, 1e-3, 0.05, 0.5])
SIZES = st.sampled_from([2, 4, 8])


@pytest.mark.parametrize("name", every_other_slow([*WITHOUT_NETWORKS, "a gap"], ["none", "sum", "a gap"]))
def test_real_error_is_within_the_certificate_and_the_certificate_within_the_tolerance(name: str) -> None:
    dropped_blocks = 0

    @examples(12, name)
    @given(prunable_cases(name, TOLERANCES), SIZES)
    def check(case: Case, size: int) -> None:
        nonlocal dropped_blocks
        dropped_blocks += check_certificate(case, size)

    check()
    assert dropped_blocks > 25, f"{dropped_blocks} dropped blocks test nothing"


@pytest.mark.parametrize("name", WITHOUT_NETWORKS)
def test_a_band_over_all_keys_bounds_a_row_by_its_log_sum_exp(name: str) -> None:
    compared = 0

    @examples(10, name)
    @given(cases(name, longest=40, masks=False), st.integers(1, 9), st.integers(-50, 50))
    @torch.no_grad()
    def check(case: Case, rows: int, peak: int) -> None:
        nonlocal compared
        case = case.to(torch.float64)
        problem = make_problem(case.query, case.key, case.value, case.prior, **case.options())
        inputs = operator_inputs(problem, make_plan(problem, "toeplitz", need_lse=True))
        if inputs is None or problem.geometry.offset is None:
            return
        content, blocks = read_inputs(*inputs, None, False)
        _, expected = case.attend("reference")
        for head in range(case.query.shape[1]):
            heads = slice(head, head + 1)
            with mock.patch.multiple(band, BAND_ROWS=rows, BAND=100, BAND_OF_ONE_QUERY=100):
                near = band.Band(content.queries(all_of), content.key, blocks, heads, peak)
            whole = near.lower_bounds(slice(0, expected.shape[2]))
            torch.testing.assert_close(whole, expected[:, heads], rtol=1e-9, atol=1e-9)
            late = slice(near.rows, expected.shape[2])
            if late.start < late.stop:
                torch.testing.assert_close(near.lower_bounds(late), whole[:, :, late], rtol=1e-12, atol=1e-12)
            compared += 1

    check()
    if name != "axial":
        assert compared > 5


@pytest.mark.parametrize("kind", ["all 1", "one 0", "alternating", "of each head"])
def test_the_certificate_holds_for_forget_gates(kind: str) -> None:
    """Gates that forget nothing, everything at one token, or everything at every other token, also in some heads
    only.
    """
    dropped_blocks = 0

    @examples(12)
    @given(prunable_cases("none", TOLERANCES), SIZES, st.integers(0, 10**6))
    def check(case: Case, size: int, seed: int) -> None:
        nonlocal dropped_blocks
        shape = (len(case.query), case.query.shape[1], case.key.shape[2])
        gates = torch.ones(shape, dtype=torch.float64)
        if kind == "one 0":
            gates[..., seed % shape[2]] = 0
        elif kind == "alternating":
            gates[..., ::2] = 0
        elif kind == "of each head":
            gates *= torch.linspace(0.3, 1, shape[1]).view(-1, 1)
        bias = -gates.log().clamp(min=-1e4).cumsum(-1)
        dropped_blocks += check_certificate(replace(case, key_bias=bias), size)

    check()
    if kind != "all 1":
        assert dropped_blocks > 20, f"{dropped_blocks} dropped blocks test nothing"


def test_decoding_skips_forgotten_keys() -> None:
    query, key = _random(1, 2), _random(4096, 2)
    gates = torch.rand(1, 2, 4096, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 0.2
    for prior in (None, Laplace(2, slopes=[0.001, 0.001])):
        report = pruning_report(query[0], key[0], prior, key_bias=gates.cumsum(-1), tolerance=1e-6)
        assert float(report.skipped.min()) > 0.85


def check_certificate(case: Case, size: int) -> int:
    """Check the loss of a pruned call against the certificate, and return the number of skipped blocks."""
    observed = attend_pruned(case, size)
    exact = oracle(case)
    if observed.pruned is None:  # too few keys, or log-priors beyond float32: all keys are computed
        return 0
    kept, certificate = observed.pruned
    assert (certificate <= case.tolerance).all()
    pairs = spread(kept, size, *exact.weights.shape[2:])
    lost = (exact.weights * ~pairs).sum(-1)
    allowed = certificate.repeat_interleave(size, dim=-1)[..., : lost.shape[-1]]
    assert (lost <= allowed * (1 + 1e-9) + 1e-12).all(), f"lost {lost.max()}, certified {certificate.max()}"
    assert ((pairs & exact.seen) <= observed.looked_at).all(), "a kept key was not looked at"

    out_error = torch.linalg.vector_norm(observed.out.detach() - exact.out.detach(), dim=-1)
    longest = torch.linalg.vector_norm(case.value.double(), dim=-1).max()
    rounding = tolerance_of(case) * 20
    assert (out_error <= 2 * allowed * longest + rounding * longest).all()
    seen = ~torch.isneginf(exact.lse)
    low = (exact.lse - observed.lse.double()).detach()[seen]
    scale = exact.lse.detach().abs()[seen].clamp(min=1)
    assert (low <= -torch.log1p(-allowed[seen]) + rounding * scale).all()
    return int((~kept).sum())


@pytest.mark.parametrize("name", every_other_slow(PRIORS, ["laplace"]))
def test_gradients_match_the_computed_pairs(name: str) -> None:
    @examples(3, name)
    @given(prunable_cases(name, st.sampled_from([1e-3, 0.05, 0.5])), SIZES)
    def check(case: Case, size: int) -> None:
        with torch.no_grad():
            observed = attend_pruned(case, size)
        # A finite bias hides a key without changing the count of the logit scale.
        mask = torch.zeros(observed.looked_at.shape).masked_fill(~observed.looked_at, -1e6)
        masked = replace(case, attn_mask=mask, tolerance=0.0)
        expected = compute(masked.to(torch.float64), "reference")
        cotangents = Cotangents.of(expected.out, expected.lse)
        with small_blocks(size):
            found = compute(case, "toeplitz", cotangents)
        tolerated = tolerance_of(case)
        for part, error in errors(found, expected, gradient_scales(masked, cotangents)).items():
            assert error <= tolerated, f"{part}: {error:.2e} > {tolerated:.2e}"

    check()


def _random(length: int, *heads: int, width: int = 16) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(length)
    return [torch.randn(1, h, length, width, generator=generator) for h in heads]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [None, 0.4])
@pytest.mark.parametrize("by", ["prior", "key_bias"])
def test_without_a_tolerance_only_keys_without_weight_are_skipped(by: str, scale: float | None, dtype: Any) -> None:
    """Nothing is lost: results and gradients differ by rounding from those of all keys, also in float64."""
    generator, slopes = torch.Generator().manual_seed(0), torch.tensor([2.0, 0.5, 0.01, 1e-6])
    shape = (1, 4, 1100, 8)
    query, key, value = (torch.randn(shape, generator=generator, dtype=dtype, requires_grad=True) for _ in range(3))
    prior = Laplace(4, slopes=slopes.tolist(), learn=True) if by == "prior" else None
    options: dict[str, Any] = {"logit_scale": None if scale is None else SSMax(4, init=scale)}
    learned = [query, key, value, *([] if prior is None else prior.parameters())]
    if by == "key_bias":
        options["key_bias"] = (slopes[:, None] * torch.arange(1100.0))[None].double().requires_grad_()
        learned.append(options["key_bias"])

    def computed() -> list[torch.Tensor]:
        out = attend(query, key, value, prior, **options)
        return [out, *torch.autograd.grad(out.square().sum(), learned)]

    with pruned_above(0):
        found = computed()
        assert "blocks of keys that together weigh less than 2^-64 are skipped" in explain(
            query, key, value, prior, **options
        )
        flat: dict[str, Any] = options | ({} if prior is not None else {"key_bias": options["key_bias"] * 1e-3})
        assert "skipped" not in explain(query, key, value, prior and Laplace(4, slopes=[1e-3] * 4), **flat)
        # Half of the heads have 1000 keys without weight, so the mean is below 600.
        with mock.patch.object(backend, "FEWEST_WEIGHTLESS", 600):
            assert "skipped" not in explain(query, key, value, prior, **options)
            whole = computed()
    near = 1e-12 if dtype == torch.float64 else 1e-5
    for one, other in zip(found, whole, strict=True):
        # Gradients of a prior are float32.
        tolerance = max(near, 1e-5 if one.dtype == torch.float32 else 0.0)
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance * float(other.abs().max()))


class Ring(Laplace):
    """Prior over the distances below 300, which have little weight, and above 1100."""

    def log_prior_at(self, distance: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        far = super().log_prior_at(distance, dtype) - 100
        return far.masked_fill((distance >= 300) & (distance <= 1100), 0.0)

    def visible_at(self, distance: torch.Tensor) -> torch.Tensor:
        return (distance < 300) | (distance > 1100)


@pytest.mark.parametrize("tolerance", [0.0, 1e-6])
def test_hidden_distances_between_visible_ones_are_no_evidence(tolerance: float) -> None:
    """The prior is best where it hides keys. Bounds from there would drop every visible key."""
    query, key, value = _random(2500, 1, 1, 1)
    prior = Ring(1, slopes=[0.01])
    found = attend(query, key, value, prior, tolerance=tolerance)
    expected = attend(query.double(), key.double(), value.double(), prior, backend="reference")
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("low", [-1e29, -1e31, torch.finfo(torch.float64).min])
def test_the_lowest_biases_do_not_hide_keys_from_queries_that_see_no_others(low: float, dtype: torch.dtype) -> None:
    query, key, value = (x.to(dtype) for x in _random(2500, 1, 1, 1))
    key_bias = torch.zeros(1, 1, 2500, dtype=torch.float64)
    key_bias[..., :1000] = low
    found = attend(query, key, value, key_bias=key_bias)
    assert "are skipped" in explain(query, key, value, key_bias=key_bias)
    with mock.patch.object(backend, "FEWEST_WEIGHTLESS", 2500):
        expected = attend(query, key, value, key_bias=key_bias)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_pruning_ignores_the_default_device() -> None:
    query, key, value = _random(1100, 1, 1, 1)
    prior = Laplace(1, slopes=[1.0])
    with torch.no_grad():
        expected = attend(query, key, value, prior)
        with torch.device("meta"):
            found = attend(query, key, value, prior, backend="toeplitz")
    assert torch.equal(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("scale", every_other_deep([None, True, False], [True]))
def test_default_block_size_matches_full_attention(scale: bool | None) -> None:
    """Many blocks of 256, heads of every reach and tiles along diagonals match full attention."""
    query, key, value = _random(3000, 4, 2, 2)
    prior = Laplace(4, slopes=[1.0, 0.1, 0.02, 1e-5], learn=True)
    logit_scale = None if scale is None else SSMax(4, init=0.3, include_prior=scale)
    leaves = [x.requires_grad_() for x in (query, key, value)] + list(prior.parameters())

    def run(tolerance: float) -> list[torch.Tensor]:
        out, lse = attend(
            query, key, value, prior, logit_scale=logit_scale, tolerance=tolerance, return_lse=True, backend="toeplitz"
        )
        cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
        return [out.detach(), lse.detach(), *torch.autograd.grad([out, lse], leaves, [cotangent, torch.ones_like(lse)])]

    report = pruning_report(query, key, prior, tolerance=1e-7, logit_scale=logit_scale)
    assert report.skipped[0] > 0.7
    assert report.skipped[3] == 0
    exact, pruned, again = run(0.0), run(1e-7), run(1e-7)
    for a, b in zip(pruned, again, strict=True):
        assert torch.equal(a, b), "two runs differ"
    for a, b in zip(exact, pruned, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5 * float(a.abs().max()))


@pytest.mark.slow
def test_suppressed_neighbourhood_is_skipped() -> None:
    """A head with negative shape suppresses its neighbourhood, whose blocks are skipped too."""
    query, key, value = _random(4096, 1, 1, 1)
    prior = GeneralizedGaussian(1)
    with torch.no_grad():
        prior.theta_beta.fill_(-0.5)
        prior.theta_alpha.fill_(7.5)
    report = pruning_report(query * 0.5, key * 0.5, prior, tolerance=1e-6)
    blocks = torch.arange(16)
    assert not report.kept[0, 0, blocks[8:], blocks[8:]].any(), "the diagonal"
    assert report.kept[0, 0, 15, 0]
    out = attend(query * 0.5, key * 0.5, value, prior, tolerance=1e-6)
    torch.testing.assert_close(out, attend(query * 0.5, key * 0.5, value, prior), rtol=0, atol=3e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("prior", [Laplace(4), Laplace(4) + KeySink(4, train_length=100)], ids=["ALiBi", "and sink"])
def test_kept_bounds_choose_as_new_bounds_do(dtype: torch.dtype, prior: Prior) -> None:
    """Bounds that are kept beside a growing cache choose the same blocks as new bounds."""
    query, key, value = (x.to(dtype) for x in _random(1500, 4, 2, 2))
    bounds = KeyBounds(key[:, :, :1000])
    for length in (1000, 1001, 1279, 1280, 1281, 1500):
        keys, one = key[:, :, :length], query[:, :, length - 1 : length]
        bounds.update(keys)
        fresh = KeyBounds(keys)
        for kept, made in zip(bounds.balls, fresh.balls, strict=True):
            torch.testing.assert_close(kept, made)
        with torch.no_grad():
            pruned = attend(one, keys, value[:, :, :length], prior, tolerance=1e-6, key_bounds=bounds)
            exact = attend(one, keys, value[:, :, :length], prior)
        torch.testing.assert_close(pruned, exact, rtol=0, atol={torch.bfloat16: 2e-2}.get(dtype, 1e-5))
        report = pruning_report(one, keys, prior, tolerance=1e-6, key_bounds=bounds)
        assert report.skipped[0] > 0.2


def test_report_of_positions_with_gaps_makes_no_table(monkeypatch) -> None:
    monkeypatch.setattr(pruning_effects, "operator_inputs", lambda *x: pytest.fail("a table of all distances"))
    query, key = torch.randn(1, 2, 600, 4), torch.randn(1, 2, 900, 4)
    places = torch.randperm(100_000, generator=torch.Generator().manual_seed(0))[:900].sort().values
    report = pruning_report(query, key, Laplace(2), tolerance=1e-3, query_positions=places[300:], key_positions=places)
    assert report.kept.all()
    assert report.kept.shape == (1, 2, 3, 4)
    assert not report.skipped.any()
    assert not report.dropped.any()


def test_report_counts_pairs() -> None:
    query, key, _ = _random(2048, 2, 2, 2)
    prior = Laplace(2, slopes=[1.0, 1e-6])
    report = pruning_report(query, key, prior, tolerance=1e-6)
    assert report.reach.tolist() == [511, 2047]
    blocks = 2048 // 256
    within = 256 * 257 // 2 * blocks + 256 * 256 * (blocks - 1)  # the diagonal and the block before it
    assert report.skipped[0] == pytest.approx(1 - within / (2048 * 2049 / 2))
    assert report.skipped[1] == 0
    assert report.dropped[1] == 0
    assert 0 < report.dropped[0] <= 1e-6
    both = pruning_report(query, key, prior, tolerance=1e-6, causal=False)
    assert both.reach.tolist() == [511, 2047]


def test_documents_and_padding_are_pruned_too() -> None:
    query, key, value = _random(2048, 2, 2, 2)
    prior = Laplace(2, slopes=[0.5, 0.4])
    documents = (torch.arange(2048) >= 1300).long().unsqueeze(0)
    padding = torch.arange(2048).unsqueeze(0) >= 2000
    every: list[dict[str, Any]] = [{"document_ids": documents}, {"key_padding_mask": padding}]
    for masks in every:
        report = pruning_report(query, key, prior, tolerance=1e-6, **masks)
        assert (report.skipped > 0.4).all()
        out = attend(query, key, value, prior, tolerance=1e-6, **masks)
        torch.testing.assert_close(out, attend(query, key, value, prior, **masks), rtol=0, atol=1e-5)


def test_keys_in_the_future_have_weight_0() -> None:
    query, key, value = _random(1024, 2, 2, 2)
    positions = torch.arange(1024)
    for prior in (Laplace(2), GeneralizedGaussian(2), None):
        out, lse = attend(
            query,
            key,
            value,
            prior,
            tolerance=0.1,
            return_lse=True,
            query_positions=positions,
            key_positions=positions + 1024,
        )
        assert (out == 0).all()
        assert torch.isneginf(lse).all()


def test_positions_with_gaps_are_computed_in_full() -> None:
    query, key, _ = _random(1024, 2, 2, 2)
    gaps = torch.arange(1024) * 2
    report = pruning_report(query, key, Laplace(2), tolerance=0.1, key_positions=gaps, query_positions=gaps)
    assert report.kept.all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tolerance": -0.1}, r"tolerance must be in \[0, 1\), got -0.1"),
        ({"tolerance": 1.0}, "tolerance must be in"),
        ({"tolerance": float("nan")}, "tolerance must be in"),
        ({"tolerance": "1e-6"}, "tolerance must be in"),
        ({"key_bounds": 3}, "key_bounds must be KeyBounds, got int"),
        ({"key_bounds": KeyBounds(torch.zeros(1, 2, 7, 4))}, "key_bounds belong to keys"),
        ({"key_bounds": KeyBounds(torch.zeros(1, 2, 8, 3))}, "key_bounds belong to keys"),
    ],
)
def test_invalid_arguments_are_refused(change: dict[str, Any], message: str) -> None:
    x = torch.zeros(1, 2, 8, 4)
    with pytest.raises(ValueError, match=message):
        attend(x, x, x, Laplace(2), **change)
    arguments: dict[str, Any] = {"tolerance": 1e-3} | change
    with pytest.raises(ValueError, match=message):
        pruning_report(x, x, Laplace(2), **arguments)


def test_invalid_key_bounds_are_refused() -> None:
    with pytest.raises(ValueError, match="key must be floating point"):
        KeyBounds(torch.zeros(2, 8, 4))
    bounds = KeyBounds(torch.zeros(1, 2, 8, 4))
    with pytest.raises(ValueError, match=r"key must have shape \(1, 2, L, 4\)"):
        bounds.update(torch.zeros(1, 3, 9, 4))
    with pytest.raises(ValueError, match="all 8 earlier keys"):
        bounds.update(torch.zeros(1, 2, 7, 4))
    with pytest.raises(ValueError, match="tolerance must be above 0"):
        pruning_report(torch.zeros(1, 2, 8, 4), torch.zeros(1, 2, 8, 4), Laplace(2), tolerance=0.0)


def test_bounds_hold_for_keys_that_autocast_rounds_later() -> None:
    """2005 becomes 2008 in bfloat16, 3 nats nearer to the best keys. A block's weight becomes 20 times as large."""
    key = torch.full((1, 1, 2048, 1), 2005.0)
    key[:, :, -256:] = 2016.0
    value = (torch.arange(2048) < 256).float().view(1, 1, -1, 1)
    query, prior, bounds = torch.ones(1, 1, 1, 1), Laplace(1, slopes=[1e-6]), KeyBounds(key)
    for tolerance in (2.5e-5, 1e-4, 1e-3):
        options: dict[str, Any] = {"softmax_scale": 1.0, "tolerance": tolerance}
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            exact = attend(query, key, value, prior, softmax_scale=1.0)
            found = attend(query, key, value, prior, key_bounds=bounds, **options)
        assert float((found - exact).abs()) <= 2 * tolerance + 2**-8 * float(exact)
        # Without autocast, the bounds belong to exactly these keys.
        report = pruning_report(query, key, prior, key_bounds=bounds, **options)
        assert report.dropped.max() <= tolerance
    report = pruning_report(query, key, prior, tolerance=2.5e-5, softmax_scale=1.0, key_bounds=bounds)
    assert report.skipped > 0.1, "the bounds of the same keys are no wider than they were"


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype",
    every_other_deep([torch.bfloat16, torch.float16, torch.float32, torch.float64], [torch.float16]),
)
@pytest.mark.parametrize("name", ["generalized_gaussian", "key_sink", "none"])
def test_the_certificate_holds_for_keys_cast_after_their_bounds(name: str, dtype: torch.dtype) -> None:
    """Far from the origin, a cast moves keys by as much as they differ."""
    dropped_blocks = 0

    @examples(20, f"{name} {dtype}")
    @given(prunable_cases(name, TOLERANCES), SIZES, st.sampled_from([0.0, 50.0]))
    def check(case: Case, size: int, away: float) -> None:
        nonlocal dropped_blocks
        source = torch.float64 if dtype == torch.float32 else torch.float32
        key = case.key.to(source) + away
        with small_blocks(size):
            balls = KeyBounds(key).balls
        case = replace(case, key=key).to(dtype)
        seen: list[pruning.Pruned] = []
        prune = pruning.prune

        def with_balls(content: Any, problem: Any, tolerance: float, _: Any) -> pruning.Pruned:
            seen.append(prune(content, problem, tolerance, balls))
            return seen[-1]

        with torch.no_grad(), small_blocks(size), mock.patch.object(operator, "prune", with_balls):
            case.attend("toeplitz")
        if not seen:
            return
        exact = oracle(case)
        pairs = spread(seen[0].kept, size, *exact.weights.shape[2:])
        lost = (exact.weights * ~pairs).sum(-1)
        allowed = seen[0].dropped.repeat_interleave(size, dim=-1)[..., : lost.shape[-1]]
        assert (lost <= allowed * (1 + 1e-9) + 1e-12).all(), f"lost {lost.max()}, certified {allowed.max()}"
        dropped_blocks += int((~seen[0].kept).sum())

    check()
    assert name == "none" or dropped_blocks > 50, f"{dropped_blocks} dropped blocks test nothing"


@pytest.mark.parametrize("causal", [True, False])
def test_pairs_that_a_window_hides_are_not_visible(causal: bool) -> None:
    query, key, _ = _random(2048, 2, 2, 2)
    report = pruning_report(query, key, Window(2, 100), tolerance=1e-6, causal=causal)
    assert report.reach.tolist() == [99, 99]
    assert report.skipped.tolist() == [0.0, 0.0]
    both = pruning_report(query, key, Window(2, 600) + Laplace(2, slopes=[1.0, 1e-6]), tolerance=1e-6, causal=causal)
    assert both.reach.tolist() == [511, 599]
    assert both.skipped[1] == 0
    keys_of = [[max(0, i - 599), 2047 if not causal else i] for i in range(2048)]
    visible = sum(min(last, i + 599) - first + 1 for i, (first, last) in enumerate(keys_of))
    places = torch.arange(2048)
    apart = places.unsqueeze(1) - places
    blocks = (places.unsqueeze(1) // 256 - places // 256).abs() <= 1
    seen = (apart.abs() < 600) & ((apart >= 0) | (not causal))
    assert int(seen.sum()) == visible
    assert both.skipped[0] == pytest.approx(1 - int((seen & blocks).sum()) / visible)
