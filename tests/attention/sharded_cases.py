"""Problems whose tokens are distributed over processes, solved there and, for comparison, in one process.

``test_context_parallel.py`` runs this program. It forks four processes, so that PyTorch is imported once. Each process
solves all cases, and the first process writes all results to a file.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import start_processes

from attention_priors import (
    Fire,
    GeneralizedGaussian,
    KeySink,
    Laplace,
    Prior,
    RelativeBuckets,
    ShardedSequence,
    Spectral,
    SSMax,
    Window,
    attend,
    attend_across,
    shard_index,
)
from attention_priors.attention.distributed import ring

PROCESSES = 4
HEADS, KV_HEADS, WIDTH = 4, 2, 8


@dataclass(frozen=True)
class Case:
    make_prior: Callable[[], Prior | None]
    causal: bool = True
    length: int = 61
    batch: int = 2
    layout: str = "zigzag"
    make_scale: Callable[[], SSMax | None] = lambda: None
    documents: str = "none"
    padding: str = "none"
    shift: int = 0
    """Offset added to the positions."""
    dtype: torch.dtype = torch.float32
    tolerance: float = 0.0
    gate: float | None = None
    """Approximate share of a key that remains after each token. None for no key bias."""
    options: dict[str, Any] = field(default_factory=dict)


def _sum_of_both() -> Prior:
    return Spectral(HEADS, 3) + KeySink(HEADS, train_length=32, init="recency")


CASES = {
    "no prior": Case(lambda: None),
    "no prior, bidirectional, contiguous": Case(lambda: None, causal=False, layout="contiguous"),
    "ggd": Case(lambda: GeneralizedGaussian(HEADS, init="spread", learn=True)),
    "ggd, bidirectional": Case(lambda: GeneralizedGaussian(HEADS, init="spread", learn=True), causal=False),
    "ggd, uneven shards": Case(lambda: GeneralizedGaussian(HEADS, init="spread"), layout="uneven"),
    "ggd, shuffled runs": Case(lambda: GeneralizedGaussian(HEADS, init="spread"), layout="shuffled", documents="runs"),
    "ggd, bfloat16": Case(lambda: GeneralizedGaussian(HEADS, init="spread"), dtype=torch.bfloat16),
    "alibi": Case(lambda: Laplace(HEADS, learn=True)),
    "alibi, bidirectional, softmax scale": Case(
        lambda: Laplace(HEADS, learn=True), causal=False, options={"softmax_scale": 0.7}
    ),
    "alibi, far apart": Case(lambda: Laplace(HEADS, learn=True), length=900, batch=1, layout="contiguous"),
    "alibi, blocks": Case(lambda: Laplace(HEADS, learn=True), length=2100, batch=1, layout="contiguous"),
    "alibi, blocks, bidirectional": Case(lambda: Laplace(HEADS, learn=True), length=1100, batch=1, causal=False),
    "ggd and ssmax, blocks": Case(
        lambda: GeneralizedGaussian(HEADS, init="spread"),
        length=1100,
        batch=1,
        layout="contiguous",
        make_scale=lambda: SSMax(HEADS, 0.5),
    ),
    "pruned, blocks": Case(lambda: Laplace(HEADS), length=2100, batch=1, layout="contiguous", tolerance=1e-5),
    "alibi, padding and far apart": Case(
        lambda: Laplace(HEADS, learn=True), length=700, batch=1, layout="contiguous", padding="right"
    ),
    "forget gate": Case(lambda: None, gate=0.7),
    "forget gate beside alibi, in documents": Case(lambda: Laplace(HEADS, learn=True), gate=0.97, documents="runs"),
    "forget gate and ssmax, blocks": Case(
        lambda: Laplace(HEADS, learn=True), gate=0.9, length=1100, batch=1, make_scale=lambda: SSMax(HEADS, 0.5)
    ),
    "fire": Case(lambda: Fire(HEADS, 5, init={"c": 0.5, "threshold": 9.0})),
    "fire and ssmax in documents": Case(
        lambda: Fire(HEADS, init={"threshold": 3.0}), make_scale=lambda: SSMax(HEADS, 0.7), documents="runs"
    ),
    "null key": Case(lambda: Laplace(HEADS, learn=True), options={"null_logit": torch.linspace(-1, 2, HEADS)}),
    "t5 buckets": Case(lambda: RelativeBuckets(HEADS)),
    "t5 buckets, bidirectional": Case(lambda: RelativeBuckets(HEADS, bidirectional=True), causal=False),
    "spectral and key sink": Case(_sum_of_both),
    "spectral and key sink, far along": Case(_sum_of_both, shift=2**19),
    "spectral and key sink in documents": Case(_sum_of_both, documents="runs"),
    "window": Case(lambda: Window(HEADS, 9), layout="contiguous"),
    "window and ggd, bidirectional": Case(
        lambda: Window(HEADS, 9) + GeneralizedGaussian(HEADS, init="spread"), causal=False
    ),
    "ssmax": Case(lambda: GeneralizedGaussian(HEADS, init="spread"), make_scale=lambda: SSMax(HEADS, 0.7)),
    "ssmax beside the prior": Case(
        lambda: Laplace(HEADS, learn=True), make_scale=lambda: SSMax(HEADS, 0.7, include_prior=False)
    ),
    "ssmax, bidirectional": Case(lambda: None, make_scale=lambda: SSMax(HEADS, 0.7), causal=False),
    "ssmax, documents and padding": Case(
        lambda: RelativeBuckets(HEADS),
        make_scale=lambda: SSMax(HEADS, 0.4),
        documents="interleaved",
        padding="anywhere",
    ),
    "documents": Case(lambda: GeneralizedGaussian(HEADS, init="spread"), documents="runs"),
    "documents, contiguous shards": Case(lambda: Laplace(HEADS, learn=True), documents="runs", layout="contiguous"),
    "documents, bidirectional": Case(lambda: RelativeBuckets(HEADS), documents="runs", causal=False),
    "documents, interleaved": Case(_sum_of_both, documents="interleaved"),
    "documents, interleaved in one half": Case(
        lambda: Laplace(HEADS, learn=True), documents="interleaved in one half", layout="contiguous"
    ),
    "documents, interleaved, and a window": Case(
        lambda: Laplace(HEADS, learn=True) + Window(HEADS, 9), documents="interleaved", layout="contiguous"
    ),
    "documents, interleaved, and a window, bidirectional": Case(
        lambda: Laplace(HEADS, learn=True) + Window(HEADS, 9), documents="interleaved", causal=False
    ),
    "documents shared by the batch": Case(lambda: Laplace(HEADS, learn=True), documents="shared"),
    "padding on the left": Case(lambda: GeneralizedGaussian(HEADS, init="spread"), padding="left"),
    "padding on the right, bidirectional": Case(lambda: Laplace(HEADS, learn=True), padding="right", causal=False),
    "all padding": Case(lambda: Laplace(HEADS, learn=True), padding="all of one"),
    "pruned": Case(lambda: Laplace(HEADS, slopes=[2.0, 1.0, 0.5, 0.1]), length=700, batch=1, tolerance=1e-4),
}
DOUBLE = ("no prior", "ggd", "alibi, padding and far apart", "spectral and key sink", "ssmax, documents and padding")
"""Cases that are also solved in float64."""


@dataclass(frozen=True)
class Whole:
    """All tensors of a problem, equal in every process."""

    query: Tensor
    key: Tensor
    value: Tensor
    prior: Prior | None
    logit_scale: SSMax | None
    geometry: dict[str, Tensor | None]
    cotangents: tuple[Tensor, Tensor]
    key_bias: Tensor | None

    def given(self) -> tuple[Tensor, ...]:
        """Return queries, keys, values and, if present, the key bias."""
        inputs = (self.query, self.key, self.value)
        return inputs if self.key_bias is None else (*inputs, self.key_bias)

    def parameters(self) -> list[torch.nn.Parameter]:
        parts = [part for part in (self.prior, self.logit_scale) if part is not None]
        return [p for part in parts for p in part.parameters() if p.requires_grad]


def make_whole(case: Case) -> Whole:
    torch.manual_seed(0)
    batch, length = case.batch, case.length
    sizes = {"query": (HEADS, WIDTH), "key": (KV_HEADS, WIDTH), "value": (KV_HEADS, WIDTH - 2)}
    tensors = {name: torch.randn(batch, h, length, d, dtype=torch.float64) for name, (h, d) in sizes.items()}
    prior, scale = case.make_prior(), case.make_scale()
    for part in (prior, scale):
        for parameter in () if part is None else part.parameters():
            if parameter.requires_grad:
                parameter.data.add_(0.2 * torch.randn(parameter.shape))
            if case.dtype == torch.float64:
                parameter.data = parameter.data.double()
    ids = torch.randint(0, 3, (batch, length))
    documents = {
        "none": None,
        "runs": ids.sort(-1).values,
        "interleaved": ids,
        "interleaved in one half": torch.where(torch.arange(length) < length // 2, ids, 0),
        "shared": ids[:1],
    }[case.documents]
    slots, number = torch.arange(length), torch.tensor([[5], [17]])[:batch]
    padding = {
        "none": None,
        "left": slots < number,
        "right": slots >= length - number,
        "anywhere": torch.rand(batch, length) < 0.3,
        "all of one": torch.tensor([[True], [False]]).expand(-1, length),
    }[case.padding]
    geometry = {"document_ids": documents, "key_padding_mask": padding}
    if case.shift:
        geometry["positions"] = slots + case.shift
    cotangents = torch.randn(batch, HEADS, length, WIDTH - 2), torch.randn(batch, HEADS, length)
    given = {name: tensor.to(case.dtype) for name, tensor in tensors.items()}
    key_bias = None
    if case.gate is not None:
        gates = torch.rand(batch, HEADS, length, dtype=torch.float64) * 2 * (1 - case.gate) + 2 * case.gate - 1
        key_bias = -gates.clamp(min=1e-3).log().cumsum(-1)
    return Whole(**given, prior=prior, logit_scale=scale, geometry=geometry, cotangents=cotangents, key_bias=key_bias)


def results(whole: Whole, leaves: list[Tensor], out: Tensor, lse: Tensor, own: Tensor | None) -> dict[str, Tensor]:
    """Compute output, log-sum-exp and every gradient.

    A log-sum-exp of minus infinity has no gradient. The huge log-sum-exp of a row with a single key gets a small
    gradient, because a normal one would dominate all others.
    """
    out_grad, lse_grad = (x if own is None else x[:, :, own] for x in whole.cotangents)
    lse_grad = (lse_grad / (1 + lse.detach().abs())).masked_fill(torch.isneginf(lse), 0.0)
    parameters = whole.parameters()
    grads = torch.autograd.grad(
        [out, lse], [*leaves, *parameters], [out_grad.to(out.dtype), lse_grad.to(lse.dtype)], allow_unused=True
    )
    names = (*("query", "key", "value", "bias")[: len(leaves)], *(f"parameter {n}" for n in range(len(parameters))))
    given = (*leaves, *parameters)
    found = {n: torch.zeros_like(x) if g is None else g for n, x, g in zip(names, given, grads, strict=True)}
    return {"out": out.detach(), "lse": lse.detach(), **found}


def index_of(case: Case, rank: int, size: int) -> Tensor:
    if case.layout in ("zigzag", "contiguous"):
        return shard_index(case.length, rank, size, case.layout)  # pyright: ignore[reportArgumentType]
    if case.layout == "uneven":
        ends = [0, *(1 + 3 * r * r for r in range(1, size)), case.length]
        return torch.arange(ends[rank], ends[rank + 1])
    # Runs of five tokens, assigned in turn and out of order.
    runs = torch.arange(case.length).split(5)
    return torch.cat([run for number, run in enumerate(runs) if number * 7 % 11 % size == rank][::-1])


def solve_case(case: Case, group: Any) -> dict[str, float]:
    """Return the error of each part, relative to its largest number."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    whole = make_whole(case)
    index = index_of(case, rank, size)
    common: dict[str, Any] = {"causal": case.causal, "tolerance": case.tolerance, "return_lse": True, **case.options}
    common["logit_scale"] = whole.logit_scale
    shards = {n: None if x is None else x[..., index] for n, x in whole.geometry.items()}
    sequence = ShardedSequence(index, group=group, **shards)
    own = [x[:, :, index].requires_grad_() for x in whole.given()]
    query, key, value, *bias = own
    common["key_bias"] = bias[0] if bias else None
    out, lse = attend_across(query, key, value, whole.prior, sequence=sequence, **common)
    assert out.dtype == case.dtype
    found = results(whole, own, out, lse, index)
    for name in found:
        if name.startswith("parameter"):
            dist.all_reduce(found[name], group=group)

    positions = whole.geometry.get("positions")
    masks = {n: None if x is None else x.expand(case.batch, -1) for n, x in whole.geometry.items() if n != "positions"}
    leaves = [x.clone().requires_grad_() for x in whole.given()]
    if case.dtype == torch.bfloat16:
        leaves = [x.detach().float().requires_grad_() for x in leaves]
    query, key, value, *bias = leaves
    places: dict[str, Any] = {"query_positions": positions, "key_positions": positions, **masks, **common}
    places["key_bias"] = bias[0] if bias else None
    places["return_lse"] = True
    out, lse = attend(query, key, value, whole.prior, **places)
    expected = results(whole, leaves, out, lse, None)
    errors = {}
    for name, tensor in expected.items():
        mine = tensor if name.startswith("parameter") else tensor[:, :, index]
        blind = torch.isneginf(mine)
        assert torch.equal(torch.isneginf(found[name]), blind), f"{name}: other rows see nothing"
        error = (found[name].double() - mine.double()).masked_fill(blind, 0.0).abs().max()
        size_of = tensor.double().masked_fill(torch.isneginf(tensor), 0.0).abs().max().clamp(min=1e-3)
        errors[name] = float(error / size_of)
    return errors


# ---- skipped computation


@contextmanager
def counted_calls() -> Iterator[list[int]]:
    """Count the keys that each call of attention reads."""
    calls: list[int] = []
    solve = ring.solve

    def counting(problem: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(problem.geometry.num_keys)
        return solve(problem, *args, **kwargs)

    with mock.patch.object(ring, "solve", counting):
        yield calls


def kept_blocks() -> list[float]:
    """Return the share of another process's blocks that each head reads, for slopes 1/4, 1/16, 1/64 and 1/256."""
    case = CASES["alibi, blocks"]
    whole, shares = make_whole(case), []
    index = index_of(case, dist.get_rank(), dist.get_world_size())
    own = [x[:, :, index] for x in (whole.query, whole.key, whole.value)]
    solve = ring.solve

    def looking(problem: Any, *args: Any, **kwargs: Any) -> Any:
        if problem.kept is not None:
            shares.append(problem.kept.double().mean((0, 2, 3)).tolist())
        return solve(problem, *args, **kwargs)

    with mock.patch.object(ring, "solve", looking), torch.no_grad():
        attend_across(own[0], own[1], own[2], whole.prior, sequence=ShardedSequence(index))
    return shares[0] if shares else []


def skipping() -> dict[str, Any]:
    rank, size = dist.get_rank(), dist.get_world_size()
    length = 80

    def sequence_of(layout: Any, **options: Any) -> ShardedSequence:
        index = shard_index(length, rank, size, layout)
        return ShardedSequence(index, **{n: x[:, index] for n, x in options.items()})

    own_documents = (torch.arange(length) // 20).unsqueeze(0)
    hops = {
        "causal": sequence_of("contiguous").plan(True, None).hops,
        "bidirectional": sequence_of("contiguous").plan(False, None).hops,
        "zigzag": sequence_of("zigzag").plan(True, None).hops,
        "window": sequence_of("contiguous").plan(True, (-15, 15)).hops,
        "window, bidirectional": sequence_of("contiguous").plan(False, (-15, 15)).hops,
        "a document for each process": sequence_of("contiguous", document_ids=own_documents).plan(True, None).hops,
        "padding": sequence_of("contiguous", key_padding_mask=own_documents < 2).plan(True, None).hops,
    }
    steep = Laplace(1, slopes=[8.0])
    torch.manual_seed(rank)
    query, key, value = torch.randn(3, 1, 1, 20, 4)
    calls = {}
    for name, prior in (("steep", steep), ("window", Window(1, 16)), ("flat", Laplace(1, slopes=[0.1]))):
        with counted_calls() as counted, torch.no_grad():
            attend_across(query, key, value, prior, sequence=sequence_of("contiguous"))
        calls[name] = len(counted)
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, calls)
    return {"hops": hops, "calls": everyone, "kept": kept_blocks()}


# ---- errors


def refusals() -> dict[str, list[str]]:
    """Return the error message of every process, for each mistake."""
    rank, size = dist.get_rank(), dist.get_world_size()
    index = shard_index(24, rank, size)
    good = ShardedSequence(index)
    query = torch.randn(1, 2, 6, 4)

    def across(given: Tensor = query, **options: Any) -> Any:
        return attend_across(given, given, given, sequence=good, **options)

    last = rank == size - 1
    mistakes: dict[str, Callable[[], Any]] = {
        "a place twice": lambda: ShardedSequence(index.clamp(max=22)),
        "one has no tokens": lambda: ShardedSequence(index[:0] if last else index),
        "documents missing in one": lambda: ShardedSequence(index, document_ids=None if last else index.unsqueeze(0)),
        "documents of a wrong shape": lambda: ShardedSequence(index, document_ids=index[None, : 5 if last else 6]),
        "batches of two sizes": lambda: ShardedSequence(index, document_ids=index.expand(2 if last else 1, -1)),
        "positions with gaps": lambda: ShardedSequence(index, positions=index * 2),
        "another head_dim in one": lambda: across(query[..., : 3 if last else 4]),
        "another batch in one": lambda: across(query.expand(2 if last else 1, -1, -1, -1)),
        "another dtype in one": lambda: across(query.double() if last else query),
        "causal in one": lambda: across(causal=last),
        "a prior in one": lambda: across(prior=Laplace(2) if last else None),
        "a gradient in one": lambda: across(query.clone().requires_grad_(last)),
        "a wrong number of heads in one": lambda: across(prior=Laplace(3 if last else 2)),
        "a shard too short": lambda: across(query[:, :, : 5 if last else 6]),
        "a wrong tolerance in one": lambda: across(tolerance=2.0 if last else 0.0),
    }
    said = {}
    for name, mistake in mistakes.items():
        try:
            mistake()
            message = "nothing"
        except ValueError as error:
            message = str(error)
        every: list[Any] = [None] * size
        dist.all_gather_object(every, message)
        said[name] = every
    return said


def silence(group: Any) -> dict[str, Any]:
    """Return the error message when the last process does not call."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    sequence = ShardedSequence(shard_index(24, rank, size), group=group)
    query = torch.randn(1, 2, 6, 4, requires_grad=True)
    said = []
    out = attend_across(query, query, query, sequence=sequence)
    start = time.monotonic()
    for call in (lambda: out.sum().backward(), lambda: attend_across(query, query, query, sequence=sequence)):
        try:
            said.append(str(call()) if rank < size - 1 else "")
        except RuntimeError as error:
            said.append(str(error))
    return {"said": said, "seconds": time.monotonic() - start}


def determinism(group: Any) -> bool:
    case = CASES["ssmax, documents and padding"]
    runs = []
    for _ in range(2):
        whole = make_whole(case)
        index = index_of(case, dist.get_rank(group), dist.get_world_size(group))
        shards = {n: None if x is None else x[..., index] for n, x in whole.geometry.items()}
        own = [x[:, :, index].requires_grad_() for x in (whole.query, whole.key, whole.value)]
        sequence = ShardedSequence(index, group=group, **shards)
        options: dict[str, Any] = {"logit_scale": whole.logit_scale, "return_lse": True}
        query, key, value = own
        out, lse = attend_across(query, key, value, whole.prior, sequence=sequence, **options)
        runs.append(results(whole, own, out, lse, index))
    return all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])


def agreement() -> list[str]:
    """Return the backends that each process chooses if the kernels of one process are wrong."""
    rank, size, asked = dist.get_rank(), dist.get_world_size(), []
    solve, planned = ring.solve, ring.make_plan

    def recording(problem: Any, backend: str, **kwargs: Any) -> Any:
        asked.append(backend)
        return solve(problem, "auto", **kwargs)

    def planning(*args: Any, **kwargs: Any) -> Any:
        plan = planned(*args, **kwargs)
        return plan if rank == 1 else plan._replace(engine="triton")

    query = torch.randn(1, 1, 4, 8)
    with mock.patch.object(ring, "solve", recording), mock.patch.object(ring, "make_plan", planning), torch.no_grad():
        attend_across(query, query, query, Laplace(1), sequence=ShardedSequence(shard_index(4 * size, rank, size)))
    return asked


def main(rank: int, target: Path, names: dict[str, list[str]]) -> None:
    meeting = f"file://{target.with_suffix('.group')}"
    dist.init_process_group("gloo", meeting, timeout=timedelta(seconds=120), world_size=PROCESSES, rank=rank)
    pair = dist.new_group([0, 1])
    last_two = dist.new_group([2, 3])
    hasty = dist.new_group(timeout=timedelta(seconds=2))
    groups = {"4": None, "2": pair if rank < 2 else last_two}
    every: dict[str, Any] = {}
    for size, group in groups.items():
        for name in names[size]:
            every[f"{name} / {size}"] = solve_case(CASES[name], group)
        for name in DOUBLE if size == "4" else ():
            double = Case(**{**CASES[name].__dict__, "dtype": torch.float64})
            every[f"{name}, float64 / {size}"] = solve_case(double, group)
    found: dict[str, Any] = {"errors": every, "skipping": skipping(), "refusals": refusals(), "same": determinism(None)}
    found |= {"silence": silence(hasty), "agreement": agreement()}
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, found)
    if rank == 0:
        target.write_text(json.dumps(gathered))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    # Import once what PyTorch imports in the first call, before the processes are forked.
    import torch._dynamo

    x = torch.zeros(1, HEADS, 2, WIDTH, requires_grad=True)
    attend(x, x, x).sum().backward()
    start_processes(main, (Path(sys.argv[1]), json.loads(sys.argv[2])), PROCESSES, start_method="fork")
