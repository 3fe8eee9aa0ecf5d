import pytest
from rich.console import Console

from attention_priors.lab.bench import measure


@pytest.fixture
def quiet() -> Console:
    return Console(quiet=True)


@pytest.fixture
def no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure only time, and briefly. Peak memory needs a process for each measurement."""
    monkeypatch.setattr(measure, "can_measure", lambda device: False)
    monkeypatch.setattr(measure, "SHORTEST", 1e-5)
