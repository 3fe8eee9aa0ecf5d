"""The attention operator in PyTorch: compiled, transformed, checkpointed and repeated."""

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from pruning_cases import small_blocks
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.func import functional_call, grad, vmap
from torch.utils.checkpoint import checkpoint

from attention_priors import (
    Fire,
    GeneralizedGaussian,
    KeyBounds,
    KeySink,
    Laplace,
    Prior,
    RelativeBuckets,
    Spectral,
    SSMax,
    Window,
    attend,
)
from attention_priors.attention import operator as operators
from attention_priors.priors import Axial, grid_positions
from thoroughness import every_other_deep

pytestmark = pytest.mark.usefixtures("both_ways")

B, H, KV, L, D, DV = 2, 4, 2, 20, 8, 6
DOCUMENTS = torch.tensor([[0] * 8 + [1] * 12, [0] * 20])
INTERLEAVED = torch.tensor([[0, 1] * 10, [0] * 20])
PADDING = torch.zeros(B, L, dtype=torch.bool)
PADDING[0, :3] = True


def inputs(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = (B, H, L, D), (B, KV, L, D), (B, KV, L, DV)
    query, key, value = (torch.randn(size, generator=generator).requires_grad_() for size in sizes)
    return query, key, value


def gaussian() -> GeneralizedGaussian:
    return GeneralizedGaussian(H, init="spread", learn=True)


def fire() -> Fire:
    return Fire(H, 5, init={"c": 1.0, "threshold": 3.0})


VARIANTS: dict[str, tuple[Callable[[], Prior | None], dict[str, Any]]] = {
    "no prior": (lambda: None, {}),
    "generalized gaussian": (gaussian, {}),
    "bidirectional": (gaussian, {"causal": False}),
    "laplace": (lambda: Laplace(H, learn=True), {}),
    "buckets": (lambda: RelativeBuckets(H, num_buckets=8, max_distance=16), {}),
    "lanes": (lambda: Spectral(H), {}),
    "network": (fire, {}),
    "network, table and sink, scaled": (
        lambda: fire() + gaussian() + KeySink(H, train_length=8),
        {"logit_scale": SSMax(H), "document_ids": DOCUMENTS},
    ),
    "slope": (lambda: KeySink(H, train_length=8, init="recency"), {"logit_scale": SSMax(H)}),
    "table, lanes and slope": (lambda: gaussian() + KeySink(H, train_length=8, init="recency"), {}),
    "table and lanes": (lambda: gaussian() + KeySink(H, train_length=8), {}),
    "window": (lambda: gaussian() + Window(H, 5), {}),
    "bidirectional window with padding": (
        lambda: gaussian() + Window(H, 5),
        {"causal": False, "key_padding_mask": PADDING},
    ),
    "scaled": (gaussian, {"logit_scale": SSMax(H)}),
    "documents": (gaussian, {"document_ids": DOCUMENTS, "logit_scale": SSMax(H)}),
    "interleaved documents": (gaussian, {"document_ids": INTERLEAVED, "logit_scale": SSMax(H)}),
    "padding": (gaussian, {"key_padding_mask": PADDING, "logit_scale": SSMax(H)}),
    "mask, content scaled": (
        gaussian,
        {
            "attn_mask": torch.arange(L) % 3 == torch.arange(L).unsqueeze(-1) % 4,
            "logit_scale": SSMax(H, include_prior=False),
        },
    ),
    "pruned": (lambda: Laplace(H, slopes=[4.0, 2.0, 1.0, 0.01], learn=True), {"tolerance": 0.05}),
    "pruned and scaled": (gaussian, {"tolerance": 0.3, "logit_scale": SSMax(H)}),
    "positions": (gaussian, {"query_positions": torch.arange(L), "key_positions": torch.arange(L)}),
    "positions in reverse": (gaussian, {"query_positions": torch.arange(L).flip(0), "causal": False}),
}

IN_TILES = every_other_deep(["in one tile", "in tiles"], ["in tiles"])
"""Ways to compute the operator, for tests of transformations. To a transformation, the operator is one node in each."""

DISTINCT = [
    "network, table and sink, scaled",
    "table, lanes and slope",
    "bidirectional window with padding",
    "mask, content scaled",
    "pruned and scaled",
    "positions",
]
"""Variants that together cover every part of all variants."""


@pytest.fixture(autouse=True)
def _small_blocks() -> Iterator[None]:
    """Use small blocks, so that there are blocks to prune."""
    with small_blocks(4):
        yield


@pytest.mark.slow
@pytest.mark.parametrize("both_ways", IN_TILES, indirect=True)
@pytest.mark.parametrize("name", every_other_deep(VARIANTS, DISTINCT))
def test_compiled_without_a_graph_break(name: str) -> None:
    make, options = VARIANTS[name]
    prior, tensors = make(), inputs()
    leaves = [*tensors, *(p for p in (prior.parameters() if prior else ()) if p.requires_grad)]

    def call(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return attend(query, key, value, prior, return_lse=True, **options)

    def results(function: Callable[..., tuple[Tensor, Tensor]]) -> list[Tensor]:
        out, lse = function(*tensors)
        total = out.square().sum() + lse.masked_fill(torch.isneginf(lse), 0.0).sin().sum()
        return [out.detach(), lse.detach(), *torch.autograd.grad(total, leaves)]

    torch._dynamo.reset()
    found = results(torch.compile(call, fullgraph=True, backend="aot_eager"))
    for one, other in zip(found, results(call), strict=True):
        # Uncompiled short contexts use a fast path, which rounds differently.
        torch.testing.assert_close(one, other, rtol=1e-5, atol=3e-6)


@pytest.mark.slow
@pytest.mark.parametrize("prior", [None, Spectral(H, 2) + KeySink(H, 64)], ids=["none", "spectral and sink"])
@pytest.mark.parametrize("scaled", every_other_deep([False, True], [True]))
@pytest.mark.parametrize("both_ways", IN_TILES, indirect=True)
def test_compiled_with_symbolic_sizes(prior: Prior | None, scaled: bool) -> None:
    scale = SSMax(H, 0.4) if scaled else None
    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend="aot_eager")
    for length in (9, 14):
        query, key = torch.randn(2, H, length, 4), torch.randn(2, H, length, 4)
        with torch.no_grad():
            found = compiled(query, key, key, prior, logit_scale=scale)
            expected = attend(query, key, key, prior, logit_scale=scale, backend="reference")
        torch.testing.assert_close(found, expected)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("both_ways", ["in one tile"], indirect=True)  # long problems use several all the same
def test_inductors_code_serves_all_lengths() -> None:
    prior, scale = gaussian(), SSMax(H, 0.4)
    torch._dynamo.reset()
    counted = CompileCounterWithBackend("inductor")
    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend=counted)
    for batch, length in ((2, 32), (3, 48), (2, 130), (3, 333)):
        query, key, value = torch.randn(3, batch, H, length, D).requires_grad_()
        results = []
        for function in (compiled, attend):
            out = function(query, key, value, prior, logit_scale=scale)
            leaves = [query, key, value, *prior.parameters(), *scale.parameters()]
            results.append([out, *torch.autograd.grad(out.square().mean(), leaves)])
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
    assert counted.frame_count <= 2, "a graph for each length"


@pytest.mark.slow
@pytest.mark.parametrize("both_ways", IN_TILES, indirect=True)
def test_compiled_calls_refuse_positions_with_gaps() -> None:
    query, key, value = inputs()
    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    with pytest.raises(ValueError, match="query_positions and key_positions lie"):
        compiled(query, key, value, gaussian(), query_positions=2 * torch.arange(L))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    every_other_deep([n for n in VARIANTS if n not in ("no prior", "lanes", "positions in reverse")], DISTINCT),
)
@pytest.mark.parametrize("dtype", every_other_deep([torch.float32, torch.float64], [torch.float32]))
@pytest.mark.parametrize("both_ways", IN_TILES, indirect=True)
def test_operator_passes_opcheck(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's own check of schema, fake tensors and autograd, on the arguments that attend() passes."""
    make, options = VARIANTS[name]
    calls: list[tuple[Any, ...]] = []
    backend = "attention_priors.attention.tiles.backend."
    monkeypatch.setattr(backend + "attend_bare", lambda *_, **__: None)
    monkeypatch.setattr(
        backend + "attend_in_tiles",
        lambda *arguments: calls.append(arguments) or operators.block_attention(*arguments),
    )
    query, key, value = (x.detach().to(dtype).requires_grad_() for x in inputs())
    attend(query, key, value, make(), backend="toeplitz", **options)
    (arguments,) = calls
    arguments = tuple(
        x.detach().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x for x in arguments
    )
    torch.library.opcheck(torch.ops.attention_priors.block_attention.default, arguments)


@pytest.mark.parametrize("name", [n for n in VARIANTS if n not in ("no prior", "lanes")])
def test_results_have_the_declared_strides(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, options = VARIANTS[name]
    tensors, results = inputs(), []
    backend = "attention_priors.attention.tiles.backend."
    monkeypatch.setattr(backend + "attend_bare", lambda *_, **__: None)
    monkeypatch.setattr(
        backend + "attend_in_tiles", lambda *x: results.append(operators.block_attention(*x)) or results[-1]
    )
    grads = torch.autograd.grad(attend(*tensors, make(), **options).square().sum(), tensors)
    ((out, lse),) = results
    assert all(x.is_contiguous() for x in (out.transpose(1, 2), lse, *grads))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"document_ids": DOCUMENTS}, {"key_padding_mask": PADDING}])
@pytest.mark.parametrize("both_ways", IN_TILES, indirect=True)
def test_count_passes_opcheck(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []
    count = operators._visible_keys
    monkeypatch.setattr(operators, "_visible_keys", lambda *x: calls.append(x) or count(*x))
    monkeypatch.setattr(operators, "nobody_watches", lambda *x, **options: False)
    attend(*inputs(), logit_scale=SSMax(H), **options)
    torch.library.opcheck(torch.ops.attention_priors.visible_keys.default, calls[0])


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"logit_scale": SSMax(H)}, {"document_ids": DOCUMENTS}])
@pytest.mark.parametrize("both_ways", IN_TILES, indirect=True)
def test_pruning_passes_opcheck(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []
    choose = operators._kept_blocks
    monkeypatch.setattr(operators, "_kept_blocks", lambda *x: calls.append(x) or choose(*x))
    query, key, value = inputs()
    prior = Laplace(H, slopes=[4.0, 2.0, 1.0, 0.01])
    for bounds in (None, KeyBounds(key)):
        attend(query, key, value, prior, tolerance=0.05, key_bounds=bounds, **options)
    for arguments in calls:
        kept = choose(*arguments)
        assert not kept.all()
        torch.library.opcheck(torch.ops.attention_priors.kept_blocks.default, arguments)


@pytest.mark.parametrize("name", VARIANTS)
def test_torch_func_gradients_match_autograd(name: str) -> None:
    make, options = VARIANTS[name]
    prior, tensors = make(), inputs()

    def loss(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attend(query, key, value, prior, **options).square().sum()

    found = grad(loss, argnums=(0, 1, 2))(*(x.detach() for x in tensors))
    for one, other in zip(found, torch.autograd.grad(loss(*tensors), tensors), strict=True):
        # Under a transformation, factored priors are computed in tiles.
        torch.testing.assert_close(one, other, rtol=1e-5, atol=3e-6)


class Loss(torch.nn.Module):
    def __init__(self, prior: Prior, options: dict[str, Any]) -> None:
        super().__init__()
        self.prior = prior
        self.options = options

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attend(query, key, value, self.prior, **self.options).square().sum()


@pytest.mark.parametrize("name", ["generalized gaussian", "scaled", "documents", "window", "network"])
def test_per_example_gradients_of_parameters_match(name: str) -> None:
    make, options = VARIANTS[name]
    prior = make()
    assert prior is not None
    loss = Loss(prior, options)
    parameters: dict[str, Tensor] = dict(loss.named_parameters())
    examples = [inputs(seed) for seed in range(3)]
    stacked = [torch.stack(parts).detach() for parts in zip(*examples, strict=True)]

    def one(parameters: dict[str, Tensor], *tensors: Tensor) -> Tensor:
        return functional_call(loss, parameters, tensors)

    found = vmap(grad(one), in_dims=(None, 0, 0, 0))(parameters, *stacked)
    for index, example in enumerate(examples):
        expected = torch.autograd.grad(loss(*example), list(parameters.values()))
        for parameter, value in zip(parameters, expected, strict=True):
            of_sums = 1e-6 * float(value.abs().max())
            torch.testing.assert_close(found[parameter][index], value, rtol=1e-4, atol=max(1e-5, of_sums))


@pytest.mark.slow
@pytest.mark.parametrize("both_ways", IN_TILES, indirect=True)
@pytest.mark.parametrize("name", every_other_deep(VARIANTS, DISTINCT))
@pytest.mark.parametrize("in_dims", [(0, 0, 0), (1, None, None), (None, 2, 0)])
def test_vmap_over_examples_matches_a_loop(name: str, in_dims: tuple[int | None, ...]) -> None:
    make, options = VARIANTS[name]
    prior = make()
    examples = [[x.detach() for x in inputs(seed)] for seed in range(3)]
    stacked = [
        examples[0][place] if dim is None else torch.stack([example[place] for example in examples], dim)
        for place, dim in enumerate(in_dims)
    ]

    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attend(query, key, value, prior, **options)

    with torch.no_grad():
        found = vmap(call, in_dims=in_dims)(*stacked)
        for index in range(3):
            example = [x if dim is None else x.select(dim, index) for x, dim in zip(stacked, in_dims, strict=True)]
            torch.testing.assert_close(found[index], call(*example), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("transform", ["positions", "positions in a gradient", "scaled", "grid"])
def test_vmap_over_positions_matches_a_loop(transform: str) -> None:
    query, key, value = (x.detach() for x in inputs())
    prior: Prior = Axial(H, {"name": "generalized_gaussian", "init": "spread"}) if transform == "grid" else gaussian()
    scale = SSMax(H).requires_grad_(False) if transform == "scaled" else None
    positions = torch.stack([torch.arange(L) - 2, torch.arange(L)])
    if transform == "grid":
        positions = torch.stack([grid_positions(4, 5), grid_positions(5, 4)])
    keys = positions[1]

    def one(query: Tensor, positions: Tensor) -> Tensor:
        options = {"query_positions": positions, "key_positions": keys, "logit_scale": scale}
        return attend(query, key, value, prior, **options)

    of_one = grad(lambda query, positions: one(query, positions).square().sum()) if "gradient" in transform else one
    found = vmap(of_one, in_dims=(None, 0))(query, positions)
    expected = torch.stack([of_one(query, some) for some in positions])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_vmap_over_priors_matches_a_loop() -> None:
    query, key, value = (x.detach() for x in inputs())
    prior = gaussian()
    loss = Loss(prior, {})
    shapes = torch.stack([prior.theta_beta + step for step in (0.0, 0.5, 1.0)]).detach()

    def one(theta_beta: Tensor) -> Tensor:
        return functional_call(loss, {"prior.theta_beta": theta_beta}, (query, key, value))

    found = vmap(one)(shapes)
    torch.testing.assert_close(found, torch.stack([one(shape) for shape in shapes]), rtol=1e-5, atol=1e-5)


def test_second_derivatives_are_refused() -> None:
    query, key, value = inputs()
    prior = gaussian()
    message = "second derivative; use backend='reference' or 'blockwise'"

    def total(query: Tensor) -> Tensor:
        return attend(query, key.detach(), value.detach(), prior).sum()

    (first,) = torch.autograd.grad(total(query), query, create_graph=True)
    with pytest.raises(NotImplementedError, match=message):
        first.sum().backward()
    with pytest.raises(NotImplementedError, match=message):
        grad(lambda x: grad(total)(x).square().sum())(query.detach())
    with pytest.raises(NotImplementedError, match="no forward-mode derivative; use backend='reference'"):
        torch.func.jvp(total, (query.detach(),), (query.detach(),))


def test_forward_mode_uses_the_reference() -> None:
    query, key, value = (x.detach().double() for x in inputs())
    prior = gaussian()
    parameters = {name: p.detach().double() + 0.1 for name, p in prior.named_parameters()}
    step = {name: torch.linspace(-1, 1, H, dtype=torch.float64) for name in parameters}

    class Total(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.prior = prior

        def forward(self) -> Tensor:
            return attend(query, key, value, self.prior, backend="reference").square().sum()

    def total(parameters: dict[str, Tensor]) -> Tensor:
        return functional_call(Total(), {f"prior.{name}": p for name, p in parameters.items()}, ())

    found = torch.func.jvp(total, (parameters,), (step,))[1]
    expected = sum((gradient * step[name]).sum() for name, gradient in grad(total)(parameters).items())
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_gradients_match(reentrant: bool) -> None:
    query, key, value = inputs()
    prior = gaussian()
    leaves = [query, key, value, *prior.parameters()]

    def gradients(out: Tensor) -> list[Tensor]:
        for leaf in leaves:
            leaf.grad = None
        out.square().sum().backward()
        return [leaf.grad for leaf in leaves if leaf.grad is not None]

    plain = gradients(attend(query, key, value, prior))
    again: Any = checkpoint(lambda q, k, v: attend(q, k, v, prior), query, key, value, use_reentrant=reentrant)
    for one, other in zip(gradients(again), plain, strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "backend"),
    [
        (name, backend)
        for name in VARIANTS
        for backend in ("reference", "blockwise", "lanes", "toeplitz")
        if backend != "lanes" or name in ("no prior", "lanes")
    ],
)
def test_two_runs_agree_bit_for_bit(name: str, backend: Any) -> None:
    make, options = VARIANTS[name]
    prior = make()

    def results() -> list[Tensor]:
        tensors = inputs()
        leaves = [*tensors, *(p for p in (prior.parameters() if prior else ()) if p.requires_grad)]
        out = attend(*tensors, prior, backend=backend, **options)
        return [out, *torch.autograd.grad(out.square().sum(), leaves)]

    for one, other in zip(results(), results(), strict=True):
        assert torch.equal(one, other)
