import pytest
from rich.console import Console

from attention_priors.lab.bench import memory


@pytest.fixture
def quiet() -> Console:
    return Console(quiet=True)


@pytest.fixture
def no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peak memory takes a process for each measurement; most tests do not need it."""
    monkeypatch.setattr(memory, "can_measure", lambda device: False)
