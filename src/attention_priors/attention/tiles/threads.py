"""Work shared between threads that each compute alone.

PyTorch splits each operation over all cores and waits for the slowest core before the next operation. If another
process takes a core, an operation of a tenth of a millisecond takes as long as that process runs. Here, each thread
takes one piece of work after another and waits for no other thread. Each thread also has a core's cache to itself,
which is faster on an idle machine too.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from typing import TypeVar

import torch

LEAST_BUSY = 0.8
"""Smallest share of the time in which threads must have work, for pieces of equal size."""
MOST_WORKERS = 8
"""Largest number of threads, because each holds Python's lock between operations. With more cores, each thread computes
on several."""

Workspace = TypeVar("Workspace")


def share(
    pieces: Sequence[Callable[[Workspace], None]], make_workspace: Callable[[], Workspace], at_once: bool
) -> None:
    """Run all pieces, which must not write to the same numbers. Nothing is recorded for a backward pass.

    Args:
        pieces: functions of a workspace.
        make_workspace: makes the workspace of a thread, such as working memory.
        at_once: whether to run pieces at once, on one core each, if they keep the threads busy. Otherwise, they run one
            after another, on all cores.

    Raises:
        Exception: error of a piece, raised after all pieces that had begun have ended.
    """
    threads = torch.get_num_threads()
    if not (at_once and keep_busy(len(pieces), threads)):
        workspace = make_workspace()
        for piece in pieces:
            piece(workspace)
        return
    remaining, inference = deque(pieces), torch.is_inference_mode_enabled()
    workers = _workers(os.getpid(), threads)
    running = [worker.submit(_do, remaining, make_workspace, inference) for worker in workers]
    wait(running)
    for work in running:
        work.result()


def keep_busy(pieces: int, threads: int) -> bool:
    """Return whether equal pieces keep several threads busy for ``LEAST_BUSY`` of the time."""
    workers = min(threads, MOST_WORKERS)
    return workers > 1 and pieces >= LEAST_BUSY * workers * -(-pieces // workers)


def _do(
    remaining: deque[Callable[[Workspace], None]], make_workspace: Callable[[], Workspace], inference: bool
) -> None:
    """Run the remaining pieces, one at a time, together with other threads."""
    try:
        with torch.inference_mode(inference), torch.no_grad():
            workspace = make_workspace()
            while remaining:
                try:
                    piece = remaining.popleft()
                except IndexError:  # another thread was faster
                    break
                piece(workspace)
    except Exception:
        remaining.clear()
        raise


@cache
def _workers(process: int, threads: int) -> list[ThreadPoolExecutor]:
    """Return worker threads, each of which computes on its share of the cores.

    Workers belong to one ``process``, because a fork does not copy threads. Each worker is an executor of its own,
    because a queue that threads share wakes only one of them if it is filled at once.
    """
    number = min(threads, MOST_WORKERS)
    cores = threads // number
    workers = [ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(cores,)) for _ in range(number)]
    for worker in workers:
        worker.submit(torch.get_num_threads).result()  # starts the thread, and fixes its number of cores
    # A thread that sets its number of cores also sets the default of later threads, so restore the default.
    torch.set_num_threads(threads)
    return workers
