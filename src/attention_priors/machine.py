"""What a measurement was made on."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


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
