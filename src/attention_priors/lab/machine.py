"""Description of the machine (versions, processor, memory, devices), and measurement of memory and time."""

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
    """Return the versions of Python and of packages; None for a package that is not installed."""
    return {"python": platform.python_version()} | {package: _version(package) for package in packages}


def _version(package: str) -> str | None:
    if package == "torch":
        return str(torch.__version__)  # with the build, such as +cu130, which the metadata of PyPI's wheels lack
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def processor() -> str:
    """Return the name of the processor, which :func:`platform.processor` and psutil do not return on Linux."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    name = next((line for line in lines if line.startswith("model name")), "").partition(":")[2].strip()
    return name or platform.processor() or platform.machine()


def memory_bytes() -> int:
    """Return the size of the machine's memory in bytes."""
    return psutil.virtual_memory().total


def device_named(name: str | None) -> torch.device:
    """Return the device with this name; by default CUDA if available, else the CPU.

    Raises:
        ValueError: The name is not a device, or the device is not available.
    """
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be cpu, cuda or cuda:N; got {name!r}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device is {name!r}, but PyTorch finds {torch.cuda.device_count()} CUDA devices")
    return device


class PeakMemory:
    """Context that measures peak memory above the memory at its start.

    On CUDA, this is the memory that PyTorch allocates. On the CPU, this is the resident memory of the process,
    including memory that its libraries keep; only Linux supports it.

    Args:
        device: Device of the work.
    """

    bytes: int | None = None
    """Peak in bytes; None if it cannot be measured."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before: int | None = None

    @staticmethod
    def can_measure(device: torch.device) -> bool:
        """Return whether peak memory can be measured: on CUDA, and on Linux."""
        return device.type == "cuda" or Path("/proc/self/clear_refs").exists()

    def __enter__(self) -> PeakMemory:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            self._before = torch.cuda.memory_allocated(self._device)
        elif self.can_measure(self._device):
            # Return freed memory to the system, so that it does not count as memory in use.
            trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
            if trim is not None:
                trim(0)
            try:
                # Writing 5 resets the peak on Linux. Some containers forbid it.
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
    """Return the peak resident memory since the last reset, which neither psutil nor ``getrusage`` reports."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])


MOST_UNCOUNTED = 10.0
"""Largest number of seconds that the clock loses when its process is killed."""


def now() -> str:
    """Return the current time in the format of results: ISO 8601, UTC, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


class WallClock:
    """Clock that adds up the durations of all sessions of a task. Use it as the context of a session.

    Args:
        path: JSON file that keeps the sum between sessions; None to count only this session.
        shared: Whether several processes may write the file at once. The sum then includes the sessions of all
            processes.
    """

    def __init__(self, path: Path | None, *, shared: bool = False) -> None:
        self._path = path
        self._shared = shared
        self._sum = self._read()
        self._counted: float | None = None
        """Time up to which the sum includes the running session; None outside of a session."""

    @property
    def seconds(self) -> float:
        """Total duration of all sessions so far, in seconds."""
        return self._sum if self._counted is None else self._sum + time.monotonic() - self._counted

    def tick(self) -> None:
        """Update the sum on disk at most every :data:`MOST_UNCOUNTED` seconds. Call this method often."""
        if self._counted is not None and time.monotonic() - self._counted >= MOST_UNCOUNTED:
            self._count(self._counted)

    def forget(self) -> None:
        """Remove the file, once the work is done and its time is recorded elsewhere."""
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
        """Add the time since ``since`` to the sum."""
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
