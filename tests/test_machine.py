from pathlib import Path

import pytest
import torch

from attention_priors.machine import PeakMemory

CPU = torch.device("cpu")
MIB = 2**20

pytestmark = pytest.mark.skipif(not PeakMemory.can_measure(CPU), reason="only Linux tells")


def test_peak_memory_is_what_was_allocated_at_once():
    with PeakMemory(CPU) as memory:
        for _ in range(3):
            torch.ones(64 * MIB // 4)  # one after another
    assert memory.bytes is not None
    assert 60 * MIB <= memory.bytes <= 80 * MIB
    with PeakMemory(CPU) as memory:
        kept = [torch.ones(64 * MIB // 4) for _ in range(3)]
    assert memory.bytes is not None
    assert 188 * MIB <= memory.bytes <= 220 * MIB
    with PeakMemory(CPU) as memory:
        del kept
    assert memory.bytes is not None
    assert memory.bytes <= 8 * MIB


def test_peak_memory_is_unknown_where_the_system_does_not_let_it_be_measured(monkeypatch: pytest.MonkeyPatch):
    def refuse(path: Path, text: str) -> int:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "write_text", refuse)
    with PeakMemory(CPU) as memory:
        torch.ones(MIB)
    assert memory.bytes is None
