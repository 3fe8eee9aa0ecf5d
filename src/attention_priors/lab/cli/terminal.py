"""What people write on the command line, as values; what commands show while they work, and how they end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.markup import escape

from attention_priors.lab.progress import Bars

if TYPE_CHECKING:
    from attention_priors.lab.train import Observer


class TrainingDisplay(Bars):
    """What a training shows: a bar for tokens and one for steps, and a line for every loss that is logged."""

    def __init__(self, console: Console, name: str, steps: int) -> None:
        super().__init__(console, "{task.fields[done]}")
        self._name, self._steps = name, steps

    def observer(self) -> Observer:
        """Whom a run tells how far it is."""
        from attention_priors.lab.train import Observer

        return Observer(self._message, self._tokens, self._step, self._log)

    def _message(self, message: str) -> None:
        self.console.print(escape(message), soft_wrap=True, highlight=False)

    def _tokens(self, part: str, tokens: int) -> None:
        self.show(part, f"Tokens of the part {part}", tokens, None, f"{tokens:,}")

    def _step(self, step: int) -> None:
        self.show("steps", self._name, step, self._steps, f"step {step} of {self._steps}")

    def _log(self, logs: Mapping[str, float]) -> None:
        words = {"loss": "loss", "eval_loss": "validation loss", "grad_norm": "gradient", "learning_rate": "rate"}
        found = [f"{word} {logs[key]:.4g}" for key, word in words.items() if key in logs]
        if found:
            self._message(" · ".join(found))


def written(console: Console, what: str, path: Path) -> None:
    """Say where something was written, on one line however long."""
    console.print(f"{what}: {escape(str(path))}", soft_wrap=True, highlight=False)


def quiet_transformers() -> None:
    """Its warnings and bars would tear ours apart; what goes wrong comes as an error."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


@contextmanager
def errors(*expected: type[Exception]) -> Iterator[None]:
    """End the command with one message, and without a traceback, where the cause is not in this code."""
    console = Console(stderr=True)
    try:
        yield
    except KeyboardInterrupt:
        console.print("\nInterrupted. What is done is kept; the same command goes on from here.")
        raise typer.Exit(130) from None
    except (ValueError, OSError, *expected) as error:
        _print_error(console, str(error))
        raise typer.Exit(1) from None
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        _print_error(console, f"out of memory; expected: less at a time (chunk, batch), or shorter texts. {error}")
        raise typer.Exit(1) from None


def _is_out_of_memory(error: MemoryError | RuntimeError) -> bool:
    """Whether an error says that memory does not suffice: Python's, or PyTorch's of an accelerator or the CPU."""
    # By name, as PyTorch is not imported here; of the CPU, its allocator has no class of its own.
    named = isinstance(error, MemoryError) or any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__)
    return named or "not enough memory" in str(error) or "allocate memory" in str(error)


def _print_error(console: Console, message: str) -> None:
    console.print(f"[bold red]error:[/] {escape(message)}", highlight=False, soft_wrap=True)


def head_of_layer(name: str) -> tuple[int, int]:
    """``3.0`` is the first head of the fourth layer.

    Raises:
        ValueError: it is no such name.
    """
    layer, _, head = name.partition(".")
    if not (layer.isdecimal() and head.isdecimal()):
        raise ValueError(f"heads: {name!r} is no head; expected its layer and its number, both from 0, such as 3.0")
    return int(layer), int(head)


def name_of_model(model: str) -> Path:
    """What stands for a model in a path: where every model's folder is called ``model``, what it was trained as."""
    folder = Path(model)
    if not folder.exists():
        # A repository's; a path that leads nowhere must not become one that does.
        return folder if not folder.is_absolute() and ".." not in folder.parts else Path(folder.name)
    folder = folder.resolve()
    return _name_of_run(folder.parent) if folder.name == "model" else Path(folder.name)


def _name_of_run(run: Path) -> Path:
    """A seed's after its scheme's, an extension's after that of what was extended."""
    if run.name.startswith("seed-"):
        return Path(run.parent.name, run.name)
    if run.parent.name == "extended":
        return _name_of_run(run.parent.parent) / run.name
    if run.name.startswith("extended-"):
        return _name_of_run(run.parent) / run.name
    return Path(run.name)


def seed_number(seed: str) -> int:
    """A seed.

    Raises:
        ValueError: the word is no number.
    """
    if not seed.isdecimal():
        raise ValueError(f"seeds: {seed!r} is no seed; expected numbers with commas between, such as 0,1,2")
    return int(seed)


def number_of_tokens(length: str, option: str = "lengths") -> int:
    """A number of tokens, of an option; ``64k`` is 65536, ``1m`` is 1048576.

    Raises:
        ValueError: it is none.
    """
    number, unit = (length[:-1], length[-1].lower()) if length[-1:].lower() in ("k", "m") else (length, "")
    if not number.isdecimal():
        raise ValueError(f"{option}: {length!r} is no number of tokens; expected one such as 4096, 64k or 1m")
    return int(number) * {"": 1, "k": 2**10, "m": 2**20}[unit]


def listed(*texts: str) -> list[str]:
    """What stands between commas, in all of the texts: those of an option that may be repeated."""
    return [part.strip() for text in texts for part in text.split(",") if part.strip()]
