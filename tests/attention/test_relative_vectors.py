"""Shaw's vectors against the paper's equations, one pair of tokens at a time."""

import math

import pytest
import torch
from attention_cases import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from attention_priors import GeneralizedGaussian, ShawVectors, SSMax, attend


def by_definition(
    query: Tensor, key: Tensor, value: Tensor, vectors: ShawVectors, bias: Tensor, causal: bool, scale: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute equations 3 to 5 by loops. ``scale`` is SSMax's factor, ``(H, Lq)``."""
    batch, heads, num_queries, head_dim = query.shape
    num_keys = key.shape[2]
    rows, sums = [], []
    for b in range(batch):
        for h in range(heads):
            kv = h * key.shape[1] // heads
            for i in range(num_queries):
                position = i + num_keys - num_queries
                logits, values = [], []
                for j in range(num_keys):
                    if causal and j > position:
                        continue
                    slot = max(-vectors.max_offset, min(vectors.max_offset, j - position)) + vectors.max_offset
                    seen_key = key[b, kv, j] + vectors.key_vectors[slot]
                    seen_value = value[b, kv, j]
                    if vectors.value_vectors is not None:
                        seen_value = seen_value + vectors.value_vectors[slot]
                    content = (query[b, h, i] * seen_key).sum() / math.sqrt(head_dim)
                    logits.append(scale[h, i] * (content + bias[h, i, j]))
                    values.append(seen_value)
                z = torch.stack(logits)
                rows.append(z.softmax(0) @ torch.stack(values))
                sums.append(z.logsumexp(0))
    return torch.stack(rows).view(batch, heads, num_queries, -1), torch.stack(sums).view(batch, heads, num_queries)


@pytest.mark.parametrize("backend", ["auto", "blockwise", "reference"])
@pytest.mark.parametrize("values", [True, False])
def test_shaws_vectors_match_a_loop(backend: str, values: bool) -> None:
    @examples(3, f"{backend} {values}")
    @given(
        st.integers(0, 999),
        st.sampled_from([(3, 7), (7, 7), (1, 5)]),
        st.integers(1, 4),
        st.booleans(),
        st.booleans(),
        st.booleans(),
    )
    def check(
        seed: int, lengths: tuple[int, int], max_offset: int, causal: bool, with_prior: bool, scaled: bool
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        num_queries, num_keys = lengths
        query, key, value = (
            torch.randn(2, h, n, 3, generator=generator, dtype=torch.float64, requires_grad=True)
            for h, n in ((4, num_queries), (2, num_keys), (2, num_keys))
        )
        vectors = ShawVectors(3, max_offset, values).double()
        with torch.no_grad():
            for parameter in vectors.parameters():
                parameter.normal_(generator=generator)
        prior = GeneralizedGaussian(4, init="spread") if with_prior else None
        positions = torch.arange(num_keys)
        bias = torch.zeros(4, num_queries, num_keys, dtype=torch.float64)
        if prior is not None:
            bias = prior.log_prior(positions[num_keys - num_queries :], positions, torch.float64)
        logit_scale = SSMax(4, init=0.7) if scaled else None
        number = positions[num_keys - num_queries :] + 1 if causal else torch.full((num_queries,), num_keys)
        scale = 0.7 * number.double().log() if scaled else torch.ones(num_queries, dtype=torch.float64)
        expected = by_definition(query, key, value, vectors, bias, causal, scale.expand(4, -1))
        found = attend(
            query,
            key,
            value,
            prior,
            causal=causal,
            relative=vectors,
            logit_scale=logit_scale,
            return_lse=True,
            backend=backend,  # pyright: ignore[reportArgumentType, reportCallIssue]
        )
        leaves = [query, key, value, *vectors.parameters()]
        cotangents = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in expected]
        wanted = torch.autograd.grad(expected, leaves, cotangents)
        reached = torch.autograd.grad(found, leaves, cotangents)
        for x, y in zip((*found, *reached), (*expected, *wanted), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-7)

    check()


def test_several_blocks_match_a_loop() -> None:
    """The sequence has several blocks of queries, which the backward pass recomputes."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 8, 700, 2, dtype=torch.float64, requires_grad=True) for _ in "qkv")
    vectors = ShawVectors(2, 5).double()
    results = []
    for backend in ("reference", "blockwise"):
        out = attend(query, key, value, relative=vectors, backend=backend)  # pyright: ignore[reportArgumentType, reportCallIssue]
        results.append((out, *torch.autograd.grad(out.square().sum(), [query, key, value, *vectors.parameters()])))
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
