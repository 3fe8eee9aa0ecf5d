"""A launch without Triton's search runs the kernel that the search would find, with the same arguments."""

from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from triton_cases import DEVICES

from attention_priors import KeySink, Laplace, SSMax, Window, attend
from attention_priors.attention.triton import backend, kernels


class Driver:
    """Driver of a GPU that does not exist."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Kernel:
    """Compiled kernel that notes its launches."""

    function = packed_metadata = None

    def __init__(self, key: Any, launches: list[Any]) -> None:
        self.key, self.launches = key, launches

    def __getitem__(self, grid: Any) -> Any:
        return lambda *arguments: self.launches.append((self.key, grid, arguments))

    def launch_metadata(self, *_: Any) -> None:
        return None

    def run(self, x: int, y: int, z: int, *others: Any) -> None:
        # Before the kernel's arguments: stream, function, two kinds of metadata, two hooks.
        self[x, y, z](*others[6:])


def recorded_launches(device: str) -> list[tuple[Any, ...]]:
    """Return the launches of forward and backward passes that differ in all that Triton compiles kernels for."""
    calls = []

    def note(*how: Any, **arguments: Any) -> None:
        calls.append((*how, arguments))

    priors = [None, *(prior.to(device) for prior in (Laplace(2), Window(2, 9), KeySink(2, 64)))]
    scale = SSMax(2).to(device)
    with mock.patch.object(backend, "launch", note):
        for dtype, (length, width), (start, more), kv_heads, prior in product(
            (torch.bfloat16, torch.float32),
            ((48, 16), (16, 16), (1, 16), (33, 24)),
            # Rows without gaps, with gaps, and at addresses that are no multiples of 16 bytes.
            ((0, 0), (0, 8), (1, 8)),
            (1, 2),
            priors,
        ):
            query, key, value = (
                torch.randn(2, heads, length, width + more, dtype=dtype, device=device)[..., start : start + width]
                for heads in (2, kv_heads, kv_heads)
            )
            options = {"logit_scale": scale, "softmax_scale": 0.5} if length == 33 else {}
            attend(query.requires_grad_(), key, value, prior, **options, backend="triton").sum().backward()
    return calls


@pytest.mark.parametrize("device", DEVICES)
def test_a_kept_kernel_is_the_one_that_triton_would_choose(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, launches = recorded_launches(device), []
    jitted = {
        name: JITFunction(getattr(kernels, name).fn, do_not_specialize=sizes)
        for name, sizes in (
            ("forward_kernel", kernels.SIZES),
            ("rows_kernel", ["num_queries"]),
            ("query_grad_kernel", kernels.SIZES),
            ("key_grad_kernel", kernels.SIZES),
        )
    }
    monkeypatch.setattr(driver, "_active", Driver())
    monkeypatch.setattr(JITFunction, "_do_compile", lambda _, key, *others: Kernel(key, launches))
    monkeypatch.setattr(backend, "_compiled", kept := {})
    for kernel, grid, size, constants, arguments in 2 * calls:
        by_triton = jitted[kernel.fn.__name__]
        backend.launch(by_triton, grid, size, constants, **arguments)
        options = {"num_warps": size.warps, "num_stages": size.stages, "enable_fp_fusion": True}
        by_triton[grid](**arguments, **constants, **options)
        (key, of_grid, given), (their_key, their_grid, theirs) = launches[-2:]
        assert (key, of_grid) == (their_key, their_grid)
        assert all(x is y for x, y in zip(given, theirs, strict=True))
    assert len(launches) == 4 * len(calls)
    assert len({key for key, _, _ in launches}) <= len(kept) < len(calls)
