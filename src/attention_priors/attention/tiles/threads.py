"""Work shared between threads that each compute alone.

PyTorch splits one operation over all cores and waits for the slowest of them before the next one. Where another process
takes a core, an operation of a tenth of a millisecond then takes as long as that process runs. Threads that each take
a piece of work, and then the next one, wait for nobody, and have a core's own memory to themselves, which is faster on
a quiet machine too.
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
"""The share of the threads' time, at least, that they are to have work, if all pieces are equal."""
MOST_WORKERS = 8
"""Threads at most: each holds Python's lock between operations. Each of them computes on as many cores as there are
for it."""

Workspace = TypeVar("Workspace")
Work = Callable[[], None]


def share(
    pieces: Sequence[Callable[[Workspace], None]], make_workspace: Callable[[], Workspace], at_once: bool
) -> None:
    """Do all pieces; they must not write to the same numbers. Nothing is recorded for a backward pass.

    Args:
        pieces: what is done.
        make_workspace: makes what a thread needs for itself, such as memory to work in; each piece is given that.
        at_once: whether to do them at once, on a core each, where they keep the threads busy, rather than one after
            another, on all cores.

    Raises:
        Exception: what a piece raised, once all that had begun have ended.
    """
    threads = torch.get_num_threads()
    if not (at_once and keep_busy(len(pieces), threads)):
        workspace = make_workspace()
        for piece in pieces:
            piece(workspace)
        return
    done: SimpleQueue[Exception | None] = SimpleQueue()
    remaining = deque(pieces)
    # Not one queue for all: a SimpleQueue that is filled at once wakes only one of those who wait for it.
    inboxes = _workers(os.getpid(), threads)
    for inbox in inboxes:
        inbox.put(partial(_do, remaining, make_workspace, torch.is_inference_mode_enabled(), done))
    for error in [done.get() for _ in inboxes]:
        if error is not None:
            raise error


def keep_busy(pieces: int, threads: int) -> bool:
    """Return whether so many equal pieces keep threads busy: more than one, and for ``LEAST_BUSY`` of the time."""
    workers = min(threads, MOST_WORKERS)
    return workers > 1 and pieces >= LEAST_BUSY * workers * -(-pieces // workers)


def _do(
    remaining: deque[Callable[[Workspace], None]],
    make_workspace: Callable[[], Workspace],
    inference: bool,
    done: SimpleQueue[Exception | None],
) -> None:
    """Do what remains, piece by piece, as others do too."""
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
