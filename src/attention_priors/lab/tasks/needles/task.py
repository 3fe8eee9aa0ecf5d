"""Needle prompts of a given length, the score of an answer, and the evaluation task."""

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

# RULER's default seed, used for the search of the haystack size.
_SIZE_SEED = 42
# RULER redraws forever if a text is too long and cannot be shortened.
MOST_REDRAWS = 1000


@dataclass(frozen=True)
class NeedleSample:
    """Prompt with its expected answer.

    Attributes:
        prompt: Text, question and answer prefix, as the model reads them.
        answer_prefix: End of ``prompt`` that begins the answer. Includes the leading space.
        expected: Values that the question asks for. Ordered like the question.
        depths: Depth of each value's needle in the haystack, in percent.
        length: Tokens of ``prompt``, without special tokens, plus those reserved for the answer. At most the requested
            length.
    """

    prompt: str
    answer_prefix: str
    expected: tuple[str, ...]
    depths: tuple[float, ...]
    length: int


class NeedleTask:
    """One of RULER's needle-in-a-haystack tasks, for a tokenizer.

    Prompts equal those of RULER (Hsieh et al., 2024; NVIDIA/RULER, ``scripts/data/synthetic/niah.py``) character for
    character. `draw` uses a generator in RULER's order, and `render` writes RULER's text. RULER's own search, with its
    default seed 42, finds the size of the haystack: words of an essay, or lines of another kind. A sample is RULER's
    prompt of this size after seeding the generator with ``seed``. RULER draws a file of samples from one seed in
    sequence, so its files differ.

    RULER's search stops at the largest haystack that fits with the draws of the search. With other draws, a prompt may
    be a few tokens too long. As in RULER, it is then redrawn with a haystack that is 500 words (25 lines, or 5 below
    4096 tokens) shorter. RULER's smallest haystack has this size too, and RULER never returns for a length that cannot
    hold it. This class searches on, down to one word, or one line for each needle.

    The ``ruler`` tasks of lm-evaluation-harness write the same prompts from the same draws, with these differences:

    - **Kind**. This ``noise`` is called ``repeat``.
    - **Size**. The haystack grows in steps of 500 words or 5 or 25 lines until prompt and answers exceed the length.
      This sum excludes the answer prefix and includes special tokens.
    - **Essay**. An essay is not repeated: prompts end with it.
    - **Length**. A sample's length excludes the answer prefix and includes special tokens.
    - **Overflow**. Samples that do not fit are shortened down to nothing, then left out.
    - **Seed**. The caller seeds the generator.

    Args:
        tokenizer: Tokenizer that counts the tokens.
        task: Key of `NEEDLE_TASKS`, or custom settings.
        haystack: Text of an essay task. Other tasks ignore it.
        tokens_to_generate: Tokens of each length that are reserved for the answer.
        split_sentences: Splitter that finds places for needles in an essay. RULER uses NLTK's punkt, which needs a
            download (`PunktSplitter`); the default needs none.

    Raises:
        ValueError: ``task`` is not a known name, an essay task has no ``haystack``, ``tokens_to_generate`` is below 1,
            or ``tokenizer`` cannot encode the question and its answers.
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
        # Samples of one length use one or two sizes; the search uses each size once.
        self._cached_units = lru_cache(maxsize=4)(self._units)

    def haystack_size(self, length: int) -> int:
        """Return the size of the haystack for prompts of a length: words of the essay, or lines of another haystack.

        The first call for a length builds about twenty prompts of about this length; the result is cached.

        Args:
            length: see `sample`.

        Raises:
            ValueError: even the smallest haystack does not fit.
        """
        check_positive_integers(length=length)
        if length <= self.tokens_to_generate:
            raise ValueError(f"length must be above tokens_to_generate, {self.tokens_to_generate}; it is {length}")
        if length not in self._sizes:
            self._sizes[length] = self._find_size(length)
        return self._sizes[length]

    def sample(self, length: int, seed: int, depth: float | None = None) -> NeedleSample:
        """Make one prompt, which depends only on the task, its tokenizer and text, and these arguments.

        Args:
            length: Upper limit for the tokens of the prompt, without special tokens, plus ``tokens_to_generate``.
            seed: Seed of all draws, at least 0.
            depth: Place of the queried needle, from 0 (before the haystack) to 1 (after it). ``None`` draws the depth
                as RULER does. All other draws and needles stay the same, unless the move makes a prompt fit or not fit
                and so changes whether it is redrawn.

        Raises:
            ValueError: ``length`` has no room for the task, ``seed`` is below 0, ``depth`` is outside [0, 1], or
                ``depth`` is given for a task with several queried needles.
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
                    f"length {length} is too short: {redraws} prompts of seed {seed} were all longer, the last "
                    f"with {used} tokens"
                )
            else:
                redraws += 1

    @property
    def _smallest(self) -> int:
        """Smallest number of words or lines with room for the needles."""
        return 1 if self.settings.haystack == "essay" else self.settings.num_needles

    def _step(self, length: int) -> int:
        """Return RULER's decrement of a haystack's size, which is also its smallest size."""
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
                    f"tokens, and {self.tokens_to_generate} are reserved for the answer"
                )
        return size

    def _units(self, size: int) -> Sequence[str]:
        if self.settings.haystack == "noise":
            return [NOISE] * size
        if self.haystack is None:  # `draw` makes the lines
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
    """Return the settings of a task, given by name or as settings.

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
    """Return the share of expected strings in an output, ignoring case: RULER's ``string_match_all``.

    RULER first strips the output and turns control characters into line ends. For these tasks, this does not change
    which strings are found.

    Args:
        output: Output of the model.
        expected: Expected strings.

    Raises:
        ValueError: ``expected`` is empty.
    """
    if not expected:
        raise ValueError("expected must hold at least one string; it is empty")
    output = output.lower()
    return sum(string.lower() in output for string in expected) / len(expected)


class NeedleRetrieval(Retrieval):
    """Ask for needles (:class:`NeedleTask`). The score is the share of the expected strings in the answer.

    As in RULER, a length includes the tokens reserved for the answer, and prompts may be a few tokens shorter.
    """

    has_depth = False

    def __init__(self, name: str, setting: Setting) -> None:
        super().__init__(name, setting)
        self._beginning = self.subject.beginning()
        essay = NEEDLE_TASKS[name].haystack == "essay"
        haystack, splitter = (self.texts.haystack, self.texts.splitter) if essay else (None, None)
        self._task = NeedleTask(self.subject.tokenizer, name, haystack, split_sentences=splitter)

    def text_identity(self) -> dict[str, Any]:
        """Return everything that determines the prompts."""
        text = self._task.haystack
        found: dict[str, Any] = {"answer_tokens": self._task.tokens_to_generate}
        if text is not None:
            splitter = self._task.split_sentences.name
            found |= {"haystack": text.name, "haystack_fingerprint": text.fingerprint, "splitter": splitter}
        return found

    def check_length(self, length: int) -> None:
        """Raise a ValueError if even the smallest haystack does not fit."""
        try:
            self._task.haystack_size(length - len(self._beginning))
        except ValueError as error:
            raise ValueError(f"lengths: for the task {self.name!r}, {error}") from error

    def question(self, length: int, depth: float | None, seed: int) -> Question:
        """Make a prompt; by default RULER's draws choose the depth."""
        sample = self._task.sample(length - len(self._beginning), seed, depth)
        tokens = self.subject.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
        prompt = torch.cat([self._beginning, torch.tensor(tokens)])
        place = sample.depths[0] / 100 if len(sample.depths) == 1 else None
        return Question(prompt, sample.expected, self._task.tokens_to_generate, depth=place)

    def score(self, output: str, expected: Sequence[str]) -> float:
        """Return RULER's string match."""
        return match_all(output, expected)
