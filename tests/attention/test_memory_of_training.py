"""attend() keeps its inputs and a few numbers per query for the backward pass."""

import pytest
import torch
from torch import Tensor

from attention_priors import GeneralizedGaussian, KeySink, Laplace, SSMax, attend
from attention_priors.attention.attend import Backend

B, H, L, D = 2, 4, 400, 32
"""Longer than the longest short context, which keeps its weights."""


def kept_numbers(backend: Backend, **options) -> int:
    """Count the numbers that are held for the backward pass, besides the inputs."""
    query, key, value = (torch.randn(B, H, L, D, requires_grad=True) for _ in range(3))
    held: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        held[storage.data_ptr()] = storage.nbytes() // 4
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = attend(query, key, value, backend=backend, **options)
    for tensor in (query, key, value):
        held.pop(tensor.untyped_storage().data_ptr(), None)
    assert out.requires_grad
    return sum(held.values())


@pytest.mark.parametrize("scaled", ["nothing", "content", "both"])
@pytest.mark.parametrize("sink", [False, True])
def test_only_the_output_is_as_large_as_the_queries(scaled: str, sink: bool) -> None:
    prior = GeneralizedGaussian(H, init="spread", learn=True)
    prior = prior + KeySink(H, train_length=64) if sink else prior
    scale = None if scaled == "nothing" else SSMax(H, include_prior=scaled == "both")
    numbers = kept_numbers("toeplitz", prior=prior, logit_scale=scale)
    output = B * H * L * D
    # Tables, log-sum-exps, logit scales and a sink's hidden units, in float64: a few numbers per query and distance.
    assert output <= numbers <= output + (60 if sink else 30) * B * H * L


def test_the_measurement_sees_a_copy() -> None:
    """The dense formula keeps the weights of every pair."""
    assert kept_numbers("reference", prior=Laplace(H)) >= B * H * L * L
