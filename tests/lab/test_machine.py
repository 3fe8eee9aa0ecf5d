import subprocess
import sys
from pathlib import Path

import pytest
import torch

from attention_priors.lab.machine import PeakMemory

CPU = torch.device("cpu")
MIB = 2**20

pytestmark = pytest.mark.skipif(not PeakMemory.can_measure(CPU), reason="only Linux tells")


# A separate process, because resident memory belongs to the whole process. A used allocator may reuse its own memory.
ALLOCATE = """
import torch
from attention_priors.lab.machine import PeakMemory
CPU, COUNT = torch.device("cpu"), 64 * 2**20 // 4
torch.ones(COUNT)
with PeakMemory(CPU) as one_by_one:
    for _ in range(3):
        torch.ones(COUNT)
with PeakMemory(CPU) as at_once:
    kept = [torch.ones(COUNT) for _ in range(3)]
with PeakMemory(CPU) as freed:
    del kept
print(one_by_one.bytes, at_once.bytes, freed.bytes)
"""


def test_peak_memory_is_the_largest_simultaneous_allocation():
    run = subprocess.run([sys.executable, "-c", ALLOCATE], capture_output=True, text=True, check=True)
    one_by_one, at_once, freed = map(int, run.stdout.split())
    assert 60 * MIB <= one_by_one <= 80 * MIB
    assert 188 * MIB <= at_once <= 220 * MIB
    assert freed <= 8 * MIB


def test_peak_memory_is_none_if_the_system_does_not_measure_it(monkeypatch: pytest.MonkeyPatch):
    def refuse(path: Path, text: str) -> int:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "write_text", refuse)
    with PeakMemory(CPU) as memory:
        torch.ones(MIB)
    assert memory.bytes is None
