"""Command line ``attention-priors``."""

from __future__ import annotations

import io
import sys

from attention_priors.lab.process import set_up_process

try:
    from attention_priors.lab.cli.commands import app
except ModuleNotFoundError as error:  # the lab's dependencies are an extra
    if error.name not in ("typer", "rich"):
        raise
    sys.exit(f"attention-priors: {error.name} is not installed; in a clone, run: pip install '.[lab]'")

__all__ = ["app", "main"]


def main() -> None:
    """Run the command line."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Output that the terminal cannot encode, such as a minus sign, must not fail a finished command.
            stream.reconfigure(errors="backslashreplace")
    set_up_process()
    app()
