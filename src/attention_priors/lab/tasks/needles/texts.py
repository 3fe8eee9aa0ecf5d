"""Needle texts to train on: RULER's prompts, each with its answer."""

from __future__ import annotations

import math
from random import Random
from statistics import mean
from typing import TYPE_CHECKING

import torch

from attention_priors.lab.data.packing import RetrievalText
from attention_priors.lab.data.tokenizer import TextEncoder
from attention_priors.lab.tasks.needles.haystack import Haystack, RegexSplitter, SentenceSplitter
from attention_priors.lab.tasks.needles.prompts import NOISE, NeedleSettings, Rendered, continuation, draw, render
from attention_priors.lab.tasks.needles.task import MOST_REDRAWS, checked_task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PROBES = 64
"""Texts that are made once, to know how long the shortest are."""
_PROBED_UNITS = 20
_FULL = 64
"""A text is long enough when at most one part in this many is missing."""
_MOST_GUESSES = 6
"""Sizes of the haystack that are tried for one text."""


class NeedleTexts:
    """Makes texts of one of RULER's needle tasks to train on.

    A text is a prompt as :class:`NeedleTask` writes it, the answer, and an end-of-text token. The answer begins with a
    space; several values are listed as the question lists several keys. What differs from a prompt that a model is
    tested with:

    - the length is the text's, and leaves no room for other answers;
    - the haystack is made as large as the length allows for the draws at hand, in place of one size for all draws;
    - an essay begins at any word of the haystack, in place of its first.

    Args:
        tokenizer: One with an end-of-text token.
        task: The name of one of `NEEDLE_TASKS`, or settings of one's own.
        haystack: The text of an essay task: one that the model is not tested with. The other tasks do not read it.
        split_sentences: As for :class:`NeedleTask`.

    Raises:
        ValueError: ``task`` is not a known name, an essay task has no ``haystack``, or ``tokenizer`` has no end-of-text
            token or joins an answer to the words before it.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        task: str | NeedleSettings,
        haystack: Haystack | None = None,
        *,
        split_sentences: SentenceSplitter | None = None,
    ) -> None:
        self.settings = checked_task(task, haystack)
        self.name = task if isinstance(task, str) else "needle"
        if not isinstance(tokenizer.eos_token_id, int):
            raise ValueError(f"tokenizer {tokenizer.name_or_path!r} has no eos_token: expected one to end each text")
        self._end = tokenizer.eos_token_id
        self._tokenizer_name = tokenizer.name_or_path
        self._encode = TextEncoder(tokenizer)
        self._words = haystack if self.settings.haystack == "essay" else None
        self._split_sentences: SentenceSplitter = split_sentences or RegexSplitter()
        self._smallest = 1 if self._words is not None else self.settings.num_needles
        rng = Random(0)
        probes = [(rng.randrange(2**62), rng.randrange(self._places)) for _ in range(_PROBES)]
        # These are made whole, so that a tokenizer that cannot serve is found now.
        shortest = [self.text(self._smallest, *probe).tokens.numel() for probe in probes]
        self._longest_probe = max(shortest)
        self._typical = mean(shortest)
        larger = mean(self._count(self._smallest + _PROBED_UNITS, *probe) for probe in probes)
        self._rate = max((larger - self._typical) / _PROBED_UNITS, 1.0)
        """Tokens of a word or a line, on average."""

    @property
    def shortest_text(self) -> int:
        """Tokens that have room for a text and its answer; keys of very many tokens need more, and are drawn again."""
        return self._longest_probe

    def draw_text(self, length: int, generator: torch.Generator) -> RetrievalText:
        """Draw a text.

        Args:
            length: Tokens of the text at most, its answer and the end-of-text token included.
            generator: Draws a seed and the place in the essay; both again, should not even the smallest haystack fit.

        Raises:
            ValueError: ``length`` is below `shortest_text`, or the haystack has no places where a text of this length
                fits.
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
        """The text for a haystack of a size and some draws.

        Args:
            size: Words of the essay, or lines of another haystack.
            seed: Seeds RULER's draws.
            start: The word of the haystack with which an essay begins.
        """
        rendered, answer = self._rendered(size, seed, start)
        prompt, whole = self._encode(rendered.prompt), self._encode(rendered.prompt + answer)
        if whole[: len(prompt)] != prompt:
            raise ValueError(
                f"tokenizer {self._tokenizer_name!r} joins an answer to the words before it: expected tokens of its "
                f"own for {answer!r} after {rendered.answer_prefix!r}"
            )
        return RetrievalText(tokens=torch.tensor([*whole, self._end]), answer_start=len(prompt))

    @property
    def _places(self) -> int:
        """Where an essay may begin."""
        return 1 if self._words is None else len(self._words.words)

    def _rendered(self, size: int, seed: int, start: int) -> tuple[Rendered, str]:
        if self._words is not None:
            units = self._split_sentences(self._words.words_from(start, size).strip())
        else:
            units = [NOISE] * size
        draws = draw(self.settings, len(units), Random(seed))
        return render(self.settings, draws, units), continuation(draws.expected)

    def _largest_that_fits(self, length: int, seed: int, start: int) -> int | None:
        """Nearly the largest haystack that fits; None if the smallest does not.

        A text's tokens grow nearly evenly with its haystack, so that a guess, corrected by what its text has, soon
        leaves no room for another unit. A few guesses must do: what is missing after them is little.
        """
        best, lower, upper = None, self._smallest, length
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
            if size > self._smallest:
                # This essay's own words may be longer or shorter than most.
                rate = max((length - spare - self._typical) / (size - self._smallest), 1.0)
            size += math.floor(spare / rate)
        return best

    def _count(self, size: int, seed: int, start: int) -> int:
        rendered, answer = self._rendered(size, seed, start)
        return len(self._encode(rendered.prompt + answer)) + 1
