"""With priors, no model allocates a matrix of queries by keys; transformers' own code does."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from alibi_models import bloom, mpt
from test_t5_through_buckets import KINDS, RELATIVE_CHANGES, RELATIVES
from test_t5_through_buckets import make as t5
from torch.profiler import ProfilerActivity, profile

from attention_priors.attention.tiles import bias
from attention_priors.hf import use_priors
from thoroughness import every_other_deep

LENGTH = 1280
"""Length of the texts, at which the matrix of one head is larger than a working buffer."""
QUICK = ["bloom", "mpt", "t5", "umt5", "pop2piano"]
MATRIX = 4 * LENGTH * LENGTH
"""Size of one head's matrix in bytes, in float32."""


def largest_allocation(run: Callable[[], Any]) -> int:
    """Return the size in bytes of the largest allocation in a forward and backward pass."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run().loss.backward()
    results: Any = profiler.profiler
    return max(event.nbytes() for event in results.kineto_results.events() if event.name() == "[memory]")


@pytest.mark.parametrize("name", every_other_deep([*QUICK, "switch"], QUICK))
def test_no_dense_matrix_is_allocated(name: str) -> None:
    if name in KINDS | RELATIVES:
        model = t5(name, **RELATIVE_CHANGES.get(name, {"num_layers": 1}))
    else:
        model = bloom(n_layer=1) if name == "bloom" else mpt(n_layers=1, max_seq_len=LENGTH)
    ids = torch.randint(1, 40, (2, LENGTH))
    mask = torch.ones_like(ids)
    mask[0, :9] = 0

    def run() -> Any:
        return model(ids, attention_mask=mask, labels=ids)

    assert largest_allocation(run) >= 4 * MATRIX
    use_priors(model)
    vars(bias._kept).clear()  # a buffer that another test left would at least double
    assert largest_allocation(run) < MATRIX
