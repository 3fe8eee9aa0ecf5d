"""Time and memory of ``attend()`` against plain causal attention without a prior, side by side in one run.

    python benchmarks/attend_speed.py --length 4096 --heads 8 --head-dim 64

Every repetition runs all of the ways once, in turn, so that a noisy moment of the machine hits all of them;
medians are reported, and ratios to plain ``scaled_dot_product_attention(is_causal=True)``. Peak memory is that
of a fresh process that runs one way once, above what the process held before (Linux only).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attention_priors import GeneralizedGaussian, SSMax, attend

Way = Callable[[Tensor, Tensor, Tensor, GeneralizedGaussian], Tensor]


def plain(query: Tensor, key: Tensor, value: Tensor, prior: GeneralizedGaussian) -> Tensor:
    """Causal attention without a prior: the limit."""
    return scaled_dot_product_attention(query, key, value, is_causal=True)


def attend_with_prior(query: Tensor, key: Tensor, value: Tensor, prior: GeneralizedGaussian) -> Tensor:
    """This library."""
    return attend(query, key, value, prior)


def attend_scaled(query: Tensor, key: Tensor, value: Tensor, prior: GeneralizedGaussian) -> Tensor:
    """This library, with SSMax over content and prior."""
    return attend(query, key, value, prior, logit_scale=SSMax(prior.num_heads, init=0.2))


def dense_bias(query: Tensor, key: Tensor, value: Tensor, prior: GeneralizedGaussian) -> Tensor:
    """What published implementations do: an L x L bias per head, then attention with it."""
    positions = torch.arange(query.shape[2])
    bias = prior.log_prior(positions, positions)
    future = positions > positions.unsqueeze(-1)
    return scaled_dot_product_attention(query, key, value, attn_mask=bias.masked_fill(future, float("-inf"))[None])


WAYS: dict[str, Way] = {
    "plain SDPA, no prior": plain,
    "attend, GGD": attend_with_prior,
    "attend, GGD + SSMax": attend_scaled,
    "SDPA, dense GGD bias": dense_bias,
}


def make_inputs(length: int, heads: int, head_dim: int) -> tuple[list[Tensor], GeneralizedGaussian]:
    """Random queries, keys and values, and a learned prior."""
    torch.manual_seed(0)
    tensors = [torch.randn(1, heads, length, head_dim, requires_grad=True) for _ in range(3)]
    return tensors, GeneralizedGaussian(heads, init="spread")


def run_once(way: Way, inputs: list[Tensor], prior: GeneralizedGaussian, *, backward: bool) -> float:
    """Seconds of one pass."""
    started = time.perf_counter()
    with torch.set_grad_enabled(backward):
        query, key, value = inputs
        out = way(query, key, value, prior)
        if backward:
            out.sum().backward()
    elapsed = time.perf_counter() - started
    for tensor in (*inputs, *prior.parameters()):
        tensor.grad = None
    return elapsed


def peak_mebibytes(name: str, length: int, heads: int, head_dim: int, threads: int) -> float:
    """Peak memory of forward and backward in a process of its own, above its memory before."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return pool.apply(_measure_peak, (name, length, heads, head_dim, threads))


def _measure_peak(name: str, length: int, heads: int, head_dim: int, threads: int) -> float:
    torch.set_num_threads(threads)
    # A small pass first, so that libraries that load on first use are not counted.
    run_once(WAYS[name], *make_inputs(64, heads, head_dim), backward=True)
    inputs, prior = make_inputs(length, heads, head_dim)
    # Linux forgets the peak so far when a 5 is written here.
    Path("/proc/self/clear_refs").write_text("5")
    before = _peak_kibibytes()
    run_once(WAYS[name], inputs, prior, backward=True)
    return (_peak_kibibytes() - before) / 1024


def _peak_kibibytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=4096, help="tokens")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--only", nargs="*", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--json", help="write the figures to this file too")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    inputs, prior = make_inputs(options.length, options.heads, options.head_dim)
    seconds: dict[tuple[str, bool], list[float]] = {}
    for repetition in range(options.repetitions + 1):
        for name in options.only:
            for backward in (False, True):
                elapsed = run_once(WAYS[name], inputs, prior, backward=backward)
                if repetition:  # the first one warms up
                    seconds.setdefault((name, backward), []).append(elapsed)
    rows = []
    for name in options.only:
        forward, both = (statistics.median(seconds[name, backward]) for backward in (False, True))
        peak = peak_mebibytes(name, options.length, options.heads, options.head_dim, options.threads)
        rows.append({"way": name, "forward_ms": 1e3 * forward, "forward_backward_ms": 1e3 * both, "peak_MiB": peak})
    baseline = rows[0]
    print(
        f"L = {options.length}, H = {options.heads}, D = {options.head_dim}, float32, {options.threads} threads, "
        f"torch {torch.__version__}, {platform.machine()}, medians of {options.repetitions}"
    )
    print(f"{'':24}{'forward':>12}{'':>8}{'fwd + bwd':>12}{'':>8}{'peak memory':>14}")
    for row in rows:
        ratios = [row[key] / baseline[key] for key in ("forward_ms", "forward_backward_ms")]
        print(
            f"{row['way']:24}{row['forward_ms']:>9.1f} ms{ratios[0]:>7.2f}x{row['forward_backward_ms']:>9.1f} ms"
            f"{ratios[1]:>7.2f}x{row['peak_MiB']:>10.0f} MiB"
        )
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"options": vars(options), "torch": torch.__version__, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
