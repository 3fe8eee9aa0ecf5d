"""The reference against the definition, written independently. All other tests compare with the reference."""

import math

import pytest
import torch
from attention_cases import PRIORS, Case, cases, examples
from attention_errors import Cotangents, compute
from attention_oracle import oracle, positions_of, visibility_of
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize("name", PRIORS)
def test_values_and_gradients(name: str) -> None:
    @examples(6, name)
    @given(cases(name, longest=60))
    def check(case: Case) -> None:
        case = case.to(torch.float64)
        result = compute(case, "reference")
        leaves = {n: x if x.requires_grad else x.requires_grad_() for n, x in case.leaves().items()}
        exact = oracle(case)
        blind = ~exact.seen.any(-1)
        torch.testing.assert_close(result.out, exact.out.detach(), rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(result.lse, exact.lse.detach(), rtol=1e-10, atol=1e-10)
        assert torch.equal(torch.isneginf(result.lse), blind)
        assert (result.out[blind] == 0).all()
        cotangents = Cotangents.of(result.out, result.lse)
        lse = torch.where(blind, 0.0, torch.where(exact.seen, exact.logits, -1e300).logsumexp(-1))
        grads = torch.autograd.grad(
            [exact.out, lse], list(leaves.values()), [cotangents.out, cotangents.lse], allow_unused=True
        )
        for (leaf, tensor), grad in zip(leaves.items(), grads, strict=True):
            grad = torch.zeros_like(tensor) if grad is None else grad
            # A prior's parameters are float32, and so are their gradients.
            tolerance = 1e-6 if tensor.dtype == torch.float32 else 1e-9
            size = float(grad.abs().max()) if grad.numel() else 0.0
            torch.testing.assert_close(
                result.grads[leaf],
                grad,
                rtol=0,
                atol=tolerance * max(1.0, size),
                msg=lambda m, leaf=leaf: f"{leaf}: {m}",
            )

    check()


@examples(15)
@given(st.sampled_from(PRIORS).flatmap(lambda name: cases(name, longest=6)))
def test_reference_matches_loops_over_numbers(case: Case) -> None:
    """Loops over Python floats rule out a broadcasting error on both sides."""
    result = compute(case.to(torch.float64), "reference")
    batch, heads, num_queries, head_dim = case.query.shape
    _, kv_heads, num_keys, value_dim = case.value.shape
    query_positions, key_positions = (x.tolist() for x in positions_of(case))
    query, key, value = (x.double().tolist() for x in (case.query, case.key, case.value))
    bias = None
    if case.prior is not None:
        bias = case.prior.log_prior(*positions_of(case), dtype=torch.float64)
        bias = bias.expand(batch, -1, -1, -1).tolist()
    of_keys = None if case.key_bias is None else case.key_bias.double().tolist()
    mask = None if case.attn_mask is None else case.attn_mask.expand(batch, heads, num_queries, num_keys).tolist()
    counts = None
    if case.visible_keys is not None:
        counts = case.visible_keys
        counts = (counts[:, None] if counts.dim() == 2 else counts).expand(batch, heads, num_queries).tolist()
    softmax_scale = 1 / math.sqrt(head_dim) if case.softmax_scale is None else case.softmax_scale
    for b in range(batch):
        for h in range(heads):
            for i in range(num_queries):
                seen = []
                for j in range(num_keys):
                    if case.causal and key_positions[b][j] > query_positions[b][i]:
                        continue
                    if case.document_ids is not None:
                        own = int(case.document_ids[b, num_keys - num_queries + i])
                        if own != int(case.document_ids[b, j]):
                            continue
                    if case.key_padding_mask is not None and bool(case.key_padding_mask[b, j]):
                        continue
                    if mask is not None and (mask[b][h][i][j] is True or mask[b][h][i][j] == -math.inf):
                        continue
                    seen.append(j)
                scale = 1.0
                if case.logit_scale is not None:
                    number = len(seen) if counts is None else counts[b][h][i]
                    scale = float(case.logit_scale.s[h]) * math.log(max(1, number))
                logits = {}
                for j in seen:
                    content = sum(
                        a * c for a, c in zip(query[b][h][i], key[b][h // (heads // kv_heads)][j], strict=True)
                    )
                    content *= softmax_scale
                    prior = 0.0 if bias is None else bias[b][h][i][j]
                    if prior == -math.inf:  # a window hides keys, but SSMax counts them
                        continue
                    if of_keys is not None:
                        prior += of_keys[b][h * len(of_keys[b]) // heads][j]
                    if case.logit_scale is None or case.logit_scale.include_prior:
                        z = scale * (content + prior)
                    else:
                        z = scale * content + prior
                    added = 0.0 if mask is None or isinstance(mask[b][h][i][j], bool) else mask[b][h][i][j]
                    logits[j] = z + added
                if not logits:
                    assert float(result.lse[b, h, i]) == -math.inf
                    assert result.out[b, h, i].tolist() == [0.0] * value_dim
                    continue
                highest = max(logits.values())
                total = math.fsum(math.exp(z - highest) for z in logits.values())
                assert float(result.lse[b, h, i]) == pytest.approx(highest + math.log(total), rel=1e-10, abs=1e-10)
                for d in range(value_dim):
                    expected = math.fsum(
                        math.exp(z - highest) / total * value[b][h // (heads // kv_heads)][j][d]
                        for j, z in logits.items()
                    )
                    assert float(result.out[b, h, i, d]) == pytest.approx(expected, rel=1e-10, abs=1e-10)


def test_visibility_of_a_small_case() -> None:
    """The oracle's own masks, on a case small enough to write down."""
    one = torch.ones(1, 1, 3, 1)
    case = Case(one, one, one, document_ids=torch.tensor([[0, 1, 0]]))
    assert positions_of(case)[1].tolist() == [[0, 0, 1]]
    assert visibility_of(case)[0, 0].tolist() == [[True, False, False], [False, True, False], [True, False, True]]
    case = Case(one, one, one, key_padding_mask=torch.tensor([[True, False, False]]))
    assert visibility_of(case)[0, 0].tolist() == [[False] * 3, [False, True, False], [False, True, True]]
    decode = Case(one[:, :, :1], one, one)
    assert positions_of(decode)[0].tolist() == [[2]]
    prefix = Case(one, one[:, :, :1], one[:, :, :1])
    assert positions_of(prefix)[0].tolist() == [[-2, -1, 0]]
