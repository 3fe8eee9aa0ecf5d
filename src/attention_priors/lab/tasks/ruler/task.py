"""RULER's prompts of a given length, the score of an answer, and the evaluation task."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from attention_priors.checks import check_choice, check_positive_integers
from attention_priors.lab.data.tokenizer import TextEncoder, check_writes
from attention_priors.lab.tasks.retrieval import Question, Retrieval
from attention_priors.lab.tasks.ruler import RULER_TASKS
from attention_priors.lab.tasks.ruler.haystack import Haystack, RegexSplitter, SentenceSplitter
from attention_priors.lab.tasks.ruler.settings import NOISE, Generators, Prompt, RulerSettings
from attention_priors.lab.tasks.task import Setting

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# RULER's default seed, used for the few-shot example and the search of the haystack size.
RULER_SEED = 42
# RULER redraws forever if a text is too long and cannot be shortened.
MOST_REDRAWS = 1000
_EXAMPLE_LENGTH = 500
"""Largest number of tokens of the few-shot example, without its answer."""

Encode = Callable[[str], Sequence[int]]
Write = Callable[[int], Prompt]
"""Function that writes a prompt with a haystack of a size."""


class RulerTask:
    """One of RULER's tasks, for a tokenizer.

    Prompts equal those of RULER (Hsieh et al., 2024; NVIDIA/RULER, ``scripts/data/synthetic/niah.py`` and
    ``variable_tracking.py``) character for character. The settings draw in RULER's order and write RULER's text.
    RULER's own search, with its default seed 42, finds the few-shot example and the size of the haystack: words of an
    essay, or lines of another kind. A sample is RULER's prompt of this size after seeding the generators with
    ``seed``. RULER draws a file of samples from one seed in sequence, so its files differ.

    RULER's search stops at the largest haystack that fits with the draws of the search. With other draws, a prompt may
    be a few tokens too long. As in RULER, it is then redrawn with a haystack that is 500 words (5 lines below 4096
    tokens, else 25, or 10 for variable tracking) shorter. RULER's smallest haystack has this size too, and RULER never
    returns for a length that cannot hold it. This class searches on, down to one word, or one line for each needle or
    variable of a chain.

    The ``ruler`` tasks of lm-evaluation-harness write the same needle prompts from the same draws, with these
    differences:

    - **Kind**. This ``noise`` is called ``repeat``.
    - **Size**. The haystack grows in steps of 500 words or 5 or 25 lines until prompt and answers exceed the length.
      This sum excludes the answer prefix and includes special tokens.
    - **Essay**. An essay is not repeated: prompts end with it.
    - **Length**. A sample's length excludes the answer prefix and includes special tokens.
    - **Overflow**. Samples that do not fit are shortened down to nothing, then left out.
    - **Seed**. The caller seeds the generator.

    Its variable tracking writes another text around the same draws; docs/ruler-agreement.md lists the differences.

    Args:
        tokenizer: Tokenizer that counts the tokens.
        task: Key of `RULER_TASKS`, or custom settings.
        haystack: Text of an essay task. Other tasks ignore it.
        tokens_to_generate: Tokens of each length that are reserved for the answer. By default 128 for needles, and 6
            for each variable, so RULER's 30 for its variable tracking.
        split_sentences: Splitter that finds places for needles in an essay. RULER uses NLTK's punkt, which needs a
            download (`PunktSplitter`); the default needs none.

    Raises:
        ValueError: ``task`` is not a known name, an essay task has no ``haystack``, ``tokens_to_generate`` is below 1,
            ``tokenizer`` cannot encode the question and its answers, or the few-shot example does not fit 500 tokens.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        task: str | RulerSettings,
        haystack: Haystack | None = None,
        *,
        tokens_to_generate: int | None = None,
        split_sentences: SentenceSplitter | None = None,
    ) -> None:
        self.settings = checked_task(task, haystack)
        if tokens_to_generate is None:
            tokens_to_generate = self.settings.answer_tokens
        check_positive_integers(tokens_to_generate=tokens_to_generate)
        check_writes(tokenizer, self.settings.probe)
        self.haystack = haystack if self.settings.haystack == "essay" else None
        self.tokens_to_generate = tokens_to_generate
        self.split_sentences: SentenceSplitter = split_sentences or RegexSplitter()
        self._encode = TextEncoder(tokenizer)
        self._example = write_example(self.settings, self._encode, Generators.seeded(RULER_SEED))
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

    def sample(self, length: int, seed: int, depth: float | None = None) -> Prompt:
        """Make one prompt, which depends only on the task, its tokenizer and text, and these arguments.

        Args:
            length: Upper limit for the tokens of the prompt, without special tokens, plus ``tokens_to_generate``.
            seed: Seed of all draws, at least 0.
            depth: Place of the queried needle, from 0 (before the haystack) to 1 (after it). ``None`` draws the depth
                as RULER does. All other draws and needles stay the same, unless the move makes a prompt fit or not fit
                and so changes whether it is redrawn.

        Raises:
            ValueError: ``length`` has no room for the task, ``seed`` is below 0, ``depth`` is outside [0, 1], or
                ``depth`` is given for a task with several answers.
        """
        if not isinstance(seed, int) or seed < 0:
            raise ValueError(f"seed must be an integer of at least 0; it is {seed!r}")
        if depth is not None:
            if not 0 <= depth <= 1:
                raise ValueError(f"depth must be from 0 to 1, or None; it is {depth}")
            if self.settings.num_answers > 1:
                raise ValueError(
                    f"depth must be None for a task with {self.settings.num_answers} answers; it is {depth}"
                )
        size, generators = self.haystack_size(length), Generators.seeded(seed)

        def write(size: int) -> Prompt:
            return self.settings.write(self._cached_units(size), generators, depth=depth, example=self._example)

        return _fit(self.settings, self._encode, write, size, length, self.tokens_to_generate)

    def _find_size(self, length: int) -> int:
        generators = Generators.seeded(RULER_SEED)
        example = write_example(self.settings, self._encode, generators)  # draws as in RULER before the search

        def write(size: int) -> Prompt:
            return self.settings.write(self._units(size), generators)

        reserved = self.tokens_to_generate + len(self._encode(example or ""))
        return _largest_size(self.settings, self._encode, write, length, reserved)

    def _units(self, size: int) -> Sequence[str]:
        if self.haystack is None:
            return [NOISE] * size
        return self.split_sentences(self.haystack.first(size).strip())


def write_example(settings: RulerSettings, encode: Encode, generators: Generators) -> str | None:
    """Write RULER's few-shot example, of which each prompt replaces the drawn names. None if the task has none.

    Raises:
        ValueError: not even the smallest haystack fits.
    """
    shot = settings.example_settings
    if shot is None:
        return None

    def write(size: int) -> Prompt:
        return shot.write([NOISE] * size, generators)

    try:
        size = _largest_size(shot, encode, write, _EXAMPLE_LENGTH, 0)
    except ValueError as error:
        raise ValueError(f"few-shot example: {error}. Use example=False or variable_tracking_2_hops") from error
    prompt = _fit(shot, encode, write, size, _EXAMPLE_LENGTH, 0)
    return f"{prompt.text}{prompt.answer}\n"


def _largest_size(settings: RulerSettings, encode: Encode, write: Write, length: int, reserved: int) -> int:
    """Find the largest haystack with which a prompt and the reserved tokens fit, by RULER's search."""
    step = settings.step(length)

    def count(size: int) -> int:
        return len(encode(write(size).text))

    def largest_that_fits(lower: int, upper: int) -> int | None:
        best = None
        while lower <= upper:
            middle = (lower + upper) // 2
            if count(middle) + reserved <= length:
                best, lower = middle, middle + 1
            else:
                upper = middle - 1
        return best

    tokens_per_unit = count(step) / step
    size = largest_that_fits(step, max(int((length / tokens_per_unit) * 3), step * 2))
    if size is None:
        size = largest_that_fits(settings.smallest, step - 1)
        if size is None:
            raise ValueError(
                f"length {length} is too short: with the smallest haystack the prompt has {count(settings.smallest)} "
                f"tokens, and {reserved} are reserved for the answer and any example"
            )
    return size


def _fit(settings: RulerSettings, encode: Encode, write: Write, size: int, length: int, reserved: int) -> Prompt:
    """Draw prompts until one fits with the reserved tokens; shorten the haystack as RULER does."""
    step, redraws = settings.step(length), 0
    while True:
        prompt = write(size)
        used = len(encode(prompt.text)) + reserved
        if used <= length:
            return prompt._replace(length=used)
        if size - step >= settings.smallest:
            size -= step
        elif redraws == MOST_REDRAWS:
            raise ValueError(
                f"length {length} is too short: {redraws} prompts were all longer, the last with {used} tokens"
            )
        else:
            redraws += 1


def checked_task(task: str | RulerSettings, haystack: Haystack | None) -> RulerSettings:
    """Return the settings of a task, given by name or as settings.

    Raises:
        ValueError: ``task`` is not a known name, or an essay task has no ``haystack``.
    """
    if isinstance(task, str):
        check_choice("task", task, tuple(RULER_TASKS))
        task = RULER_TASKS[task]
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


class RulerRetrieval(Retrieval):
    """Ask a question of RULER (:class:`RulerTask`). The score is the share of the expected strings in the answer.

    As in RULER, a length includes the tokens reserved for the answer, and prompts may be a few tokens shorter.
    """

    has_depth = False

    def __init__(self, name: str, setting: Setting) -> None:
        super().__init__(name, setting)
        self._beginning = self.subject.beginning()
        essay = RULER_TASKS[name].haystack == "essay"
        haystack, splitter = (self.texts.haystack, self.texts.splitter) if essay else (None, None)
        self._task = RulerTask(self.subject.tokenizer, name, haystack, split_sentences=splitter)

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
        tokens = self.subject.tokenizer(sample.text, add_special_tokens=False)["input_ids"]
        prompt = torch.cat([self._beginning, torch.tensor(tokens)])
        place = sample.depths[0] / 100 if len(sample.depths) == 1 else None
        return Question(prompt, sample.expected, self._task.tokens_to_generate, depth=place)

    def score(self, output: str, expected: Sequence[str]) -> float:
        """Return RULER's string match."""
        return match_all(output, expected)
