"""``flex_score_mod`` and ``flex_mask_mod``, evaluated at every pair, against the float64 formula."""

from typing import Any
from unittest import mock

import pytest
import torch
from attention_cases import WITHOUT_NETWORKS, Case, cases, examples, priors
from attention_oracle import positions_of, visibility_of
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, and_masks, create_block_mask, create_mask, or_masks

from attention_priors import (
    KeySink,
    Laplace,
    Prior,
    RelativeBuckets,
    SSMax,
    Structure,
    Window,
    flex_mask_mod,
    flex_score_mod,
)
from attention_priors.attention.flex import mods
from attention_priors.priors import Axial, grid_positions
from thoroughness import each_once


def mod_options(case: Case) -> dict[str, Any]:
    """Return the arguments that both functions accept."""
    names = ("causal", "query_positions", "key_positions", "document_ids", "key_padding_mask")
    return {name: getattr(case, name) for name in names}


def sizes(case: Case) -> tuple[int, int, int, int]:
    batch, heads, num_queries, _ = case.query.shape
    return batch, heads, num_queries, case.key.shape[2]


def everywhere(mod: Any, size: tuple[int, int, int, int], *scores: Tensor) -> Tensor:
    """Evaluate a ``score_mod`` or ``mask_mod`` at every batch, head, query and key."""
    indices = [torch.arange(n).view(-1, *(1,) * (3 - place)) for place, n in enumerate(size)]
    return mod(*scores, *indices).expand(size)


def up_to_rows(prior: Prior) -> bool:
    """Return whether the prior's scores omit a constant per query."""
    return any(Structure.STATIONARY not in term.structure for term in prior.terms())


@pytest.mark.parametrize("name", [name for name in WITHOUT_NETWORKS if name != "none"])
def test_scores_match_the_formula(name: str) -> None:
    @examples(4, name)
    @given(cases(name, longest=60, masks=False, keyed=False))
    def check(case: Case) -> None:
        assert case.prior is not None
        size = sizes(case)
        score = torch.randn(size, generator=torch.Generator().manual_seed(0))
        mod = flex_score_mod(case.prior, *size[2:], logit_scale=case.logit_scale, **mod_options(case))
        bias, _ = case.prior.bias_and_visibility(*positions_of(case), torch.float64)
        scale: Tensor | float = 1.0
        if case.logit_scale is not None:
            visible = visibility_of(case).sum(-1, keepdim=True).clamp(min=1).double()
            scale = case.logit_scale.s.double()[:, None, None] * visible.log()
        if case.logit_scale is None or case.logit_scale.include_prior:
            expected = scale * (score.double() + bias)
        else:
            expected = scale * score.double() + bias
        found = everywhere(mod, size, score)
        assert found.dtype == torch.float32
        error = found.double() - expected
        number = (expected.abs() + bias.abs() + score.abs()).clamp(min=1)
        if up_to_rows(case.prior):
            error, number = error - error[..., :1], number.amax(-1, keepdim=True)
        assert float((error.abs() / number).detach().max()) <= 1e-6

    check()


@pytest.mark.parametrize("name", WITHOUT_NETWORKS)
def test_masks_match_the_formula(name: str) -> None:
    @examples(4, name)
    @given(cases(name, longest=60, masks=False, keyed=False))
    def check(case: Case) -> None:
        expected = visibility_of(case)
        if case.prior is not None:
            expected = expected & ~torch.isneginf(case.prior.log_prior(*positions_of(case)))
        mod = flex_mask_mod(case.prior, *sizes(case)[2:], **mod_options(case))
        assert torch.equal(everywhere(mod, sizes(case)), expected.expand(sizes(case)))

    check()


@pytest.mark.parametrize("name", [name for name in WITHOUT_NETWORKS if name not in ("none", "uniform", "window")])
def test_gradients_of_scores_reach_the_parameters(name: str) -> None:
    """Gradients reach parameters through tables and lanes. As after a softmax, the gradients of a row sum to 0."""

    @examples(3, name)
    @given(cases(name, longest=40, masks=False, keyed=False))
    def check(case: Case) -> None:
        assert case.prior is not None
        parameters = [p for p in case.prior.parameters() if p.requires_grad]
        if not parameters:
            return
        size = sizes(case)
        mod = flex_score_mod(case.prior, *size[2:], **mod_options(case))
        found = everywhere(mod, size, torch.zeros(()))
        exact, _ = case.prior.bias_and_visibility(*positions_of(case), torch.float64)
        exact = exact.expand(size)
        # A bias of -1e30 nats would dominate the gradients of all others.
        cotangent = torch.randn(size, generator=torch.Generator().manual_seed(0)) / (1 + exact.detach().abs())
        if up_to_rows(case.prior):
            cotangent = cotangent - cotangent.mean(-1, keepdim=True)
        grads = torch.autograd.grad(found, parameters, cotangent.float(), allow_unused=True)
        expected = torch.autograd.grad(exact, parameters, cotangent, allow_unused=True)
        for grad, right in zip(grads, expected, strict=True):
            if right is None or grad is None:
                assert all(x is None or not x.any() for x in (grad, right))
                continue
            assert float((grad - right).abs().max()) <= 1e-4 * max(1.0, float(right.abs().max()))

    check()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "start"), each_once([name for name in WITHOUT_NETWORKS if name != "none"], [2**16, 2**20 - 60])
)
def test_scores_at_far_positions_are_exact(name: str, start: int) -> None:
    """The applied log-prior, up to a constant per row, is within 1e-4 nats or float32's rounding of float64."""

    @examples(2, f"{name} {start}")
    @given(st.data(), st.integers(0, 999), st.booleans())
    def check(data: st.DataObject, number: int, causal: bool) -> None:
        prior = data.draw(priors(name, 2, causal, torch.Generator().manual_seed(number)))
        assert prior is not None
        queries = torch.arange(start, start + 60)
        # The first and last keys of the text, and some between.
        keys = torch.cat([torch.arange(40), torch.arange(40, start, start // 40), queries])
        mod = flex_score_mod(prior, len(queries), len(keys), causal=causal, query_positions=queries, key_positions=keys)
        found = everywhere(mod, (1, 2, len(queries), len(keys)), torch.zeros(()))[0].double().detach()
        exact = prior.log_prior(queries, keys, torch.float64).detach()
        if causal:
            exact = exact.masked_fill(keys > queries.unsqueeze(-1), float("-inf"))
        top = exact.amax(-1, keepdim=True)
        # Float32 cannot distinguish numbers of 1e30 nats. Only such numbers are within 30 nats of them.
        near = (exact > top - 30) & (top > -1e4)
        row = (torch.where(near, found - exact, 0.0).sum(-1, keepdim=True)) / near.sum(-1, keepdim=True).clamp(min=1)
        error = torch.where(near, found - exact - row, 0.0).abs().max()
        # Each term of a sum is rounded, and so is each partial sum.
        largest = float(torch.where(near, exact, top).abs().max())
        rounding = len([*prior.terms()]) * torch.finfo(torch.float32).eps * largest
        assert float(error) <= max(1e-4, rounding)

    check()


# ---- blocks


def dense_blocks(mask: BlockMask, full: bool) -> Tensor:
    """Return the listed blocks, ``(B, 1, blocks, blocks)``: partly or wholly visible."""
    number, indices = (mask.full_kv_num_blocks, mask.full_kv_indices) if full else (mask.kv_num_blocks, mask.kv_indices)
    assert number is not None
    assert indices is not None
    listed = torch.zeros(indices.shape, dtype=torch.bool)
    used = torch.arange(indices.shape[-1]) < number.unsqueeze(-1)
    return listed.scatter_(-1, indices.long(), used)


@pytest.mark.parametrize("name", ["none", "laplace", "window"])
def test_listed_blocks_hold_all_visible_keys(name: str) -> None:
    """No visible key lies outside of the listed blocks, and every hidden key in them is in a masked block."""

    @examples(8, name)
    @given(cases(name, longest=60, masks=False, keyed=False))
    def check(case: Case) -> None:
        _, _, num_queries, num_keys = sizes(case)
        with mock.patch.object(mods, "BLOCK", 4):
            geometry = mods._geometry((1, num_queries, num_keys), torch.device("cpu"), *mod_options(case).values())
            visibility = mods.Visibility.of(case.prior, geometry)
            mask = visibility.block_mask()
        pairs = everywhere(visibility.mod(), (geometry.batch, 1, num_queries, num_keys))
        partial, full = dense_blocks(mask, False), dense_blocks(mask, True)
        assert not (partial & full).any()

        def per_pair(blocks: Tensor) -> Tensor:
            wide = blocks.repeat_interleave(4, -1).repeat_interleave(4, -2)
            return wide[..., :num_queries, :num_keys]

        assert not (pairs & ~per_pair(partial | full)).any()
        assert not (~pairs & per_pair(full)).any()

    check()


@pytest.mark.parametrize(("num_queries", "num_keys"), [(300, 300), (256, 512), (100, 700)])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 128, 200])
def test_blocks_match_pytorch(num_queries: int, num_keys: int, causal: bool, window: int | None) -> None:
    """Without documents, the ranges of blocks are exact: no block is computed that PyTorch would skip."""
    prior = None if window is None else Window(2, window)
    geometry = mods._geometry((1, num_queries, num_keys), torch.device("cpu"), causal, None, None, None, None)
    visibility = mods.Visibility.of(prior, geometry)
    expected = create_block_mask(visibility.mod(), None, None, num_queries, num_keys, device="cpu")
    for full in (False, True):
        assert torch.equal(dense_blocks(visibility.block_mask(), full), dense_blocks(expected, full))


# ---- composition


def test_masks_compose_with_custom_masks() -> None:
    """A prefix that all queries see, or-ed with a causal mask, and a custom mask."""
    length, prefix = 50, 7
    documents = torch.tensor([0] * 30 + [1] * 20).expand(2, -1)

    def in_prefix(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return kv_idx < prefix

    def even(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return kv_idx % 2 == 0

    causal = flex_mask_mod(None, length, length)
    same = flex_mask_mod(None, length, length, causal=False, document_ids=documents)
    found = create_mask(and_masks(or_masks(causal, in_prefix), same, even), 2, None, length, length, device="cpu")
    i, j = torch.arange(length).unsqueeze(-1), torch.arange(length)
    expected = ((j <= i) | (j < prefix)) & (documents[0] == documents[0].unsqueeze(-1)) & (j % 2 == 0)
    assert torch.equal(found, expected.expand(2, 1, -1, -1))


def test_scores_are_right_under_custom_masks() -> None:
    """A ``score_mod`` does not assume a causal mask. The caller counts the visible keys."""
    prior, scale = RelativeBuckets(2, bidirectional=True, init="normal"), SSMax(2)
    counts = torch.randint(1, 9, (3, 20))
    mod = flex_score_mod(prior, 20, 30, logit_scale=scale, visible_keys=counts)
    exact = prior.log_prior(torch.arange(10, 30), torch.arange(30), torch.float64)
    expected = counts[:, None, :, None].double().log() * exact
    torch.testing.assert_close(
        everywhere(mod, (3, 2, 20, 30), torch.zeros(())).double(), expected, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("function", [flex_score_mod, flex_mask_mod])
def test_grids_of_several_rows_are_refused(function: Any) -> None:
    prior = Axial(2, "laplace", "laplace")
    with pytest.raises(ValueError, match="is over a grid and needs key_positions"):
        function(prior, 12, 12, causal=False)
    places = grid_positions(3, 4)
    with pytest.raises(ValueError, match="or several rows of a grid; FlexAttention's table takes less than"):
        function(prior, 12, 12, causal=False, query_positions=places, key_positions=places)


def test_mods_without_batch_dimension_serve_any_batch() -> None:
    """Without arguments that have a batch dimension, any batch size works."""
    mod, mask = flex_score_mod(Laplace(2), 5, 5), flex_mask_mod(Window(2, 2), 5, 5)
    scores = everywhere(mod, (7, 2, 5, 5), torch.zeros(()))
    assert torch.equal(scores, scores[:1].expand(7, -1, -1, -1))
    assert everywhere(mask, (7, 2, 5, 5)).sum() == 7 * 2 * 9


IDS = torch.zeros(2, 6, dtype=torch.int64)
BAD: dict[str, tuple[str, dict[str, Any]]] = {
    "nothing": ("prior and logit_scale", {"prior": None}),
    "heads": ("logit_scale", {"logit_scale": SSMax(3)}),
    "no queries": ("num_queries", {"num_queries": 0}),
    "keys": ("num_keys", {"num_keys": 2.5}),
    "positions": ("query_positions", {"query_positions": torch.arange(7)}),
    "float positions": ("key_positions", {"key_positions": torch.zeros(6)}),
    "two batches": ("document_ids", {"key_positions": torch.zeros(3, 6, dtype=torch.int64), "document_ids": IDS}),
    "far apart": ("span", {"key_positions": torch.tensor([0, 1, 2, 3, 4, 2**40])}),
    "padding": ("key_padding_mask", {"key_padding_mask": torch.zeros(2, 6)}),
    "documents": ("document_ids", {"document_ids": torch.zeros(2, 7, dtype=torch.int64)}),
    "counts without a scale": ("visible_keys", {"visible_keys": torch.ones(6, dtype=torch.int64)}),
    "float counts": ("visible_keys", {"logit_scale": SSMax(2), "visible_keys": torch.ones(6)}),
    "too few counts": ("visible_keys", {"logit_scale": SSMax(2), "visible_keys": torch.ones(5, dtype=torch.int64)}),
    "batch of counts": (
        "visible_keys",
        {"logit_scale": SSMax(2), "visible_keys": torch.ones(3, 6, dtype=torch.int64), "document_ids": IDS},
    ),
    "a slope both ways": ("KeySink", {"prior": KeySink(2, 8, init="recency"), "causal": False}),
}


@pytest.mark.parametrize("case", BAD)
def test_invalid_arguments_are_refused(case: str) -> None:
    name, changes = BAD[case]
    arguments: dict[str, Any] = {"prior": Laplace(2), "num_queries": 6, "num_keys": 6} | changes
    with pytest.raises(ValueError, match=name):
        flex_score_mod(**arguments)
    if not {"logit_scale", "visible_keys"} & set(changes) and arguments["prior"] is not None:
        with pytest.raises(ValueError, match=name):
            flex_mask_mod(**arguments)
