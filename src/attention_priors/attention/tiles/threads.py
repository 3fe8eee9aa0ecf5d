"""Work shared between threads that each compute alone.

PyTorch splits each operation over all cores and waits for the slowest core before the next operation. If another
process takes a core, an operation of a tenth of a millisecond takes as long as that process runs. Here, each thread
takes one piece of work after another and waits for no other thread. Each thread also has a core's cache to itself,
which is faster on an idle machine too.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache, partial
from queue import SimpleQueue
from typing import TypeVar

import torch

LEAST_BUSY = 0.8
"""Smallest share of the time in which threads must have work, for pieces of equal size."""
MOST_WORKERS = 8
"""Largest number of threads, because each holds Python's lock between operations. With more cores, each thread computes
on several."""

Workspace = TypeVar("Workspace")
Work = Callable[[], None]


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
    done: SimpleQueue[Exception | None] = SimpleQueue()
    remaining = deque(pieces)
    # One queue per thread: a shared SimpleQueue that is filled at once wakes only one of the waiting threads.
    inboxes = _workers(os.getpid(), threads)
    for inbox in inboxes:
        inbox.put(partial(_do, remaining, make_workspace, torch.is_inference_mode_enabled(), done))
    for error in [done.get() for _ in inboxes]:
        if error is not None:
            raise error


def keep_busy(pieces: int, threads: int) -> bool:
    """Return whether equal pieces keep several threads busy for ``LEAST_BUSY`` of the time."""
    workers = min(threads, MOST_WORKERS)
    return workers > 1 and pieces >= LEAST_BUSY * workers * -(-pieces // workers)


def _do(
    remaining: deque[Callable[[Workspace], None]],
    make_workspace: Callable[[], Workspace],
    inference: bool,
    done: SimpleQueue[Exception | None],
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
    except Exception as error:  # raised again by the caller
        remaining.clear()
        done.put(error)
    else:
        done.put(None)


@cache
def _workers(process: int, threads: int) -> list[SimpleQueue[Work]]:
    """Return the inboxes of worker threads, which run the functions in them.

    Workers belong to one ``process``, because a fork does not copy threads.
    """
    inboxes: list[SimpleQueue[Work]] = [SimpleQueue() for _ in range(min(threads, MOST_WORKERS))]
    ready = threading.Barrier(len(inboxes) + 1)
    for inbox in inboxes:
        threading.Thread(target=_work, args=(inbox, threads // len(inboxes), ready), daemon=True).start()
    ready.wait()
    # A thread that sets its number of cores also sets the default of later threads, so restore the default.
    torch.set_num_threads(threads)
    return inboxes


def _work(inbox: SimpleQueue[Work], threads: int, ready: threading.Barrier) -> None:
    torch.set_num_threads(threads)
    torch.get_num_threads()  # fixes the number for this thread
    ready.wait()
    while True:
        inbox.get()()
