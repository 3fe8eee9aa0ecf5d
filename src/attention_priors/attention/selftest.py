"""Self-test: compares kernels with the dense formula on this device, on one small problem for each kind of kernel.

A kernel is compiled for each device and each kind of problem, and a compiler may be wrong. Before the first use of a
variant, its results are compared with the dense formula in float64.
"""

from __future__ import annotations

import math
import warnings
from textwrap import shorten
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from attention_priors.attention.logit_scale import SSMax
from attention_priors.attention.problem import Problem, make_problem
from attention_priors.precision import is_captured
from attention_priors.priors import Laplace, Prior, Structure, Window

ALLOWED = {torch.float64: 1e-5, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest allowed error, relative to the largest number of a tensor: several times the rounding error. (Parameters of
priors are at most float32.)"""
CHECKED = ("cuda",)
"""Device types on which kernels are checked before their first use."""
HEADS = 2


class Variant(NamedTuple):
    """Kind of problem that a kernel is compiled for."""

    parts: tuple[str, ...] = ()
    """Features of the problem besides plain causal attention."""
    dtype: torch.dtype = torch.float32
    head_dim: int = 64
    value_dim: int = 64

    @classmethod
    def of(cls, problem: Problem) -> Variant:
        """Return the variant of a problem."""
        geometry, kinds = problem.geometry, [term.structure for term in problem.terms]
        has = {
            "table": any(Structure.STATIONARY in kind for kind in kinds),
            "window": any(type(term).visible_at is not Prior.visible_at for term in problem.terms),
            "keys": problem.key_bias is not None or any(Structure.OF_KEYS in kind for kind in kinds),
            "scale of all": problem.row_scale is not None and problem.scales_prior,
            "scale of content": problem.row_scale is not None and not problem.scales_prior,
            "documents": geometry.key_documents is not None,
            "padding": geometry.key_padding_mask is not None,
            "positions": geometry.has_given_positions,
            "pruned": problem.tolerance > 0,
            "one query": geometry.num_queries == 1,
            "both directions": not geometry.causal,
        }
        dims = (int(x.shape[3]) for x in (problem.query, problem.value))
        return cls(tuple(name for name, there in has.items() if there), problem.query.dtype, *dims)

    def __str__(self) -> str:
        """Return the parts, separated by commas."""
        return ", ".join(self.parts) or "plain"


VARIANTS = (
    Variant(),
    Variant(("table", "both directions")),
    Variant(("table", "scale of all")),
    Variant(("table", "window", "scale of content")),
    Variant(("table", "keys", "padding")),
    Variant(("table", "keys", "scale of all", "documents")),
    Variant(("table", "positions")),
    Variant(("table", "pruned")),
    Variant(("table", "keys", "one query")),
    Variant(("table",), head_dim=80, value_dim=96),
    Variant(("table",), head_dim=128, value_dim=128),
)
"""Variants that ``attention-priors selftest`` checks."""


def errors(variant: Variant, backend: Any, device: torch.device) -> dict[str, float]:
    """Return the largest error of output, log-sum-exp and each gradient, relative to the largest number of each."""
    from attention_priors.attention.attend import solve  # solve() does not call the callbacks of attend()

    generator, parts = torch.Generator().manual_seed(0), variant.parts
    num_keys = 600 if "pruned" in parts or "one query" in parts else 200
    num_queries = 1 if "one query" in parts else num_keys

    def some(*shape: int, dtype: torch.dtype = variant.dtype) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cpu").to(device, dtype)

    query, key = some(1, HEADS, num_queries, variant.head_dim), some(1, 1, num_keys, variant.head_dim)
    tensors = [query, key, some(1, 1, num_keys, variant.value_dim)]
    terms: list[Prior] = [Laplace(HEADS, learn=True)] if "table" in parts else []
    terms += [Window(HEADS, 70)] if "window" in parts else []
    prior = sum(terms[1:], terms[0]).to(device) if terms else None
    tolerance = 1e-7 if "pruned" in parts else 0.0
    options: dict[str, Any] = {"causal": "both directions" not in parts, "tolerance": tolerance}
    if "scale of all" in parts or "scale of content" in parts:
        options["logit_scale"] = SSMax(HEADS, 0.3, include_prior="scale of all" in parts).to(device)
    if "documents" in parts:
        options["document_ids"] = (torch.arange(num_keys, device=device) // 77).unsqueeze(0)
    if "padding" in parts:
        options["key_padding_mask"] = torch.arange(num_keys, device=device).unsqueeze(0) < 9
    if "positions" in parts:
        positions = torch.randint(0, 2 * num_keys, (num_keys,), generator=generator, device="cpu").to(device)
        options |= {"query_positions": positions[:num_queries], "key_positions": positions}
    if "keys" in parts:
        tensors.append(some(1, HEADS, num_keys, dtype=torch.float64).cumsum(-1))
    modules = [module for module in (prior, options.get("logit_scale")) if module is not None]
    learned = {name: x for module in modules for name, x in module.named_parameters() if x.requires_grad}
    cotangents: list[Tensor] = []

    def results(backend: Any, dtype: torch.dtype) -> list[Tensor]:
        query, key, value = (x.to(dtype).requires_grad_() for x in tensors[:3])
        bias = [x.detach().requires_grad_() for x in tensors[3:]]
        with torch.enable_grad():
            problem = make_problem(query, key, value, prior, **options, key_bias=bias[0] if bias else None)
            out, lse = solve(problem, backend, need_lse=True)
            assert lse is not None
            if not cotangents:
                cotangents.extend(some(*x.shape) for x in (out, lse))
            # A row that sees nothing has a log-sum-exp of -inf, and no gradient.
            found = [out, lse.masked_fill(torch.isneginf(lse), 0.0)]
            of_them = [cotangent.to(x.dtype) for cotangent, x in zip(cotangents, found, strict=True)]
            grads = torch.autograd.grad(found, [query, key, value, *bias, *learned.values()], of_them)
        return [*(x.detach() for x in found), *grads]

    exact = results("reference", torch.float64)
    names = ("output", "log-sum-exp", "query", "key", "value", *(["key_bias"] if "keys" in parts else []), *learned)
    return {
        name: float((x.double() - y.double()).abs().amax() / y.double().abs().amax().clamp(min=1e-30))
        for name, x, y in zip(names, results(backend, variant.dtype), exact, strict=True)
    }


def worst(found: dict[str, float]) -> str:
    """Return the name of the largest error, or of an error that is NaN."""
    return max(found, key=lambda name: math.inf if math.isnan(found[name]) else found[name])


def in_a_line(error: Exception) -> str:
    """Return the error's type and message in one line, shortened. A message may be a page of source."""
    return shorten(f"{type(error).__name__}: {error}", 200)


_faults: dict[tuple[torch.device, Variant], str | None] = {}


def fault(device: torch.device, *kind: Any) -> str | None:
    """Return a description of the fault in Triton's kernels for a :class:`Variant`; None if there is none.

    Each variant is checked once per device.
    """
    variant = Variant(*kind)
    place = device, variant
    if place not in _faults:
        if is_captured():
            return None  # a graph is captured only after an ordinary run
        _faults[place] = None  # the check itself calls this function
        where = f"on {device} for {variant} in {variant.dtype}"
        try:
            with torch.inference_mode(False), temporarily_clear_interpreter_stack():
                found = errors(variant, "triton", device)
            name = worst(found)
            wrong = f"are wrong {where}: the {name} is off by {found[name]:.1e} of its size"
            right = found[name] <= ALLOWED[variant.dtype]
        except BaseException as error:
            if isinstance(error, torch.OutOfMemoryError) or not isinstance(error, Exception):
                del _faults[place]  # the result is unknown
                raise
            # There is no compiler, or the compiler does not support these kernels.
            wrong, right = f"do not run {where}: {in_a_line(error)}", False
        if not right:
            _faults[place] = f"its kernels {wrong}; please report this with the output of `attention-priors selftest`"
            warnings.warn(f"backend='triton' is not used: {_faults[place]}", RuntimeWarning, stacklevel=2)
    return _faults[place]


# Same effect as torch.compiler.assume_constant_result(), without importing the compiler: the check runs before
# compilation.
fault._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
