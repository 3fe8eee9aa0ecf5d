"""Errors in one short line, as tables show them."""

from __future__ import annotations

from attention_priors.lab.bench.way import CannotRunError

PACKAGES = {"x_transformers": "x-transformers", "goat": "goat-attention", "transformers": "transformers"}
"""What is installed, by what is imported."""
COMPILERS_WORDS = "Developer debug context: raised exception "
"""Before what torch.compile reports of an error in the code that it compiles."""
LONGEST = 200


def in_short(error: BaseException) -> str:
    """What went wrong: the first line that says something, not more than 200 characters."""
    if isinstance(error, ModuleNotFoundError) and error.name in PACKAGES:
        return f"{PACKAGES[error.name]} is not installed"
    hidden = str(error).partition(COMPILERS_WORDS)[2]
    if hidden:
        return _cut(hidden.splitlines()[0])
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first = lines[0] if lines else "no message"
    text = first if isinstance(error, CannotRunError) else f"{type(error).__name__}: {first}"
    return _cut(text)


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"
