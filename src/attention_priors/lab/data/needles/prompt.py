"""From draws to text: RULER's sentences, word for word."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from attention_priors.lab.data.needles.draws import NeedleDraws
from attention_priors.lab.data.needles.settings import NeedleSettings

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
"""One line of the haystack of kind ``"noise"``."""

_NEEDLE = "One of the special magic {kind} for {key} is: {value}."

# The one form RULER turns into the other, by replacing words.
_ONE = (
    "A special magic {kind} is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n{context}\n"
    "What is the special magic {kind} for {query} mentioned in the provided text?",
    " The special magic {kind} for {query} mentioned in the provided text is",
)
_SEVERAL = (
    "Some special magic {kind} are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n{context}\n"
    "What are all the special magic {kind} for {query} mentioned in the provided text?",
    " The special magic {kind} for {query} mentioned in the provided text are",
)


class Rendered(NamedTuple):
    """A prompt, up to and including the answer prefix, and that prefix alone."""

    prompt: str
    answer_prefix: str


def render(settings: NeedleSettings, draws: NeedleDraws, haystack: Sequence[str] = ()) -> Rendered:
    """Write the prompt for some draws.

    Args:
        settings: The task.
        draws: What is random in it.
        haystack: Sentences of the essay, or lines of noise. A haystack of needles is in the draws.
    """
    if settings.haystack == "needle":
        haystack = [_needle(settings, key, value) for key, value in draws.distractors]
    needles = [_needle(settings, draws.keys[key], draws.values[key][value]) for key, value in draws.needles]
    pieces = _between(haystack, draws.positions)
    if settings.haystack == "essay":
        # A piece may be empty; its space stands all the same, as it does in RULER.
        parts = [" ".join(pieces[0])]
        for needle, piece in zip(needles, pieces[1:], strict=True):
            parts += [needle, " ".join(piece)]
        context = " ".join(parts)
    else:
        lines = list(pieces[0])
        for needle, piece in zip(needles, pieces[1:], strict=True):
            lines += [needle, *piece]
        context = "\n".join(lines)

    keys = [draws.keys[query] for query in draws.queries]
    query = _listed(keys)
    one = settings.num_answers == 1
    question, prefix = _ONE if one else _SEVERAL
    kind = settings.value_kind.removesuffix("s") if one else settings.value_kind
    answer_prefix = prefix.format(kind=kind, query=query)
    return Rendered(question.format(kind=kind, query=query, context=context) + answer_prefix, answer_prefix)


def continuation(expected: Sequence[str]) -> str:
    """How an answer goes on after the answer prefix: the values, listed as the question lists several keys."""
    return f" {_listed(expected)}"


def _listed(items: Sequence[str]) -> str:
    return ", ".join(items[:-1]) + ", and " + items[-1] if len(items) > 1 else items[0]


def _needle(settings: NeedleSettings, key: str, value: str) -> str:
    return _NEEDLE.format(kind=settings.value_kind, key=key, value=value)


def _between(units: Sequence[str], positions: Sequence[int]) -> list[Sequence[str]]:
    """The units before the first position, between positions, and after the last."""
    cuts = [0, *positions, len(units)]
    return [units[start:end] for start, end in itertools.pairwise(cuts)]
