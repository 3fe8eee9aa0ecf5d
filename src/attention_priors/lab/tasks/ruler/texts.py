"""RULER's prompts with their answers, for training."""

from __future__ import annotations

import math
from random import Random
from statistics import mean
from typing import TYPE_CHECKING

import torch

from attention_priors.lab.data.packing import RetrievalText
from attention_priors.lab.data.tokenizer import TextEncoder
from attention_priors.lab.tasks.ruler.haystack import Haystack, RegexSplitter, SentenceSplitter
from attention_priors.lab.tasks.ruler.settings import NOISE, Generators, Prompt, RulerSettings
from attention_priors.lab.tasks.ruler.task import MOST_REDRAWS, RULER_SEED, checked_task, write_example

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PROBES = 64
"""Number of texts made at first to find the shortest length."""
_PROBED_UNITS = 20
_FULL = 64
"""Divisor of a text's length that gives the largest acceptable number of missing tokens."""
_MOST_GUESSES = 6
"""Largest number of haystack sizes tried for one text."""


class RulerTexts:
    """Generator of training texts for one of RULER's tasks.

    A text is a prompt of :class:`RulerTask`, the answer, and an end-of-text token. The answer begins with a space. It
    lists several values in the way the question lists several keys, and variables with spaces between them, as RULER's
    example does. Further questions and restatements of needle settings follow, each with its answer and an end-of-text
    token. Training texts differ from test prompts:

    - **Length**. The length is that of the whole text; no tokens are reserved for other answers.
    - **Haystack**. The haystack is as large as the length allows for each text, instead of one size for all texts.
    - **Essay**. An essay begins at any word of the haystack, not at the first.

    Args:
        tokenizer: Tokenizer with an end-of-text token.
        task: Key of `RULER_TASKS`, or custom settings.
        haystack: Text of an essay task, different from the test text. Other tasks ignore it.
        split_sentences: see :class:`RulerTask`.
        name: Name in messages. That of ``task`` by default, or ``"custom"``.

    Raises:
        ValueError: ``task`` is not a known name, or an essay task has no ``haystack``. Or ``tokenizer`` has no
            end-of-text token, merges an answer with the words before it, or cannot fit the few-shot example into 500
            tokens.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        task: str | RulerSettings,
        haystack: Haystack | None = None,
        *,
        split_sentences: SentenceSplitter | None = None,
        name: str | None = None,
    ) -> None:
        self.settings = checked_task(task, haystack)
        self.name = name or (task if isinstance(task, str) else "custom")
        if not isinstance(tokenizer.eos_token_id, int):
            raise ValueError(f"tokenizer {tokenizer.name_or_path!r} has no eos_token: expected one to end each text")
        self._end = tokenizer.eos_token_id
        self._tokenizer_name = tokenizer.name_or_path
        self._encode = TextEncoder(tokenizer)
        self._words = haystack if self.settings.haystack == "essay" else None
        self._split_sentences: SentenceSplitter = split_sentences or RegexSplitter()
        self._example = write_example(self.settings, self._encode, Generators.seeded(RULER_SEED))
        rng = Random(0)
        probes = [(rng.randrange(2**62), rng.randrange(self._places)) for _ in range(_PROBES)]
        # Build complete texts, so that an unsuitable tokenizer raises an error here.
        shortest = [self.text(self.settings.smallest, *probe).tokens.numel() for probe in probes]
        self._longest_probe = max(shortest)
        self._typical = mean(shortest)
        larger = mean(self._count(self.settings.smallest + _PROBED_UNITS, *probe) for probe in probes)
        self._rate = max((larger - self._typical) / _PROBED_UNITS, 1.0)
        """Average number of tokens of a word or a line."""

    @property
    def shortest_text(self) -> int:
        """Number of tokens that suffices for most texts with answers; longer draws are repeated."""
        return self._longest_probe

    def draw_text(self, length: int, generator: torch.Generator) -> RetrievalText:
        """Draw a text.

        Args:
            length: Largest number of tokens of the text, including its answer and the end-of-text token.
            generator: Generator of a seed and the start in the essay. Both are redrawn if even the smallest haystack
                does not fit.

        Raises:
            ValueError: ``length`` is below `shortest_text`, or no text of this length is found.
        """
        if length < self.shortest_text:
            raise ValueError(f"length must be at least shortest_text, {self.shortest_text} tokens; it is {length}")
        for _ in range(MOST_REDRAWS):
            seed = int(torch.randint(2**62, (), generator=generator))
            start = int(torch.randint(self._places, (), generator=generator))
            size = self._largest_that_fits(length, seed, start)
            if size is not None:
                return self.text(size, seed, start)
        raise ValueError(
            f"length {length} is too short: {MOST_REDRAWS} {self.name} texts with the smallest haystack were all longer"
        )

    def text(self, size: int, seed: int, start: int = 0) -> RetrievalText:
        """Return the text for a haystack size and seed.

        Args:
            size: Words of the essay, or lines of another haystack.
            seed: Seed of RULER's draws.
            start: Index of the haystack word at which an essay begins.
        """
        prompt = self._prompt(size, seed, start)
        tokens, answers = [], []
        for question, answer in ((prompt.text, prompt.answer), *prompt.more):
            asked, whole = self._encode(question), self._encode(question + answer)
            if whole[: len(asked)] != asked:
                raise ValueError(
                    f"tokenizer {self._tokenizer_name!r} joins an answer to the words before it: expected separate "
                    f"tokens for {answer!r} after {prompt.answer_prefix!r}"
                )
            start = len(tokens) + len(asked)
            tokens += [*whole, self._end]
            answers.append((start, len(tokens)))
        return RetrievalText(torch.tensor(tokens), tuple(answers))

    @property
    def _places(self) -> int:
        """Number of possible starts of an essay."""
        return 1 if self._words is None else len(self._words.words)

    def _prompt(self, size: int, seed: int, start: int) -> Prompt:
        if self._words is not None:
            units = self._split_sentences(self._words.words_from(start, size).strip())
        else:
            units = [NOISE] * size
        return self.settings.write(units, Generators.seeded(seed), example=self._example)

    def _largest_that_fits(self, length: int, seed: int, start: int) -> int | None:
        """Return nearly the largest haystack size that fits, or None if the smallest does not fit.

        The number of tokens grows almost linearly with the size. A few corrected guesses therefore leave little room
        unused.
        """
        best, lower, upper = None, self.settings.smallest, length
        rate = self._rate
        size = lower + int((length - self._typical) / rate)
        for _ in range(_MOST_GUESSES):
            size = min(max(size, lower), upper)
            spare = length - self._count(size, seed, start)
            if spare >= 0:
                best, lower = size, size + 1
            else:
                upper = size - 1
            if lower > upper or 0 <= spare < max(rate, length / _FULL):
                return best
            if size > self.settings.smallest:
                # The words of this essay may be longer or shorter than average.
                rate = max((length - spare - self._typical) / (size - self.settings.smallest), 1.0)
            size += math.floor(spare / rate)
        return best

    def _count(self, size: int, seed: int, start: int) -> int:
        prompt = self._prompt(size, seed, start)
        asked = ((prompt.text, prompt.answer), *prompt.more)
        return sum(len(self._encode(question + answer)) + 1 for question, answer in asked)
