"""What a measurement was made on."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType

import torch


def versions(packages: Iterable[str]) -> dict[str, str | None]:
    """Of Python and of packages; None for one that is not installed."""
    return {"python": platform.python_version()} | {package: _version(package) for package in packages}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def processor() -> str:
    """The processor's name, as the system gives it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def memory_bytes() -> int | None:
    """The machine's memory; None where the system does not say (it does on Linux)."""
    info = Path("/proc/meminfo")
    if not info.exists():
        return None
    line = next(line for line in info.read_text(encoding="utf-8").splitlines() if line.startswith("MemTotal"))
    return int(line.split()[1]) * 1024


class PeakMemory:
    """Measures, as a context, how much memory is taken at the peak, above what was taken before.

    On the CPU: the process's resident memory, with all that its libraries keep, on Linux. On CUDA: what PyTorch
    allocates.

    Args:
        device: where the work is done.
    """

    bytes: int | None = None
    """What was found; None where it cannot be known."""

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
            # What was left free before goes back to the system, where it is not mistaken for memory in use.
            trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
            if trim is not None:
                trim(0)
            try:
                # Linux forgets the peak so far when a 5 is written here; not every container lets a process.
                Path("/proc/self/clear_refs").write_text("5")
            except OSError:
                return self
            self._before = _highest_kibibytes() * 1024
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is None:
            return
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            self.bytes = torch.cuda.max_memory_allocated(self._device) - self._before
        else:
            self.bytes = max(0, _highest_kibibytes() * 1024 - self._before)


def _highest_kibibytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1])
