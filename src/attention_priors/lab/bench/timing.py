"""Repeated, interleaved timing: every repetition runs every way once, in an order of its own."""

from __future__ import annotations

import gc
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from attention_priors.lab.bench.case import Case
from attention_priors.lab.bench.way import CannotRunError, Prepared

SHORTEST = 0.02
"""Seconds that a measurement lasts at least: as many passes in a row as that takes."""
MOST_CALLS = 200
ROWS_CHECKED = 16
"""Rows of the output compared with the reference: so many at the start, in the middle and at the end."""
LARGEST_ERROR = 0.05
"""Beyond this difference, relative to the largest output, a way computes something else and is not timed."""


@dataclass
class Runner:
    """One way in one case, warmed up and checked."""

    case: Case
    prepared: Prepared
    calls: int = 1
    """Passes per measurement."""
    error: float = math.nan
    """Largest difference from the reference, relative to the largest output."""
    _gradient: Tensor | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.case.backward:
            # A given gradient: that of a sum is a single number, expanded, which some code takes a slow path for.
            generator = torch.Generator().manual_seed(self.case.seed + 1)
            gradient = torch.randn(self.prepared.shape, generator=generator)
            self._gradient = gradient.to(self.case.device, self.case.dtype)

    def warm_up(self, *, compiled: bool = False) -> None:
        """Run until nothing is made for the first time, check the output, and choose the number of calls.

        Args:
            compiled: whether the first run compiles, so that its time says nothing.

        Raises:
            CannotRunError: if the output is not what it should be.
        """
        with torch.set_grad_enabled(self.case.backward):
            out = self.prepared.run()
        self.error = error_of(self.case, self.prepared, out.detach())
        del out
        if not self.error <= LARGEST_ERROR:
            raise CannotRunError(f"computes something else: its outputs are off by {self.error:.2g} of the largest")
        seconds = self.measure()
        if compiled or seconds < 50 * SHORTEST:
            # The first backward pass loads and compiles too.
            seconds = self.measure()
        self.calls = min(MOST_CALLS, max(1, math.ceil(SHORTEST / seconds)))

    def one_pass(self) -> None:
        """What is timed."""
        if not self.case.backward:
            with torch.no_grad():
                self.prepared.run()
            return
        out = self.prepared.run()
        torch.autograd.grad(out, self.prepared.leaves, self._gradient)

    def measure(self) -> float:
        """Seconds per pass, the mean of :attr:`calls` in a row."""
        if self.case.device.startswith("cuda"):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start.record()
            for _ in range(self.calls):
                self.one_pass()
            end.record()
            torch.cuda.synchronize()
            return start.elapsed_time(end) / 1000 / self.calls
        started = time.perf_counter()
        for _ in range(self.calls):
            self.one_pass()
        return (time.perf_counter() - started) / self.calls


def error_of(case: Case, prepared: Prepared, out: Tensor) -> float:
    """Largest difference of some rows from the reference, relative to the largest output among them."""
    count = min(ROWS_CHECKED, case.num_queries)
    middle = (case.num_queries - count) // 2
    # Heads that lie side by side are taken apart.
    heads_first = out if out.dim() == 4 else out.unflatten(-1, (case.heads, -1)).transpose(1, 2)
    worst = 0.0
    for start in {0, middle, case.num_queries - count}:
        some = slice(start, start + count)
        expected = prepared.expected(some)
        found = heads_first[:, :, some].double()
        difference = float((found - expected).abs().max() / expected.abs().max())
        worst = max(worst, difference) if not math.isnan(difference) else math.inf
    return worst


def repetitions(
    measures: Mapping[str, Callable[[], float]], first: int, count: int, seed: int
) -> Iterator[dict[str, float]]:
    """Measure every way once per repetition.

    The order is drawn anew each time, so that no way always runs in the wake of the same other.

    Args:
        measures: what measures each way once, in seconds.
        first: the number of the first repetition; the order depends on it.
        count: the number after the last one.
        seed: of the order.

    Yields:
        Seconds of each way, in the order of the repetition.
    """
    for number in range(first, count):
        names = list(measures)
        random.Random(f"{seed}-{number}").shuffle(names)
        # A collection in the middle would be counted as one way's time.
        gc.disable()
        try:
            seconds = {name: measures[name]() for name in names}
        finally:
            gc.enable()
        yield seconds
