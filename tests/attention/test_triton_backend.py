"""Arguments that ``backend="triton"`` accepts and refuses, and its use with other parts of PyTorch."""

from typing import Any
from unittest import mock

import pytest
import torch
from attention_cases import Case
from attention_errors import Cotangents, compute
from torch import Tensor
from triton_cases import DEVICES, compute_on, configured, place, same

from attention_priors import GeneralizedGaussian, KeySink, Laplace, ShawVectors, SSMax, Window, attend
from attention_priors.attention.tiles import backward, forward
from attention_priors.attention.triton import backend as triton_backend
from attention_priors.attention.triton.backend import Blocks, visited
from thoroughness import every_other_deep

SMALL = same(Blocks(16, 16, 4, 1))
X = torch.randn(1, 2, 8, 4)
PLACES = torch.arange(20)
REFUSED = {
    "relative": ({"relative": ShawVectors(4)}, "relative"),
    "dropout": ({"dropout_p": 0.1}, "dropout_p"),
    "mask": ({"attn_mask": torch.zeros(8, 8, dtype=torch.bool)}, "attn_mask.*document_ids"),
    "far apart": ({"query_positions": torch.arange(8) * 1000, "key_positions": torch.arange(8)}, "too far apart"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_problems_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    options, match = REFUSED[name]
    with pytest.raises(ValueError, match=f"backend='triton'.*{match}"):
        attend(X, X, X, Laplace(2), backend="triton", **options)


def test_float64_and_wide_heads_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ValueError, match="float64"):
        attend(X.double(), X.double(), X.double(), backend="triton")
    wide = torch.randn(1, 2, 3, 257)
    with pytest.raises(ValueError, match="at most 256"):
        attend(wide, wide, wide, backend="triton")


def test_more_heads_than_grid_rows_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    many = torch.zeros(65536, 1, 1, 1)
    with pytest.raises(ValueError, match="65535"):
        attend(many, many, many, backend="triton")


def test_the_cpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match=r"backend='triton'.*CUDA.*cpu"):
        attend(X, X, X, backend="triton")
    attend(X, X, X)


def test_missing_triton_is_named() -> None:
    with mock.patch.object(triton_backend, "INSTALLED", False), pytest.raises(ValueError, match="not installed"):
        attend(X, X, X, backend="triton")


def test_kept_slots_are_listed() -> None:
    kept = torch.tensor([[[[True, False, True, True], [False] * 4, [False, True, False, False]]]])
    counts, slots = visited(kept)
    assert counts.tolist() == [[[3, 0, 1]]]
    assert slots[0, 0, 0, :3].tolist() == [0, 2, 3]
    assert slots[0, 0, 2, :1].tolist() == [1]


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_compiled_without_a_graph_break(device: str) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, h, 20, 8, device=device, requires_grad=True) for h in (2, 1, 1))
    prior = (GeneralizedGaussian(2, init="spread", learn=True) + KeySink(2, train_length=8)).to(device)
    scale = SSMax(2).to(device)
    documents = torch.tensor([[0] * 9 + [1] * 11], device=device)
    leaves = [query, key, value, scale.s, *(p for p in prior.parameters() if p.requires_grad)]

    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attend(query, key, value, prior, logit_scale=scale, document_ids=documents, backend="triton")

    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    with configured(SMALL):
        found, expected = (
            torch.autograd.grad(function(query, key, value).square().sum(), leaves) for function in (compiled, call)
        )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_vmap_matches_a_loop(device: str) -> None:
    torch.manual_seed(0)
    tensors = torch.randn(3, 2, 1, 2, 6, 4, device=device)
    prior = Laplace(2).to(device)

    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attend(query, key, value, prior, backend="triton")

    with configured(SMALL):
        found = torch.func.vmap(call)(*tensors)
        for index in range(2):
            torch.testing.assert_close(found[index], call(*tensors[:, index]))


@pytest.mark.parametrize("device", DEVICES)
def test_kernels_compute_every_tile(device: str) -> None:
    """Kernels compute every tile, unless positions have no common offset and the table is learned."""
    case = Case(X, X, X, Laplace(2, learn=True), document_ids=torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]]))
    cotangents = Cotangents.of(*case.attend())
    with (
        configured(SMALL),
        mock.patch.object(forward, "forward", side_effect=AssertionError),
        mock.patch.object(backward, "backward", side_effect=AssertionError),
    ):
        compute_on(device, case, cotangents)


@pytest.mark.cuda
def test_auto_chooses_triton_on_cuda() -> None:
    case = place(Case(X, X, X, Laplace(2)), "cuda")
    case.attend("auto")  # the first call of a variant checks its kernels
    with mock.patch.object(triton_backend, "forward", wraps=triton_backend.forward) as forward:
        case.attend("auto")
        assert forward.call_count == 1
        place(Case(X, X, X, Laplace(2), attn_mask=torch.zeros(8, 8, dtype=torch.bool)), "cuda").attend("auto")
        assert forward.call_count == 1


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_on_cuda_repeat_bit_for_bit(dtype: torch.dtype) -> None:
    """Many programs add to one table's gradient at the same time."""
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 2, 8, 2000, 64).unbind()
    case = place(Case(query, key, value, GeneralizedGaussian(8, learn=True), logit_scale=SSMax(8)).to(dtype), "cuda")
    cotangents = Cotangents.of(*case.attend("triton"))
    first, second = (compute(case, "triton", cotangents) for _ in range(2))
    assert torch.equal(first.out, second.out)
    assert torch.equal(first.lse, second.lse)
    for name, grad in first.grads.items():
        assert torch.equal(grad, second.grads[name]), name


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_default_blocks_on_cuda_need_linear_memory(head_dim: int, dtype: torch.dtype) -> None:
    """With default blocks, memory grows linearly with the length."""
    peaks = []
    for length in (1000, 2000):
        torch.manual_seed(0)
        query, key, value = (torch.randn(1, h, length, head_dim) for h in (2, 1, 1))
        prior = GeneralizedGaussian(2, init="spread", learn=True)
        case = Case(query, key, value, prior).to(dtype)
        expected = compute(place(case.to(torch.float64), "cuda"), "reference")
        # Largest error of a gradient that comes from a half-precision output.
        out_grad = torch.randn_like(expected.out).to(dtype).double()
        cotangents = Cotangents(out_grad, torch.zeros_like(expected.lse))
        expected = compute(place(case.to(torch.float64), "cuda"), "reference", cotangents)
        moved = place(case, "cuda")
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        found = compute(moved, "triton", cotangents)
        peaks.append(torch.cuda.max_memory_allocated() - before)
        tolerance = 1e-4 if dtype == torch.float32 else 0.02
        for part, exact in expected.grads.items():
            error = (found.grads[part].double() - exact.double()).abs().max() / exact.double().abs().max()
            assert error <= (1e-4 if "." in part else tolerance), part
        largest = expected.out.double().abs().max()
        assert (found.out.double() - expected.out.double()).abs().max() <= tolerance * largest
    assert peaks[1] <= 2.2 * peaks[0]


FAR_APART: dict[str, tuple[Tensor, Tensor]] = {
    "keys": (PLACES, PLACES + (PLACES >= 15) * 2**32),
    "keys, not by a multiple of 2^32": (PLACES, PLACES + (PLACES >= 15) * (2**32 + 3)),
    "keys of one example": (PLACES, torch.stack([PLACES, PLACES + (PLACES >= 15) * 2**40])),
    "keys, just too far": (PLACES, PLACES + (PLACES >= 15) * (2**30 - 14)),
    "a query": (PLACES - (PLACES == 0) * 2**32, PLACES),
    "queries and keys": (PLACES - (PLACES < 4) * (2**31 + 9), PLACES + (PLACES >= 15) * 2**31),
    "all keys": (PLACES - 2**40, PLACES),
    "all keys, with gaps": (PLACES - 2**32 - 2**20, PLACES * 2),
}
"""All far pairs are in the future."""


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "name", every_other_deep(FAR_APART, ["keys of one example", "keys, just too far", "all keys, with gaps"])
)
def test_far_apart_positions_are_refused_or_compiled_exactly(name: str, device: str) -> None:
    """A compiled graph does not check positions. Causal masks hide pairs at any distance."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, h, 20, 4, device=device, requires_grad=True) for h in (2, 1, 1))
    queries, keys = (positions.to(device) for positions in FAR_APART[name])
    prior = Laplace(2, learn=True).to(device)
    leaves = [query, key, value, *prior.parameters()]

    def call(backend: Any, causal: bool = True) -> Tensor:
        return attend(
            query, key, value, prior, query_positions=queries, key_positions=keys, causal=causal, backend=backend
        )

    for causal in (True, False):
        with pytest.raises(ValueError, match=r"backend='triton'.*tokens apart, but distances must be below 1073741823"):
            call("triton", causal)
    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    with configured(SMALL):
        found = compiled("triton")
        grads = torch.autograd.grad(found.square().sum(), leaves)
        with pytest.raises(ValueError, match="tokens apart"):
            compiled("triton", False)
    expected = call("reference")
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for one, other in zip(grads, torch.autograd.grad(expected.square().sum(), leaves), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_queries_far_behind_all_keys_are_refused(device: str) -> None:
    """A common offset leaves few distances, but kernels reserve such large distances for hidden pairs."""
    x = X.to(device)
    places = torch.arange(8, device=device)
    for apart in (2**30 - 8, 2**30 + 100, 2**40):
        with pytest.raises(ValueError, match="distances must be below 1073741823"):
            attend(x, x, x, Laplace(2).to(device), query_positions=places + apart, backend="triton")
        attend(x, x, x, Window(2, 8).to(device), query_positions=places + apart)  # uses another backend


@pytest.mark.parametrize("device", DEVICES)
def test_examples_with_far_apart_positions_are_independent(device: str) -> None:
    """Positions of one example do not affect another example."""
    torch.manual_seed(0)
    x = torch.randn(2, 2, 20, 4, device=device)
    places = torch.stack([PLACES, PLACES.flip(0) + 2**40]).to(device)
    prior = Laplace(2).to(device)
    with configured(SMALL):
        found = attend(x, x, x, prior, query_positions=places, key_positions=places, backend="triton")
    expected = attend(x, x, x, prior, query_positions=places, key_positions=places, backend="reference")
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
