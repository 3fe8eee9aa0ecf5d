"""The machine that a measurement is made on, and its clock: versions, processor, memory, time of day, wall time."""

from __future__ import annotations

import ctypes
import platform
import time
from collections.abc import Iterable
from contextlib import nullcontext
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil
import torch
from filelock import FileLock

from attention_priors._io import read_json, write_json


def versions(packages: Iterable[str]) -> dict[str, str | None]:
    """Return the versions of Python and of packages; None for one that is not installed."""
    return {"python": platform.python_version()} | {package: _version(package) for package in packages}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def processor() -> str:
    """Return the processor's name; :func:`platform.processor` and psutil do not know it on Linux."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    name = next((line for line in lines if line.startswith("model name")), "").partition(":")[2].strip()
    return name or platform.processor() or platform.machine()


def memory_bytes() -> int:
    """Return the size of the machine's memory."""
    return psutil.virtual_memory().total


class PeakMemory:
    """Measure, as a context, the memory at its peak above the memory before.

    On the CPU: the process's resident memory, with all that its libraries keep, on Linux. On CUDA: what PyTorch
    allocates.

    Args:
        device: where the work is done.
    """

    bytes: int | None = None
    """The peak; None where it cannot be known."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before: int | None = None

    @staticmethod
    def can_measure(device: torch.device) -> bool:
        """Whether peak memory can be known: on CUDA, and on Linux."""
        return device.type == "cuda" or Path("/proc/self/clear_refs").exists()

    def __enter__(self) -> PeakMemory:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            self._before = torch.cuda.memory_allocated(self._device)
        elif self.can_measure(self._device):
            # Free memory goes back to the system, where it is not mistaken for memory in use.
            trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
            if trim is not None:
                trim(0)
            try:
                # Linux forgets the peak so far when a 5 is written here; not every container lets a process.
                Path("/proc/self/clear_refs").write_text("5")
            except OSError:
                return self
            self._before = _highest_bytes()
        return self

    def __exit__(self, *error: object) -> None:
        if self._before is None:
            return
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            self.bytes = torch.cuda.max_memory_allocated(self._device) - self._before
        else:
            self.bytes = max(0, _highest_bytes() - self._before)


def _highest_bytes() -> int:
    """Return the highest resident memory since the last reset, which neither psutil nor ``getrusage`` tell."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])


MOST_UNCOUNTED = 10.0
"""Seconds of work, at most, that a killed process leaves uncounted."""


def now() -> str:
    """Return the present time as results record it: ISO 8601, UTC, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


class WallClock:
    """Adds up the durations of all sessions of some work; a context that covers one session.

    Args:
        path: JSON file that keeps the sum between sessions; None to count this session alone.
        shared: whether several processes may write the file at the same time. The sum then counts each of their
            sessions.
    """

    def __init__(self, path: Path | None, *, shared: bool = False) -> None:
        self._path = path
        self._shared = shared
        self._sum = self._read()
        self._counted: float | None = None
        """Moment up to which the running session is in the sum; None outside of a session."""

    @property
    def seconds(self) -> float:
        """Sum of all sessions so far."""
        return self._sum if self._counted is None else self._sum + time.monotonic() - self._counted

    def tick(self) -> None:
        """Keep the sum on disk up to date; to be called often while there is progress."""
        if self._counted is not None and time.monotonic() - self._counted >= MOST_UNCOUNTED:
            self._count(self._counted)

    def forget(self) -> None:
        """Remove the file: the work is done, and its time has been written down elsewhere."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            self._path = None

    def __enter__(self) -> WallClock:
        self._counted = time.monotonic()
        return self

    def __exit__(self, *error: object) -> None:
        assert self._counted is not None
        self._count(self._counted)
        self._counted = None

    def _count(self, since: float) -> None:
        """Add the time since a moment to the sum."""
        self._counted = time.monotonic()
        if self._path is None:
            self._sum += self._counted - since
            return
        lock = FileLock(self._path.with_name(f".{self._path.name}.lock")) if self._shared else nullcontext()
        with lock:
            self._sum = (self._read() if self._shared else self._sum) + self._counted - since
            write_json(self._path, self._sum)

    def _read(self) -> float:
        return read_json(self._path) if self._path is not None and self._path.exists() else 0.0
