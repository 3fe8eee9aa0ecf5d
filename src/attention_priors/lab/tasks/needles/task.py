"""Needle prompts of a length, the score of an answer, and the task of an evaluation that asks for needles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import TYPE_CHECKING, Any

import torch

from attention_priors.checks import check_choice, check_positive_integers
from attention_priors.lab.data.tokenizer import TextEncoder, check_writes
from attention_priors.lab.tasks.needles.haystack import Haystack, RegexSplitter, SentenceSplitter
from attention_priors.lab.tasks.needles.prompts import (
    NEEDLE_TASKS,
    NOISE,
    NeedleDraws,
    NeedleSettings,
    Rendered,
    at_depth,
    draw,
    render,
)
from attention_priors.lab.tasks.retrieval import Question, Retrieval
from attention_priors.lab.tasks.task import Setting

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# RULER's default seed, with which its generator starts to look for the size of the haystack.
_SIZE_SEED = 42
# RULER draws without end when a text that it cannot shorten is too long.
MOST_REDRAWS = 1000


@dataclass(frozen=True)
class NeedleSample:
    """One prompt and what its answer must hold.

    Attributes:
        prompt: What the model reads: the text, the question, and the answer prefix.
        answer_prefix: The end of ``prompt`` that begins the answer, its leading space included.
        expected: The values asked for, in the order of the question.
        depths: For each of them, the depth of its needle in the haystack, in percent.
        length: Tokens of ``prompt``, without special tokens, and those left free for the answer. At most the length
            asked for.
    """

    prompt: str
    answer_prefix: str
    expected: tuple[str, ...]
    depths: tuple[float, ...]
    length: int


class NeedleTask:
    """One of RULER's needle-in-a-haystack tasks, for a tokenizer.

    Prompts are those of RULER (Hsieh et al., 2024; NVIDIA/RULER, ``scripts/data/synthetic/niah.py``), character for
    character: `draw` reads a generator in RULER's order and `render` writes what RULER writes. The size of the
    haystack, in words of an essay or lines of another kind, is the one that RULER's own search finds with its default
    seed, 42. A sample is the prompt that RULER makes at that size once its generator is seeded with ``seed``; RULER
    makes a file of samples from one seed, one after another, so files are not the same.

    RULER's search stops at the largest haystack that fitted with the draws of the search; with other draws a prompt
    may be a few tokens too long. As in RULER it is then drawn again with a haystack that is 500 words (25 lines, or 5
    below 4096 tokens) shorter. Its smallest haystack is just as large, and for a length that has no room for it RULER
    never returns. Here the search goes on below it, to one word or one line for each needle.

    The tasks ``ruler`` of lm-evaluation-harness write the same prompts from the same draws, but

    - the haystack kind is named ``repeat`` in place of ``noise``;
    - the haystack grows in steps of 500 words or 5 or 25 lines until prompt and answers, without the answer prefix but
      with special tokens, exceed the length;
    - an essay is not repeated: prompts end with it;
    - a sample's length leaves out the answer prefix and counts special tokens;
    - samples that do not fit are shortened down to nothing, then left out;
    - the generator is seeded by the caller.

    Args:
        tokenizer: Counts the tokens.
        task: The name of one of `NEEDLE_TASKS`, or settings of one's own.
        haystack: The text of an essay task. The other tasks do not read it.
        tokens_to_generate: Tokens of each length that are left free for the answer.
        split_sentences: Finds the places in an essay where a needle may stand. RULER takes NLTK's punkt, which needs
            a download (`PunktSplitter`); the default needs none.

    Raises:
        ValueError: ``task`` is not a known name, an essay task has no ``haystack``, ``tokens_to_generate`` is below
            1, or ``tokenizer`` cannot write the question and its answers.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        task: str | NeedleSettings,
        haystack: Haystack | None = None,
        *,
        tokens_to_generate: int = 128,
        split_sentences: SentenceSplitter | None = None,
    ) -> None:
        self.settings = checked_task(task, haystack)
        check_positive_integers(tokens_to_generate=tokens_to_generate)
        check_writes(tokenizer, "What is the special magic number for quick-fox? 1234567890")
        self.haystack = haystack if self.settings.haystack == "essay" else None
        self.tokens_to_generate = tokens_to_generate
        self.split_sentences: SentenceSplitter = split_sentences or RegexSplitter()
        self._encode = TextEncoder(tokenizer)
        self._sizes: dict[int, int] = {}
        # Samples of one length share a size or two; the search does not come back to any.
        self._cached_units = lru_cache(maxsize=4)(self._units)

    def haystack_size(self, length: int) -> int:
        """Words of the essay, or lines of another haystack, that prompts of a length have.

        Found once for each length, by some twenty prompts of about this length; then remembered.

        Args:
            length: As for `sample`.

        Raises:
            ValueError: not even the smallest haystack fits.
        """
        check_positive_integers(length=length)
        if length <= self.tokens_to_generate:
            raise ValueError(f"length must be above tokens_to_generate, {self.tokens_to_generate}; it is {length}")
        if length not in self._sizes:
            self._sizes[length] = self._find_size(length)
        return self._sizes[length]

    def sample(self, length: int, seed: int, depth: float | None = None) -> NeedleSample:
        """Make one prompt, a function of the task, its tokenizer and text, and these arguments alone.

        Args:
            length: Tokens of the prompt, without special tokens, and of ``tokens_to_generate`` together, at most.
            seed: Seeds everything that is drawn, at least 0.
            depth: Where the needle that is asked for stands: 0 before the whole haystack, 1 after it. ``None`` draws
                the depth as RULER does. All else is drawn alike, and the other needles stay where they are; but where
                the move decides whether a prompt fits, it decides whether it is drawn again.

        Raises:
            ValueError: ``length`` has no room for the task, ``seed`` is below 0, ``depth`` is outside [0, 1], or it is
                given for a task that asks for several needles.
        """
        if not isinstance(seed, int) or seed < 0:
            raise ValueError(f"seed must be an integer of at least 0; it is {seed!r}")
        if depth is not None:
            if not 0 <= depth <= 1:
                raise ValueError(f"depth must be from 0 to 1, or None; it is {depth}")
            if self.settings.num_answers > 1:
                raise ValueError(
                    f"depth must be None for a task that asks for {self.settings.num_answers} needles; it is {depth}"
                )
        size = self.haystack_size(length)
        step = self._step(length)
        rng = Random(seed)
        redraws = 0
        while True:
            units = self._cached_units(size)
            draws, rendered = self._prompt(size, units, rng, depth)
            used = len(self._encode(rendered.prompt)) + self.tokens_to_generate
            if used <= length:
                return NeedleSample(
                    prompt=rendered.prompt,
                    answer_prefix=rendered.answer_prefix,
                    expected=draws.expected,
                    depths=draws.expected_depths,
                    length=used,
                )
            if size - step >= self._smallest:
                size -= step
            elif redraws == MOST_REDRAWS:
                raise ValueError(
                    f"length {length} is too short: {redraws} prompts of seed {seed} with the haystack that fitted "
                    f"once were all longer, the last with {used} tokens"
                )
            else:
                redraws += 1

    @property
    def _smallest(self) -> int:
        """Words or lines of a haystack that has room for the needles."""
        return 1 if self.settings.haystack == "essay" else self.settings.num_needles

    def _step(self, length: int) -> int:
        """By how much RULER shortens a haystack, and its smallest one."""
        if self.settings.haystack == "essay":
            return 500
        return max(5 if length < 4096 else 25, self.settings.num_needles)

    def _find_size(self, length: int) -> int:
        step, rng = self._step(length), Random(_SIZE_SEED)

        def count(size: int) -> int:
            return len(self._encode(self._prompt(size, self._units(size), rng, None)[1].prompt))

        def largest_that_fits(lower: int, upper: int) -> int | None:
            best = None
            while lower <= upper:
                middle = (lower + upper) // 2
                if count(middle) + self.tokens_to_generate <= length:
                    best, lower = middle, middle + 1
                else:
                    upper = middle - 1
            return best

        tokens_per_unit = count(step) / step
        size = largest_that_fits(step, max(int((length / tokens_per_unit) * 3), step * 2))
        if size is None:
            size = largest_that_fits(self._smallest, step - 1)
            if size is None:
                raise ValueError(
                    f"length {length} is too short: with the smallest haystack the prompt has {count(self._smallest)} "
                    f"tokens, and {self.tokens_to_generate} are kept for the answer"
                )
        return size

    def _units(self, size: int) -> Sequence[str]:
        if self.settings.haystack == "noise":
            return [NOISE] * size
        if self.haystack is None:  # its lines are drawn
            return ()
        return self.split_sentences(self.haystack.first(size).strip())

    def _prompt(
        self, size: int, units: Sequence[str], rng: Random, depth: float | None
    ) -> tuple[NeedleDraws, Rendered]:
        count = len(units) if self.settings.haystack == "essay" else size
        draws = draw(self.settings, count, rng)
        if depth is not None:
            draws = at_depth(draws, count, depth)
        return draws, render(self.settings, draws, units)


def checked_task(task: str | NeedleSettings, haystack: Haystack | None) -> NeedleSettings:
    """The settings of a task, given by name or as they are.

    Raises:
        ValueError: ``task`` is not a known name, or an essay task has no ``haystack``.
    """
    if isinstance(task, str):
        check_choice("task", task, tuple(NEEDLE_TASKS))
        task = NEEDLE_TASKS[task]
    if task.haystack == "essay" and haystack is None:
        raise ValueError("haystack must be given for a task whose haystack is an essay; it is None")
    return task


def match_all(output: str, expected: Sequence[str]) -> float:
    """Share of the expected strings that an output holds, in any case of letters: RULER's ``string_match_all``.

    RULER first strips the output and turns control characters into line ends; of these tasks, no expected string is
    found or lost by that.

    Args:
        output: What the model wrote.
        expected: What it should hold.

    Raises:
        ValueError: ``expected`` is empty.
    """
    if not expected:
        raise ValueError("expected must hold at least one string; it is empty")
    output = output.lower()
    return sum(string.lower() in output for string in expected) / len(expected)


class NeedleRetrieval(Retrieval):
    """Find needles (:class:`NeedleTask`). The score is the share of the expected strings in the answer.

    A length counts the prompt and the tokens that are left free for the answer, as in RULER, and prompts of one length
    may be some tokens shorter.
    """

    has_depth = False

    def __init__(self, name: str, setting: Setting) -> None:
        super().__init__(name, setting)
        self._beginning = self.subject.beginning()
        essay = NEEDLE_TASKS[name].haystack == "essay"
        haystack, splitter = (self.texts.haystack, self.texts.splitter) if essay else (None, None)
        self._task = NeedleTask(self.subject.tokenizer, name, haystack, split_sentences=splitter)

    def text_identity(self) -> dict[str, Any]:
        """Return all that determines the prompts."""
        text = self._task.haystack
        found: dict[str, Any] = {"answer_tokens": self._task.tokens_to_generate}
        if text is not None:
            splitter = self._task.split_sentences.name
            found |= {"haystack": text.name, "haystack_fingerprint": text.fingerprint, "splitter": splitter}
        return found

    def check_length(self, length: int) -> None:
        """Raise a ValueError if not even the smallest haystack fits."""
        try:
            self._task.haystack_size(length - len(self._beginning))
        except ValueError as error:
            raise ValueError(f"lengths: for the task {self.name!r}, {error}") from error

    def question(self, length: int, depth: float | None, seed: int) -> Question:
        """Make a prompt; RULER draws the depth."""
        sample = self._task.sample(length - len(self._beginning), seed, depth)
        tokens = self.subject.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
        prompt = torch.cat([self._beginning, torch.tensor(tokens)])
        place = sample.depths[0] / 100 if len(sample.depths) == 1 else None
        return Question(prompt, sample.expected, self._task.tokens_to_generate, depth=place)

    def score(self, output: str, expected: Sequence[str]) -> float:
        """Return RULER's string match."""
        return match_all(output, expected)
