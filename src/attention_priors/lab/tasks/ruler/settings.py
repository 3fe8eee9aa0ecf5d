"""Interface of RULER's tasks: random generators, prompts, and settings that write prompts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from random import Random
from typing import ClassVar, Literal, NamedTuple

import numpy as np

HaystackKind = Literal["noise", "essay", "needle"]

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
"""Line of a ``"noise"`` haystack."""


class Generators(NamedTuple):
    """Generators in place of the global ones that RULER seeds."""

    python: Random
    """Generator in place of the module ``random``."""
    numpy: np.random.RandomState
    """Generator in place of ``numpy.random``."""

    @classmethod
    def seeded(cls, seed: int) -> Generators:
        """Seed both as RULER does. numpy's generator takes the last 32 bits of longer seeds."""
        return cls(Random(seed), np.random.RandomState(seed % 2**32))


class Prompt(NamedTuple):
    """Prompt with its answer."""

    text: str
    """Text, question and answer prefix, as the model reads them."""
    answer_prefix: str
    """Beginning of the answer, with a leading space."""
    expected: tuple[str, ...]
    """Strings of a right answer, in order."""
    depths: tuple[float, ...]
    """Depths in percent of the sentences that hold ``expected``, in the same order."""
    answer: str
    """Right continuation of ``text``, with a leading space."""
    more: tuple[tuple[str, str], ...] = ()
    """Further questions of a training text, which follow ``answer``, each with its answer."""
    length: int = 0
    """Tokens of ``text``, without special tokens, plus those reserved for the answer, once they are counted."""


class RulerSettings(ABC):
    """Settings of one of RULER's tasks, which write its prompts."""

    haystack: HaystackKind
    """Kind of the text in which the task hides sentences."""
    probe: ClassVar[str]
    """Text with all kinds of characters that a tokenizer must be able to write."""
    long_step: ClassVar[int]
    """Decrement of a haystack's lines from 4096 tokens on."""

    @property
    @abstractmethod
    def num_sentences(self) -> int:
        """Smallest number of lines in which the sentences can be hidden."""

    @property
    @abstractmethod
    def num_answers(self) -> int:
        """Number of strings in a right answer."""

    @property
    @abstractmethod
    def answer_tokens(self) -> int:
        """Default number of tokens reserved for the answer."""

    @property
    def example_settings(self) -> RulerSettings | None:
        """Settings of the few-shot example before the question. None for a task without example."""
        return None

    @property
    def smallest(self) -> int:
        """Smallest number of words of an essay, or of lines, with room for the sentences."""
        return 1 if self.haystack == "essay" else self.num_sentences

    def step(self, length: int) -> int:
        """Return RULER's decrement of a haystack's size, which is also its smallest size."""
        if self.haystack == "essay":
            return 500
        return max(5 if length < 4096 else self.long_step, self.num_sentences)

    @abstractmethod
    def write(
        self, units: Sequence[str], generators: Generators, *, depth: float | None = None, example: str | None = None
    ) -> Prompt:
        """Write a prompt with random choices in RULER's order, so that equal generator states give equal prompts.

        Args:
            units: Sentences of the essay, or lines of noise. A haystack of needles has as many lines.
            generators: Generators of all random choices.
            depth: Place of the only expected string, from 0 to 1. None draws the depth.
            example: Few-shot example, for tasks with `example_settings`.
        """
