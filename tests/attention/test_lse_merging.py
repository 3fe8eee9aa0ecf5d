"""Attention over parts of the keys merges into attention over all keys by the log-sum-exp."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_cases import PRIORS, Case, cases, examples
from attention_errors import tolerance_of
from attention_oracle import positions_of
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from attention_priors import GeneralizedGaussian, SSMax, attend


def some_keys(case: Case, keys: slice) -> Case:
    """Select some of the keys, with all queries."""
    queries, positions = positions_of(case)
    return replace(
        case,
        key=case.key[:, :, keys],
        value=case.value[:, :, keys],
        query_positions=queries,
        key_positions=positions[:, keys],
        key_padding_mask=None if case.key_padding_mask is None else case.key_padding_mask[:, keys],
        key_bias=None if case.key_bias is None else case.key_bias[..., keys],
    )


def merge(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    lse = torch.stack([lse for _, lse in parts])
    whole = lse.logsumexp(0)
    shares = (lse - whole.masked_fill(torch.isneginf(whole), 0.0)).exp().unsqueeze(-1)
    return (shares * torch.stack([out for out, _ in parts])).sum(0), whole


@pytest.mark.parametrize("include_prior", [True, False])
@pytest.mark.parametrize("backend", ["reference", "blockwise", "toeplitz", "auto"])
def test_parts_with_a_logit_scale_merge_if_visible_keys_are_given(backend, include_prior) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 4, 40, 8, generator=generator, dtype=torch.float64) for _ in range(3))
    prior, scale = GeneralizedGaussian(4, init="spread"), SSMax(4, 0.7, include_prior=include_prior)
    places = torch.arange(40)

    def solve(keys: slice, **options: Any) -> tuple[Tensor, Tensor]:
        positions = {"query_positions": places, "key_positions": places[keys]}
        part = {"logit_scale": scale, "return_lse": True, "backend": backend}
        return attend(query, key[:, :, keys], value[:, :, keys], prior, **positions, **part, **options)

    whole, whole_lse = solve(slice(0, None))
    parts = [solve(keys, visible_keys=places + 1) for keys in (slice(0, 13), slice(13, None))]
    out, lse = merge(parts)
    torch.testing.assert_close((out, lse), (whole, whole_lse))
    (found,), (expected,) = (torch.autograd.grad(x.square().sum(), [scale.s], retain_graph=True) for x in (out, whole))
    torch.testing.assert_close(found, expected)
    # Parts that count only their own keys do not merge.
    alone, _ = merge([solve(keys) for keys in (slice(0, 13), slice(13, None))])
    assert float((alone - whole).detach().abs().max()) > 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", PRIORS)
def test_parts_merge_into_the_whole_sequence(name: str, dtype: torch.dtype) -> None:
    @examples(4, name)
    @given(cases(name, longest=50, masks=False, scaled=False), st.floats(0, 1))
    def check(case: Case, where: float) -> None:
        case = replace(case, document_ids=None).to(dtype)
        if case.key_bias is not None and dtype == torch.float32:
            # A float32 log-sum-exp cannot distinguish parts with large numbers.
            case = replace(case, key_bias=case.key_bias.clamp(-9, 9))
        case = replace(case, query_positions=positions_of(case)[0], key_positions=positions_of(case)[1])
        num_keys = case.key.shape[2]
        if num_keys == 1:
            return
        cut = 1 + round(where * (num_keys - 2))
        with torch.no_grad():
            for backend in case.backends():
                out, lse = case.attend(backend)
                merged, merged_lse = merge(
                    [some_keys(case, keys).attend(backend) for keys in (slice(0, cut), slice(cut, None))]
                )
                assert torch.equal(torch.isneginf(lse), torch.isneginf(merged_lse))
                finite = ~torch.isneginf(lse)
                tolerance = 1e-10 if dtype == torch.float64 else 4 * tolerance_of(case)
                # Far from 0, a log-sum-exp has few digits, and so have the weights of the parts.
                coarse = 2 * torch.finfo(dtype).eps * lse.abs().masked_fill(~finite, 0.0).unsqueeze(-1)
                allowed = tolerance * (1 + out.abs().max()) + coarse * case.value.abs().max()
                assert ((merged - out).abs() <= allowed).all()
                torch.testing.assert_close(merged_lse[finite], lse[finite], rtol=tolerance, atol=tolerance)

    check()
