"""Parsing of option values, progress displays and error messages of the commands."""

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
    """Progress display of a training run: bars for tokens and steps, and a line for each logged loss."""

    def __init__(self, console: Console, name: str, steps: int) -> None:
        super().__init__(console, "{task.fields[done]}")
        self._name, self._steps = name, steps

    def observer(self) -> Observer:
        """Return the progress callbacks that update this display."""
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
    """Print the path of a written file or folder, on one line."""
    console.print(f"{what}: {escape(str(path))}", soft_wrap=True, highlight=False)


def quiet_transformers() -> None:
    """Silence the warnings and progress bars of transformers, which would break up the displays of commands."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


@contextmanager
def errors(*expected: type[Exception]) -> Iterator[None]:
    """End the command with one message and no traceback if an error of the user or the machine occurs.

    Interrupts, ``ValueError``, ``OSError``, out-of-memory errors and ``expected`` count as such errors.
    """
    console = Console(stderr=True)
    try:
        yield
    except KeyboardInterrupt:
        console.print("\nInterrupted. Finished work is kept; run the same command to resume.")
        raise typer.Exit(130) from None
    except (ValueError, OSError, *expected) as error:
        _print_error(console, str(error))
        raise typer.Exit(1) from None
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        _print_error(console, f"out of memory; use a smaller chunk or batch, or shorter texts. {error}")
        raise typer.Exit(1) from None


def _is_out_of_memory(error: MemoryError | RuntimeError) -> bool:
    """Return whether an error is an out-of-memory error of Python, or of PyTorch on an accelerator or the CPU."""
    # PyTorch is not imported here, so its class is compared by name. Its CPU allocator has no error class.
    named = isinstance(error, MemoryError) or any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__)
    return named or "not enough memory" in str(error) or "allocate memory" in str(error)


def _print_error(console: Console, message: str) -> None:
    console.print(f"[bold red]error:[/] {escape(message)}", highlight=False, soft_wrap=True)


def head_of_layer(name: str) -> tuple[int, int]:
    """Parse a head's name into its layer and its number, both from 0: ``3.0`` is ``(3, 0)``.

    Raises:
        ValueError: The name has another form.
    """
    layer, _, head = name.partition(".")
    if not (layer.isdecimal() and head.isdecimal()):
        raise ValueError(f"heads: {name!r} is not a head; expected LAYER.HEAD, both counted from 0, such as 3.0")
    return int(layer), int(head)


def name_of_model(model: str) -> Path:
    """Return a relative path that identifies a model; for a folder called ``model``, the name of its training run."""
    folder = Path(model)
    if not folder.exists():
        # The name of a repository. A nonexistent path must not lead outside of the output folder.
        return folder if not folder.is_absolute() and ".." not in folder.parts else Path(folder.name)
    folder = folder.resolve()
    return _name_of_run(folder.parent) if folder.name == "model" else Path(folder.name)


def _name_of_run(run: Path) -> Path:
    """Return the name of a run, after its scheme if it is a seed, or after the extended run if it is an extension."""
    if run.name.startswith("seed-"):
        return Path(run.parent.name, run.name)
    if run.parent.name == "extended":
        return _name_of_run(run.parent.parent) / run.name
    if run.name.startswith("extended-"):
        return _name_of_run(run.parent) / run.name
    return Path(run.name)


def seed_number(seed: str) -> int:
    """Parse a seed.

    Raises:
        ValueError: The word is not a number.
    """
    if not seed.isdecimal():
        raise ValueError(f"seeds: {seed!r} is not a seed; expected comma-separated numbers, such as 0,1,2")
    return int(seed)


def number_of_tokens(length: str, option: str = "lengths") -> int:
    """Parse the number of tokens of an option; ``64k`` is 65536, ``1m`` is 1048576.

    Raises:
        ValueError: The word has another form.
    """
    number, unit = (length[:-1], length[-1].lower()) if length[-1:].lower() in ("k", "m") else (length, "")
    if not number.isdecimal():
        raise ValueError(f"{option}: {length!r} is not a number of tokens; expected a number such as 4096, 64k or 1m")
    return int(number) * {"": 1, "k": 2**10, "m": 2**20}[unit]


def listed(*texts: str) -> list[str]:
    """Split the comma-separated values of an option that may be repeated."""
    return [part.strip() for text in texts for part in text.split(",") if part.strip()]
