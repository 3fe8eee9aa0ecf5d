"""The host does not wait for the device in a call of the kernels."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton_cases import DEVICES, configured, same

from attention_priors import GeneralizedGaussian, KeySink, Laplace, NullKey, SSMax, Window, attend
from attention_priors.attention import geometry, operator
from attention_priors.attention.tiles import backend as tiles_backend
from attention_priors.attention.triton import backend as triton_backend
from attention_priors.attention.triton.backend import Blocks

WAITS = ("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "_unique2", "unique_dim", "masked_select")
"""Operators whose result has a value or shape that the host must read."""
BODIES = {
    "block_attention": operator._attend,
    "block_attention_backward": operator._attend_backward,
    "visible_keys": operator._count,
}
LENGTH = 40


class Waits(TorchDispatchMode):
    """Counter of waits, including waits inside this package's own operators."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet, name = str(func).split(".")[:2]
        if packet == "attention_priors":
            with self:
                return BODIES[name](*args, **kwargs or {})
        self.found[name] += name in WAITS
        return func(*args, **kwargs or {})


OPTIONS: dict[str, tuple[dict[str, Any], int]] = {
    "causal": ({}, 0),
    "both directions": ({"causal": False}, 0),
    "a logit scale": ({"logit_scale": SSMax(2)}, 0),
    "a logit scale of the content": ({"logit_scale": SSMax(2, include_prior=False)}, 0),
    "padding": ({"key_padding_mask": torch.arange(LENGTH).unsqueeze(0) < 5}, 0),
    "biases of keys": ({"key_bias": torch.randn(1, 2, LENGTH, dtype=torch.float64)}, 0),
    "a null key": ({"null_logit": NullKey(2)}, 0),
    "documents": ({"document_ids": (torch.arange(LENGTH) // 9).unsqueeze(0)}, 1),
}
"""Options of a call, each with its number of waits. Documents need one, because ordered documents skip blocks."""


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", OPTIONS)
def test_forward_and_backward_do_not_wait(name: str, device: str) -> None:
    options, times = OPTIONS[name]
    moved: dict[str, Any] = {
        key: value.to(device) if isinstance(value, torch.Tensor | torch.nn.Module) else value
        for key, value in options.items()
    }
    prior = (GeneralizedGaussian(2, learn=True) + Window(2, 30)).to(device)
    if name != "documents":  # its positions are checked on the CPU, to cache the sink's numbers
        prior = prior + KeySink(2, 8).to(device)
    query, key, value = (torch.randn(1, 2, LENGTH, 16, device=device).requires_grad_() for _ in range(3))

    def call() -> torch.Tensor:
        return attend(query, key, value, prior, backend="triton", **moved)

    with configured(same(Blocks(16, 16, 4, 1))):
        call()  # on CUDA, the first call of a variant checks its kernels, which waits
        with Waits() as waits:
            out = call()
            forward = waits.found.total()
            torch.autograd.backward(out, torch.ones_like(out))
    assert (forward, waits.found.total()) == (times, 2 * times), waits.found


PLACES = torch.arange(LENGTH)
CAPTURED: dict[str, dict[str, Any]] = {
    "documents": {"document_ids": (PLACES // 9).unsqueeze(0)},
    "interleaved documents": {"document_ids": (PLACES % 3).unsqueeze(0)},
    "positions": {"query_positions": PLACES + 3, "key_positions": PLACES + 3},
    "positions with gaps": {"query_positions": PLACES - PLACES % 2, "key_positions": PLACES},
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CAPTURED)
def test_a_captured_graph_reads_no_numbers(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents and positions are then unknown, so all pairs are visited."""
    options: dict[str, Any] = {key: value.to(device) for key, value in CAPTURED[name].items()}
    prior = Laplace(2, learn=True).to(device)
    query, key, value = (torch.randn(1, 2, LENGTH, 16, device=device).requires_grad_() for _ in range(3))
    leaves = [query, key, value]

    def run(backend: Any) -> list[torch.Tensor]:
        out = attend(query, key, value, prior, backend=backend, **options)
        return [out, *torch.autograd.grad(out, [*leaves, *prior.parameters()], torch.ones_like(out))]

    expected = run("reference")
    with configured(same(Blocks(16, 16, 4, 1))):
        run("triton")  # on CUDA, the first call of a variant checks its kernels, which waits
        for module in (geometry, operator, tiles_backend, triton_backend):
            monkeypatch.setattr(module, "is_captured", lambda: True)
        with Waits() as waits:
            found = run("triton")
    assert waits.found.total() == 0, waits.found
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES[:1])  # a CUDA device with a failed assertion is lost to the process
def test_a_captured_graph_fails_at_other_positions(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, places = torch.randn(1, 2, LENGTH, 16, device=device), PLACES.to(device)
    for module in (geometry, operator, tiles_backend, triton_backend):
        monkeypatch.setattr(module, "is_captured", lambda: True)
    with configured(same(Blocks(16, 16, 4, 1))), pytest.raises(RuntimeError, match="positions have gaps"):
        attend(x, x, x, Laplace(2).to(device), query_positions=2 * places, key_positions=places, backend="triton")


def test_waits_are_counted() -> None:
    x = torch.randn(3)
    with Waits() as waits:
        assert float(x.abs().sum()) > 0
        x.unique()
    assert waits.found.total() == 2
