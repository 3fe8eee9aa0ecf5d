"""Work shared between threads that each compute alone.

PyTorch splits one operation over all cores and waits for the slowest of them before the next one. Where another process
takes a core, an operation of a tenth of a millisecond then takes as long as that process runs. Threads that each take
a piece of work, and then the next one, wait for nobody, and have a core's own memory to themselves.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache, partial
from queue import SimpleQueue
from typing import TypeVar

import torch

LONG_ENOUGH = 0.02
"""Seconds from which on it shows how much of the cores was used."""
MOST_WHEN_CROWDED = 0.85
"""The share of the cores, at most, that this process gets when others take some."""
MOST_WORKERS = 8
"""Threads at most: each holds Python's lock between operations. Each of them computes on as many cores as there are
for it."""

Workspace = TypeVar("Workspace")
Work = Callable[[], None]

_crowded = False


def is_crowded() -> bool:
    """Whether this process got less of the cores, when work was last shared, than it has threads for."""
    return _crowded


def share(
    pieces: Sequence[Callable[[Workspace], None]], make_workspace: Callable[[], Workspace], at_once: bool
) -> None:
    """Do all pieces; they must not write to the same numbers. Nothing is recorded for a backward pass.

    Args:
        pieces: what is done.
        make_workspace: makes what a thread needs for itself, such as memory to work in; each piece is given that.
        at_once: whether to do them at once, on a core each, rather than one after another, on all cores.

    Raises:
        Exception: what a piece raised, once all that had begun have ended.
    """
    global _crowded
    threads = torch.get_num_threads()
    if not at_once or threads == 1 or len(pieces) == 1:
        wall, used = time.perf_counter(), time.process_time()
        workspace = make_workspace()
        for piece in pieces:
            piece(workspace)
        wall, used = time.perf_counter() - wall, time.process_time() - used
        if threads > 1 and wall > LONG_ENOUGH:
            _crowded = used < MOST_WHEN_CROWDED * threads * wall
        return
    done: SimpleQueue[float | Exception] = SimpleQueue()
    remaining = deque(pieces)
    # Not one queue for all: a SimpleQueue that is filled at once wakes only one of those who wait for it.
    inboxes = _workers(os.getpid(), threads)[: len(pieces)]
    for inbox in inboxes:
        inbox.put(partial(_do, remaining, make_workspace, torch.is_inference_mode_enabled(), done))
    used = 0.0
    for result in [done.get() for _ in inboxes]:
        if isinstance(result, Exception):
            raise result
        used += result
    _crowded = used < MOST_WHEN_CROWDED * len(inboxes)


def _do(
    remaining: deque[Callable[[Workspace], None]],
    make_workspace: Callable[[], Workspace],
    inference: bool,
    done: SimpleQueue[float | Exception],
) -> None:
    """Do what remains, piece by piece, as others do too; tell how much of a core this thread got."""
    wall, used = time.perf_counter(), time.thread_time()
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
        done.put((time.thread_time() - used) / (time.perf_counter() - wall))


@cache
def _workers(process: int, threads: int) -> list[SimpleQueue[Work]]:
    """The inboxes of threads that do what is put into them: of this process (no thread is forked with another)."""
    inboxes: list[SimpleQueue[Work]] = [SimpleQueue() for _ in range(min(threads, MOST_WORKERS))]
    ready = threading.Barrier(len(inboxes) + 1)
    for inbox in inboxes:
        threading.Thread(target=_work, args=(inbox, threads // len(inboxes), ready), daemon=True).start()
    ready.wait()
    # A thread's own number is also that of threads which begin later: give these the number they would have had.
    torch.set_num_threads(threads)
    return inboxes


def _work(inbox: SimpleQueue[Work], threads: int, ready: threading.Barrier) -> None:
    torch.set_num_threads(threads)
    torch.get_num_threads()  # from now on it is this thread's
    ready.wait()
    while True:
        inbox.get()()
