"""Kernels are compared with the dense formula before use, and wrong kernels are not used."""

import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from triton_cases import DEVICES, configured, fast_interpreter, same

from attention_priors import GeneralizedGaussian, Laplace, SSMax, Window, attend, explain
from attention_priors.attention import plan, selftest
from attention_priors.attention.attend import solve
from attention_priors.attention.observe import observed
from attention_priors.attention.problem import Problem, make_problem
from attention_priors.attention.selftest import ALLOWED, VARIANTS, Variant, errors
from attention_priors.attention.triton import backend
from attention_priors.attention.triton.backend import Blocks
from thoroughness import every_other_deep

CPU = torch.device("cpu")
QUERY, VALUE = torch.randn(1, 2, 40, 16), torch.randn(1, 2, 40, 16)

QUICK = [
    "table, both directions",
    "table, window, scale of content",
    "table, keys, scale of all, documents",
    "table, keys, one query",
]
"""Variants whose kernels are tested outside of deep runs too."""


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_tiles_pass_the_self_test(variant: Variant) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        found = errors(variant._replace(dtype=dtype), "toeplitz", CPU)
        assert {"output", "log-sum-exp", "query", "key", "value"} <= {*found}
        assert max(found.values()) <= ALLOWED[dtype], found


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("variant", every_other_deep(VARIANTS, [v for v in VARIANTS if str(v) in QUICK]), ids=str)
def test_kernels_pass_the_self_test(variant: Variant, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cases of the self-test run and have their stated properties. On a device, they use its blocks."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with fast_interpreter():
        found = errors(variant, "triton", torch.device(device))
    assert max(found.values()) <= ALLOWED[variant.dtype], found


@pytest.mark.parametrize("name", ["output", "key"])
def test_small_errors_are_found(name: str) -> None:
    """An error of one percent in the output or in one gradient is found."""
    true: Any = solve

    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * (1.01 if name == "output" else 1)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
            return grad * 1.01

    def wrong(problem: Problem, backend: str, **options: Any) -> Any:
        if backend == "reference":
            return true(problem, backend, **options)
        if name == "key":
            return true(replace(problem, key=Wrong.apply(problem.key)), backend, **options)
        out, lse = true(problem, backend, **options)
        return Wrong.apply(out), lse

    with mock.patch("attention_priors.attention.attend.solve", wrong):
        found = errors(VARIANTS[2], "toeplitz", CPU)
    assert found[name] > ALLOWED[torch.float32]
    others = {"log-sum-exp", "value", "log_slope"} if name == "key" else {"log-sum-exp"}
    assert all(found[other] < ALLOWED[torch.float32] for other in others)


def test_kinds_of_problems_are_told_apart() -> None:
    documents = torch.zeros(1, 40, dtype=torch.int64)
    problem = make_problem(
        QUERY,
        QUERY,
        VALUE,
        Laplace(2) + Window(2, 9),
        document_ids=documents,
        logit_scale=SSMax(2, include_prior=False),
    )
    kind = Variant.of(problem)
    assert kind == Variant(("table", "window", "scale of content", "documents"), head_dim=16, value_dim=16)
    assert str(kind) == "table, window, scale of content, documents"
    assert str(Variant.of(make_problem(QUERY, QUERY, VALUE, None, causal=False))) == "both directions"


# ---- a kernel with a deliberate error

interpreted = pytest.mark.skipif(
    not backend.INSTALLED or torch.cuda.is_available(), reason="the interpreter is for machines without CUDA"
)
LARGE = same(Blocks(64, 64, 4, 1))


@pytest.fixture
def checked_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Check kernels on the CPU too, where the interpreter runs them, and forget earlier checks."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(selftest, "_faults", {})
    monkeypatch.setattr(plan, "CHECKED", ("cpu",))
    with configured(LARGE):
        yield


@pytest.fixture
def wrong_kernel(monkeypatch: pytest.MonkeyPatch, checked_on_cpu: None) -> None:
    """Run kernels with a softmax scale that is 10 % too large."""
    numbers = backend._Launcher.numbers.func

    def wrong(launcher: Any) -> dict[str, Any]:
        found = numbers(launcher)
        return found | {"softmax_scale": 1.1 * found["softmax_scale"]}

    monkeypatch.setattr(backend._Launcher, "numbers", property(wrong))


@interpreted
@pytest.mark.usefixtures("wrong_kernel")
def test_a_wrong_kernel_is_refused_with_one_warning() -> None:
    prior = Laplace(2)
    message = r"backend='triton' cannot compute this: its kernels are wrong on cpu for table in torch\."
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            with pytest.raises(ValueError, match=message):
                attend(QUERY, QUERY, VALUE, prior, backend="triton")
    (warning,) = caught
    assert "attention-priors selftest" in str(warning.message)
    assert "not triton: its kernels are wrong on cpu" in explain(QUERY, QUERY, VALUE, prior)


@interpreted
@pytest.mark.usefixtures("checked_on_cpu")
def test_right_kernels_are_checked_once_for_each_kind() -> None:
    prior = GeneralizedGaussian(2)
    with mock.patch.object(selftest, "errors", wraps=errors) as compared:
        for _ in range(3):
            attend(QUERY, QUERY, VALUE, prior, backend="triton")
        assert compared.call_count == 1
        attend(QUERY, QUERY, VALUE, prior, causal=False, backend="triton")
        assert compared.call_count == 2


@pytest.mark.slow
@interpreted
@pytest.mark.usefixtures("checked_on_cpu")
def test_kernels_are_checked_before_compilation_and_inside_transforms() -> None:
    prior = Laplace(2)

    def call(query: Tensor) -> Tensor:
        return attend(query, query, VALUE, prior, backend="triton")

    torch._dynamo.reset()
    with mock.patch.object(selftest, "errors", wraps=errors) as compared:
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(QUERY), call(QUERY))
        assert compared.call_count == 1
        selftest._faults.clear()
        torch.func.grad(lambda x: call(x).sum())(QUERY)
        with torch.inference_mode():
            call(QUERY)
        assert compared.call_count == 2


@interpreted
@pytest.mark.usefixtures("wrong_kernel")
def test_a_wrong_kernel_is_not_compiled() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    with pytest.warns(RuntimeWarning, match="not used"), pytest.raises(Exception, match="its kernels are wrong"):
        compiled(QUERY, QUERY, VALUE, Laplace(2), backend="triton")


@interpreted
@pytest.mark.usefixtures("checked_on_cpu")
def test_a_check_ignores_observers_and_the_default_device() -> None:
    seen: list[Problem] = []
    with observed(seen.append):
        attend(QUERY, QUERY, VALUE, Laplace(2), backend="triton")
    assert len(seen) == 1
    selftest._faults.clear()
    with torch.device("meta"):
        numbers = errors(VARIANTS[0], "toeplitz", CPU)
    assert max(numbers.values()) <= ALLOWED[torch.float32]


@interpreted
@pytest.mark.usefixtures("checked_on_cpu")
@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("full"), KeyboardInterrupt("stop")], ids=["memory", "interrupt"]
)
def test_an_interrupted_check_has_no_result(error: BaseException) -> None:
    with mock.patch.object(selftest, "errors", side_effect=error):
        for _ in range(2):
            with pytest.raises(type(error), match=str(error)):
                attend(QUERY, QUERY, VALUE, Laplace(2), backend="triton")
    attend(QUERY, QUERY, VALUE, Laplace(2), backend="triton")


@interpreted
@pytest.mark.usefixtures("checked_on_cpu")
def test_kernels_that_do_not_compile_are_not_used() -> None:
    with (
        mock.patch.object(selftest, "errors", side_effect=RuntimeError("no C\ncompiler " + 300 * "x")),
        pytest.warns(RuntimeWarning, match="do not run on cpu for table in torch.float32: RuntimeError: no C compiler"),
        pytest.raises(ValueError, match="its kernels do not run"),
    ):
        attend(QUERY, QUERY, VALUE, Laplace(2), backend="triton")
