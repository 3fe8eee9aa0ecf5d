"""Long sequences allocate no matrix of queries by keys, forward or backward."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from attention_priors import GeneralizedGaussian, attend

LENGTH = 3072
"""At this length, blocks of a fixed size (16 MB) are smaller than half a matrix."""


def largest_allocation(length: int, backend: str, **options: torch.Tensor) -> int:
    """Return the size in bytes of the largest allocation in a forward and backward pass."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, heads, length, 16, generator=generator, requires_grad=True) for heads in (2, 1, 1)
    )
    prior = GeneralizedGaussian(2, init="spread", learn=True)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        out, lse = attend(query, key, value, prior, return_lse=True, backend=backend, **options)  # pyright: ignore[reportArgumentType, reportCallIssue]
        (out.sum() + lse.sum()).backward()
    assert prior.theta_alpha.grad is not None
    assert prior.theta_alpha.grad.abs().min() > 0
    assert query.grad is not None
    results = profiler.profiler
    assert results is not None
    assert results.kineto_results is not None
    events = results.kineto_results.events()
    return max(event.nbytes() for event in events if event.name() == "[memory]")  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.slow
def test_positions_with_random_gaps_need_linear_memory() -> None:
    """Almost every pair has a distinct distance, so a table of distances would be as large as a matrix."""
    positions = torch.randint(1, 10**6, (LENGTH,), generator=torch.Generator().manual_seed(0)).cumsum(0)
    options = {"query_positions": positions, "key_positions": positions}
    assert largest_allocation(LENGTH, "toeplitz", **options) < 4 * LENGTH**2 // 2


@pytest.mark.deep
def test_16k_tokens_need_linear_memory() -> None:
    length = 16384
    assert largest_allocation(length, "toeplitz") < 4 * length * length // 8


@pytest.mark.slow
def test_blocks_have_one_size() -> None:
    """The size of blocks does not depend on the length."""
    assert largest_allocation(LENGTH, "blockwise") < 4 * LENGTH**2 // 2


def test_the_measurement_sees_a_matrix() -> None:
    """The dense formula allocates a matrix, and the measurement shows it."""
    assert largest_allocation(512, "reference") >= 4 * 2 * 512 * 512


def test_memory_grows_with_the_length() -> None:
    """Twice the length needs at most about twice the memory."""
    largest_allocation(4096, "toeplitz")  # buffers that a thread keeps for the next call do not count
    assert largest_allocation(4096, "toeplitz") <= 2.2 * largest_allocation(2048, "toeplitz")
