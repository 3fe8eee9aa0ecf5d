"""A NaN or infinite key changes neither output nor log-sum-exp of a query that does not see the key."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from attention_cases import Case
from torch import Tensor
from triton_cases import DEVICES, configured, place, same

from attention_priors import (
    GeneralizedGaussian,
    KeyBounds,
    KeySink,
    Laplace,
    Prior,
    RelativeBuckets,
    Spectral,
    SSMax,
    Window,
    attend,
)
from attention_priors.attention.distributed import ring as context_parallel
from attention_priors.attention.problem import make_problem
from attention_priors.attention.tiles import exact
from attention_priors.attention.tiles.tiling import Tile
from attention_priors.attention.triton.backend import Blocks
from thoroughness import DEEP, every_other_deep

B, H, HKV, D = 2, 4, 2, 8
BAD = [math.nan, math.inf, -math.inf]
PRIORS: dict[str, Callable[[], Prior | None]] = {
    "none": lambda: None,
    "laplace": lambda: Laplace(H),
    "ggd": lambda: GeneralizedGaussian(H, init="spread"),
    "buckets in a window": lambda: RelativeBuckets(H) + Window(H, 9),
    "spectral": lambda: Spectral(H, 3, init="recency"),
    "sink": lambda: KeySink(H, 16, init="recency"),
    "sink and ggd": lambda: KeySink(H, 16) + GeneralizedGaussian(H, init="spread"),
}


def hides(scene: str, length: int) -> tuple[dict[str, Any], list[int], Tensor]:
    """Options of a case, its keys that are not finite, and the mask of queries that see such a key, ``(B, L)``."""
    slots = torch.arange(length)
    options: dict[str, Any] = {}
    keys = [length // 2, length - 3]
    seen = torch.ones(B, length, length, dtype=torch.bool)
    if scene == "padding":
        options["key_padding_mask"] = torch.isin(slots, torch.tensor(keys)).expand(B, -1)
        seen &= ~options["key_padding_mask"].unsqueeze(1)
    elif scene in ("documents", "interleaved documents"):
        ids = slots * 3 // length if scene == "documents" else slots % 3
        options["document_ids"] = ids.expand(B, -1)
        seen &= ids.unsqueeze(1) == ids
    elif scene in ("mask", "float mask"):
        forbidden = (slots.unsqueeze(1) * 7 + slots * 3) % 5 < 3
        options["attn_mask"] = (
            forbidden if scene == "mask" else torch.zeros(length, length).masked_fill(forbidden, -math.inf)
        )
        seen &= ~forbidden
    elif scene == "gaps":
        options["query_positions"] = options["key_positions"] = slots * 2 + (slots > length // 3) * 5
    if scene in ("future", "gaps", "float mask"):
        seen &= slots.unsqueeze(1) >= slots
    else:
        options["causal"] = False
    return options, keys, seen[:, :, keys].any(-1)


SCENES = ("future", "padding", "documents", "interleaved documents", "mask", "float mask", "gaps")
SCENES_AND_KEYS = [*itertools.product(SCENES, BAD)]
IN_QUICK_TESTS = [*((scene, math.nan) for scene in SCENES), ("future", math.inf), ("padding", -math.inf)]
"""NaN in every scene, and each infinity in one scene: the cases of quick tests."""


def make_case(prior: Prior | None, length: int, **options: Any) -> Case:
    generator = torch.Generator().manual_seed(length)
    query, key, value = (torch.randn(B, h, length, D, generator=generator) for h in (H, HKV, HKV))
    return replace(Case(query, key, value, prior), **options)


def spoil(case: Case, keys: Any, bad: float) -> Case:
    key = case.key.clone()
    key[:, :, keys] = bad
    return replace(case, key=key)


def assert_others_unchanged(
    case: Case, keys: Any, bad: float, sees: Tensor, backend: Any, *, tolerance: float = 2e-5
) -> None:
    """Assert that queries outside ``sees`` have the output and log-sum-exp that finite keys give."""

    def compute(case: Case) -> list[Tensor]:
        content, options = (case.query, case.key, case.value), case.options()
        with torch.no_grad():
            found = [attend(*content, case.prior, **options, backend=backend)]
            if backend not in ("flex", "lanes"):  # they have no log-sum-exp on CPUs
                found += attend(*content, case.prior, **options, return_lse=True, backend=backend)
        return found

    blind = ~sees.unsqueeze(1).expand(-1, H, -1)
    assert blind.any()
    for expected, found in zip(compute(case), compute(spoil(case, keys, bad)), strict=True):
        assert not expected[blind].isnan().any()
        torch.testing.assert_close(found[blind], expected[blind], rtol=tolerance, atol=tolerance)


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("scene_and_key", every_other_deep(SCENES_AND_KEYS, IN_QUICK_TESTS), ids=str)
def test_hidden_keys_change_nothing_in_any_backend(scene_and_key: tuple[str, float]) -> None:
    scene, bad = scene_and_key
    options, keys, sees = hides(scene, 40)
    for name, make_prior in PRIORS.items():
        prior = make_prior()
        if not options.get("causal", True) and name in ("sink", "buckets in a window"):
            continue  # key slopes and one-sided buckets need causal attention
        case = make_case(prior, 40, **options)
        backends = ["reference", "blockwise", "toeplitz", "auto"]
        backends += [backend for backend in case.backends(need_lse=False) if backend == "lanes"]
        for backend in backends:
            assert_others_unchanged(case, keys, bad, sees, backend)
        for include_prior in (True, False):
            scaled = replace(case, logit_scale=SSMax(H, init=0.5, include_prior=include_prior))
            assert_others_unchanged(scaled, keys, bad, sees, "toeplitz")


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_hidden_keys_change_nothing_in_any_dtype(dtype: torch.dtype) -> None:
    for name in ("ggd", "sink"):
        case = make_case(PRIORS[name](), 40).to(dtype)
        _, keys, sees = hides("future", 40)
        assert_others_unchanged(case, keys, math.nan, sees, "auto", tolerance=1e-2)


@pytest.mark.usefixtures("both_ways")
def test_hidden_keys_change_nothing_at_any_place() -> None:
    """Vectorised kernels treat the last numbers of a row separately, so every place is tested."""
    case = make_case(Laplace(H), 53)
    for at in range(1, 53):
        sees = torch.arange(53).expand(B, -1) >= at
        assert_others_unchanged(case, at, BAD[at % 3], sees, "toeplitz")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["none", "ggd", "sink and ggd"])
def test_hidden_keys_change_nothing_in_several_blocks_of_queries(name: str) -> None:
    """Some of the queries are beside the bad key, in a separate tile, and others far behind."""
    case = make_case(PRIORS[name](), 1500)
    for at in (1, 700, 1499):
        sees = torch.arange(1500).expand(B, -1) >= at
        assert_others_unchanged(case, at, math.nan, sees, "toeplitz")


def test_keys_outside_a_window_change_nothing() -> None:
    case = make_case(GeneralizedGaussian(H, init="spread") + Window(H, 9), 300)
    slots = torch.arange(300).expand(B, -1)
    for bad in BAD:
        assert_others_unchanged(case, 100, bad, (slots >= 100) & (slots < 109), "toeplitz")


def test_recomputation_is_blockwise() -> None:
    case = make_case(Laplace(H), 300)
    _, keys, sees = hides("future", 300)
    sizes = []
    attend_rows = exact._attend

    def noted(content: Any, bias_of: Any, tile: Tile) -> tuple[Tensor, Tensor]:
        sizes.append(tile.shape[0])
        return attend_rows(content, bias_of, tile)

    def few_rows(row_size: int) -> int:
        return 17

    with (
        mock.patch.object(exact, "block_length", few_rows),
        mock.patch.object(exact, "_attend", noted),
    ):
        assert_others_unchanged(case, keys, math.nan, sees, "toeplitz")
    assert max(sizes) == 17


def test_finite_problems_are_computed_once() -> None:
    """The log-sum-exp of rows without visible keys, minus infinity, does not cause recomputation."""
    padding = torch.arange(40).expand(B, -1) < torch.tensor([[0], [7]])
    for case in (make_case(Laplace(H), 40), make_case(Laplace(H), 40, key_padding_mask=padding)):
        with mock.patch.object(exact, "_attend", side_effect=AssertionError):
            attend(case.query, case.key, case.value, case.prior, **case.options(), backend="toeplitz")


def test_a_query_that_is_not_finite_changes_no_other_query() -> None:
    case = make_case(Laplace(H), 300)
    query = case.query.clone()
    query[:, :, 100] = math.nan
    with torch.no_grad():
        expected = attend(case.query, case.key, case.value, case.prior)
        found = attend(query, case.key, case.value, case.prior)
    others = torch.arange(300) != 100
    torch.testing.assert_close(found[:, :, others], expected[:, :, others])
    assert found[:, :, 100].isnan().all()


@pytest.mark.parametrize("bad", BAD)
def test_padding_changes_nothing_in_decoding(bad: float) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(B, h, n, D, generator=generator) for h, n in ((H, 1), (HKV, 300), (HKV, 300)))
    slots = torch.arange(300).expand(B, -1)
    padding = (slots >= 20) & (slots < 40)  # amid other keys, so that it cannot be cut off
    nobody = torch.zeros(B, 1, dtype=torch.bool)
    for name in ("none", "ggd", "sink and ggd"):
        case = Case(query, key, value, PRIORS[name](), key_padding_mask=padding)
        assert_others_unchanged(case, slice(23, 39), bad, nobody, "auto")


def test_strided_columns_stay_finite() -> None:
    """PyTorch then adds the causal mask to a dense matrix."""
    case = make_case(None, 40)
    case = replace(case, query=case.query.mT.contiguous().mT, key=case.key.mT.contiguous().mT)
    _, keys, sees = hides("future", 40)
    clean = attend(case.query, case.key, case.value)
    key = case.key.clone()
    key[:, :, keys] = math.nan
    assert key.stride(-1) != 1
    blind = ~sees.unsqueeze(1).expand(-1, H, -1)
    torch.testing.assert_close(attend(case.query, key, case.value)[blind], clean[blind])


@pytest.mark.parametrize("with_bounds", [False, True])
@pytest.mark.parametrize("bad", BAD)
def test_pruning_keeps_blocks_without_bounds(bad: float, with_bounds: bool) -> None:
    """A block with a key that is not finite has no bound, so the block is computed."""
    case = make_case(Laplace(H, slopes=[2.0, 1.0, 0.5, 0.25]), 1400)
    for at in (900, 1399):
        sees = torch.arange(1400).expand(B, -1) >= at
        spoiled = spoil(case, at, bad)
        with torch.no_grad():
            out, lse = attend(case.query, case.key, case.value, case.prior, return_lse=True)
            bounds = KeyBounds(spoiled.key) if with_bounds else None
            found, found_lse = attend(
                spoiled.query,
                spoiled.key,
                spoiled.value,
                spoiled.prior,
                tolerance=1e-6,
                key_bounds=bounds,
                return_lse=True,
            )
        blind = ~sees.unsqueeze(1).expand(-1, H, -1)
        torch.testing.assert_close(found[blind], out[blind], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found_lse[blind], lse[blind], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scene", ["future", "padding", "documents", "interleaved documents"])
def test_triton_ignores_hidden_keys(scene: str, device: str) -> None:
    options, keys, sees = hides(scene, 20)
    for bad in BAD if DEEP else [math.nan]:
        case = make_case(PRIORS["sink and ggd"](), 20, **options)
        with configured(same(Blocks(16, 16, 4, 1))):
            assert_others_unchanged(place(case, device), keys, bad, sees.to(device), "triton")


def test_a_bound_that_is_nan_skips_no_shard() -> None:
    """A NaN bound does not skip keys of another process."""
    ring: Any = SimpleNamespace(tolerance=0.0)
    case = spoil(make_case(Laplace(H), 40), 3, math.nan)
    problem = make_problem(case.query, case.key, case.value, case.prior)
    lse = torch.zeros(B, H, 40, dtype=torch.float64)
    assert context_parallel._Ring._looks_at(ring, problem, lse) is not None
    good = replace(problem, key=case.key.nan_to_num(0.0))
    lse[:, :, 7] = math.nan
    assert context_parallel._Ring._looks_at(ring, good, lse) is not None
