"""The command line, ``attention-priors``."""

from __future__ import annotations

import io
import sys

try:
    from attention_priors.lab.cli.commands import app
except ModuleNotFoundError as error:  # the laboratory is an extra
    if error.name not in ("typer", "rich"):
        raise
    sys.exit(f"attention-priors: {error.name} is missing; the command needs: pip install 'attention-priors[lab]'")

__all__ = ["app", "main"]


def main() -> None:
    """Run the command line."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Results are on the disk when they are shown; that a terminal has no minus sign is no error.
            stream.reconfigure(errors="backslashreplace")
    app()
