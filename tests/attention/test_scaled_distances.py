"""Networks of a scaled distance, such as FIRE's: tiles are exact, and other engines refuse them."""

import math
from typing import Any
from unittest import mock

import pytest
import torch
from attention_cases import examples, randomize
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from attention_priors import Fire, KeySink, Laplace, SSMax, Window, attend, explain, flex_score_mod, pruning_report
from attention_priors.attention.plan import Backend, make_plan
from attention_priors.attention.problem import make_problem
from attention_priors.attention.tiles import block_problem, scaled
from attention_priors.attention.tiles.bias import Distances
from attention_priors.attention.tiles.scaled import ScaledBias
from attention_priors.attention.tiles.tiling import Tile

HEADS = 3


def random_fire(seed: int, heads: int = HEADS, units: int = 12) -> Fire:
    """Draw a network whose kinks mostly lie in the range of its inputs."""
    generator = torch.Generator().manual_seed(seed)
    prior = Fire(heads, units)
    randomize(prior, generator)
    with torch.no_grad():
        kinks = torch.rand(units, generator=generator) * 1.2 - 0.1
        prior.hidden[1] = -prior.hidden[0] * kinks
    return prior


def tensors(length: int, heads: int = HEADS, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(1, heads, length, 8, generator=generator) for _ in range(3))
    return query, key, value


@pytest.mark.parametrize("room", [2**20, 1], ids=["all units at once", "one at a time"])
def test_a_float32_bias_is_exact_to_1e_4_nats(room: int) -> None:
    @examples(40)
    @given(st.integers(0, 2**20), st.integers(1, 5000), st.data())
    def check(seed: int, length: int, data: st.DataObject) -> None:
        prior = random_fire(seed)
        size = data.draw(st.sampled_from([0.1, 1.0, 5.0]))
        with torch.no_grad():
            prior.outer.mul_(size)
            prior.log_threshold.fill_(float(torch.tensor(data.draw(st.floats(1.0, 6000.0))).log()))
        problem = make_problem(*tensors(length), prior)
        rows, keys = (data.draw(st.integers(1, min(size, length))) for size in (90, 130))
        start, first = data.draw(st.integers(0, length - rows)), data.draw(st.integers(0, length - keys))
        tile = Tile(slice(0, 1), start, start + rows, first, first + keys)
        distances = Distances(problem.geometry, length - 1, None, length)
        network = prior.scaled_distance(problem.geometry.query_positions, torch.arange(length - 1, -1, -1))
        found = torch.zeros(1, HEADS, rows, keys)
        with mock.patch.object(scaled, "KEPT_NUMBERS", room), torch.no_grad():
            ScaledBias(network, distances, torch.float32).write(found, tile, slice(0, HEADS), added=False)
        exact = prior.log_prior(torch.arange(start, start + rows), torch.arange(first, first + keys), torch.float64)
        error = (found[0].flip(1) - exact).detach().abs()
        past = torch.arange(start, start + rows).unsqueeze(1) >= torch.arange(first, first + keys)
        assert float(error.masked_fill(~past, 0.0).max()) <= 1e-4

    check()


def test_most_units_are_linear_on_far_tiles() -> None:
    prior = random_fire(0, units=32)
    problem = make_problem(*tensors(4096), prior)
    network = prior.scaled_distance(problem.geometry.query_positions, torch.arange(4095, -1, -1))
    bias = ScaledBias(network, Distances(problem.geometry, 4095, None, 4096), torch.float32)
    with torch.no_grad():
        x = bias._features(Tile(slice(0, 1), 3840, 4096, 0, 512))[0]
        on, inside = bias._split(x)
    units = prior.hidden[0].unsqueeze(1) * x + prior.hidden[1].unsqueeze(1)
    assert torch.equal(on, (units > 0).all(1))
    assert {*inside.tolist()} == {*((units > 0).any(1) & ~on).nonzero().flatten().tolist()}
    assert len(inside) < 8


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"logit_scale": SSMax(HEADS, init=0.3)},
        {"causal": False},
        {"key_bias": torch.linspace(0, 900, 700).expand(1, HEADS, -1)},
    ],
    ids=["plain", "scaled", "both directions", "far"],
)
@pytest.mark.parametrize("others", [None, "table", "table and sink"])
def test_tiles_of_default_size_match_the_reference(options: dict[str, Any], others: str | None) -> None:
    torch.manual_seed(0)
    prior: Any = random_fire(4)
    if others is not None:
        prior = prior + Laplace(HEADS, learn=True) + Window(HEADS, 500)
    if others == "table and sink":
        prior = prior + KeySink(HEADS, 64)
    leaves = [x.requires_grad_() for x in tensors(700)]
    learned = [p for p in prior.parameters() if p.requires_grad]

    def results(backend: Any, dtype: torch.dtype) -> list[Tensor]:
        query, key, value = (x.to(dtype) for x in leaves)
        out = attend(query, key, value, prior, backend=backend, **options)
        return [out.detach(), *torch.autograd.grad(out.square().sum(), [*leaves, *learned], allow_unused=True)]

    for found, exact in zip(results("toeplitz", torch.float32), results("reference", torch.float64), strict=True):
        size = float(exact.abs().max())
        # Key biases of 900 nats leave float32 fewer digits, with or without a network.
        tolerance = 3e-3 if "key_bias" in options else 1e-4
        assert float((found - exact).abs().max()) <= tolerance * max(size, 0.1)


@pytest.mark.parametrize("length", [90, 400])
@pytest.mark.parametrize("scale", [None, SSMax(HEADS, init=0.3)])
def test_up_to_the_threshold_the_network_is_a_table(length: int, scale: SSMax | None) -> None:
    prior, leaves = random_fire(11), [x.requires_grad_() for x in tensors(length)]
    learned = list(prior.parameters())

    def results(backend: Any, dtype: torch.dtype) -> list[Tensor]:
        query, key, value = (x.to(dtype) for x in leaves)
        out = attend(query, key, value, prior, logit_scale=scale, backend=backend)
        return [out.detach(), *torch.autograd.grad(out.square().sum(), [*leaves, *learned])]

    for threshold, is_table in ((length + 0.5, True), (length - 20.5, False)):
        with torch.no_grad():
            prior.log_threshold.fill_(math.log(threshold))
        with mock.patch.object(block_problem, "ScaledBias", wraps=ScaledBias) as used:
            found = results("toeplitz", torch.float32)
        assert used.called is not is_table
        for one, exact in zip(found, results("reference", torch.float64), strict=True):
            assert float((one - exact).abs().max()) <= 1e-4 * max(float(exact.abs().max()), 0.1)


def test_one_query_matches_its_row_of_the_whole() -> None:
    prior, (query, key, value) = random_fire(5), tensors(900)
    with torch.no_grad():
        whole = attend(query, key, value, prior)
        for stop in (1, 2, 300, 900):
            one = attend(query[:, :, stop - 1 : stop], key[:, :, :stop], value[:, :, :stop], prior)
            torch.testing.assert_close(one, whole[:, :, stop - 1 : stop], rtol=1e-5, atol=1e-5)


def test_other_engines_refuse_networks() -> None:
    prior, (query, key, value) = random_fire(6), tensors(20)
    refused: dict[Backend, str] = {
        "lanes": "not all of the prior is factored",
        "flex": "it does not support the network of fire; use backend='toeplitz'",
        "triton": "triton|CUDA|network",
    }
    for backend, message in refused.items():
        with pytest.raises(ValueError, match=rf"backend='{backend}' cannot compute this: .*({message})"):
            attend(query, key, value, prior, backend=backend)
    with pytest.raises(ValueError, match="FlexAttention does not support the network of 'fire'"):
        flex_score_mod(prior, 20, 20)
    told = explain(query, key, value, prior + Laplace(HEADS))
    assert "fire: a ReLU network of one number per distance, scaled by each query" in told
    assert told.startswith("toeplitz: ")


def test_two_networks_are_computed_by_the_dense_formula() -> None:
    prior, (query, key, value) = random_fire(7) + random_fire(8), tensors(50)
    told = explain(query, key, value, prior)
    reason = "it supports one network of a scaled distance, got fire, fire"
    assert told.startswith(f"blockwise: toeplitz cannot compute this: {reason}")
    with pytest.raises(ValueError, match=reason):
        attend(query, key, value, prior, backend="toeplitz")
    torch.testing.assert_close(attend(query, key, value, prior), attend(query, key, value, prior, backend="reference"))


def test_a_tolerance_prunes_no_key() -> None:
    prior, (query, key, value) = random_fire(9) + Laplace(HEADS, slopes=[5.0] * HEADS), tensors(1200)
    with torch.no_grad():
        assert torch.equal(attend(query, key, value, prior, tolerance=0.1), attend(query, key, value, prior))
    assert "tolerance: no key is pruned" in explain(query, key, value, prior, tolerance=0.1)
    report = pruning_report(query, key, prior, tolerance=0.1)
    assert report.kept.all()
    assert make_plan(make_problem(query, key, value, prior), "auto", need_lse=False).scaled == (0,)


def largest_allocation(length: int) -> int:
    """Return the size in bytes of the largest allocation in a forward and backward pass."""
    query, key, value = (x.requires_grad_() for x in tensors(length, heads=2))
    prior = random_fire(10, heads=2, units=32)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        attend(query, key, value, prior).sum().backward()
    assert prior.log_c.grad is not None
    results = profiler.profiler
    assert results is not None
    assert results.kineto_results is not None
    events = results.kineto_results.events()
    return max(event.nbytes() for event in events if event.name() == "[memory]")  # pyright: ignore[reportAttributeAccessIssue]


def test_memory_does_not_grow_with_the_length() -> None:
    """Working buffers have one size. A thread that has computed one length allocates no larger buffer at twice the
    length.
    """
    largest_allocation(4096)
    longer = largest_allocation(4096)
    assert longer <= 2.2 * largest_allocation(2048)
    assert longer < 4 * 4096 * 4096 // 4
