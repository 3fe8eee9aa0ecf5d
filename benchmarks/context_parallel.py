"""Cost of attention over a sequence that is distributed over processes, beside attention in one process.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 benchmarks/context_parallel.py --length 8192

Each process runs on the CPU and communicates by gloo. It reports its processor time, its peak memory above the memory
before, and the bytes that it sent. Processor time excludes waiting threads and other programs.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from attention_priors import GeneralizedGaussian, Laplace, ShardedSequence, SSMax, attend, attend_across, shard_index

HEADS, WIDTH = 8, 64
PRIORS = {
    "none": lambda: (None, None),
    "alibi": lambda: (Laplace(HEADS, learn=True), None),
    "ggd": lambda: (GeneralizedGaussian(HEADS, init="spread"), None),
    "ggd and ssmax": lambda: (GeneralizedGaussian(HEADS, init="spread"), SSMax(HEADS, 0.4)),
}


def peak_memory() -> float:
    """Return the peak memory of this process in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


class Bytes:
    """Replacement of ``batch_isend_irecv`` that counts the sent bytes."""

    def __init__(self) -> None:
        self.sent = 0
        self._transfer = dist.batch_isend_irecv

    def __call__(self, operations: list[dist.P2POp]) -> Any:
        """Count the sent bytes, then start the transfers."""
        self.sent += sum(o.tensor.numel() * o.tensor.element_size() for o in operations if o.op is dist.isend)
        return self._transfer(operations)


def main() -> None:
    """Measure, and print one line per process."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--length", type=int, default=8192)
    arguments.add_argument("--prior", choices=PRIORS, default="ggd")
    arguments.add_argument("--layout", choices=["zigzag", "contiguous", "whole"], default="zigzag")
    arguments.add_argument("--repetitions", type=int, default=3)
    chosen = arguments.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    prior, scale = PRIORS[chosen.prior]()

    def run(length: int) -> tuple[float, float, float]:
        """Return the processor time of the forward pass and of both passes, and the wall time of both."""
        if chosen.layout == "whole":
            sequence, here = None, length
        else:
            sequence = ShardedSequence(shard_index(length, rank, size, chosen.layout))
            here = sequence.lengths[rank]
        query, key, value = torch.randn(3, 1, HEADS, here, WIDTH).requires_grad_().unbind()
        dist.barrier()
        start, wall = time.process_time(), time.perf_counter()
        if sequence is None:
            out = attend(query, key, value, prior, logit_scale=scale)
        else:
            out = attend_across(query, key, value, prior, logit_scale=scale, sequence=sequence)
        middle = time.process_time()
        out.sum().backward()
        return middle - start, time.process_time() - start, time.perf_counter() - wall

    run(8 * size)  # warm-up: first use loads code
    before, count = peak_memory(), Bytes()
    with mock.patch.object(dist, "batch_isend_irecv", count):
        times = [run(chosen.length) for _ in range(chosen.repetitions)]
    forward, both, wall = (round(median(column), 2) for column in zip(*times, strict=True))
    report = {
        "process": rank,
        "seconds": {"forward": forward, "both": both, "wall": wall},
        "peak_mib": round(peak_memory() - before),
        "sent_mib": round(count.sent / chosen.repetitions / 2**20, 1),
    }
    every: list[Any] = [None] * size
    dist.all_gather_object(every, report)
    if rank == 0:
        print(json.dumps({"prior": chosen.prior, "layout": chosen.layout, "length": chosen.length}))
        for one in every:
            print(json.dumps(one))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
