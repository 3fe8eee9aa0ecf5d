"""Tasks that hide something in a text and ask for it: what they are, and how a model does."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attention_priors.lab.data import PasskeyTask
from attention_priors.lab.evaluate.answering import forced_predictions, greedy
from attention_priors.lab.evaluate.subject import Subject


@dataclass(frozen=True)
class Question:
    """A prompt, and what is expected of its continuation."""

    prompt: Tensor
    """``(L,)``."""
    expected: tuple[str, ...]
    new_tokens: int
    """How many tokens the continuation may have."""
    answer: Tensor | None = None
    """The tokens of the one right continuation, ``(A,)``; None where several would do."""
    depth: float | None = None
    """Where in the text the answer stands, from 0 to 1, for tasks that choose it themselves and have one place."""
    needle: tuple[int, int] | None = None
    """The tokens of the prompt that hold the answer: the first, and the one after the last; None where not known."""


class RetrievalTask(ABC):
    """Makes questions of a chosen length and depth, and judges answers."""

    name: str
    has_depth: bool
    """Whether a depth can be chosen."""

    @abstractmethod
    def description(self) -> dict[str, Any]:
        """Everything that determines a question, beside model, tokenizer, length, depth and seed; plain JSON."""

    @abstractmethod
    def check(self, length: int) -> None:
        """Raise a ValueError if there are no texts of so many tokens."""

    @abstractmethod
    def tokens_read(self, length: int) -> int:
        """How many tokens a model reads at most for a text of a length, with what it answers."""

    @abstractmethod
    def question(self, length: int, depth: float | None, seed: int) -> Question:
        """A function of its arguments alone; ``length`` is in tokens, the prompt's."""

    @abstractmethod
    def score(self, output: str, expected: Sequence[str]) -> float:
        """How right a continuation is, from 0 to 1."""


class PasskeyRetrieval(RetrievalTask):
    """Find a number: :class:`PasskeyTask`. A text counts if greedy decoding gives all of its digits.

    Args:
        name: of the task.
        subject: whose tokenizer it is for.
        texts: what makes the texts.
        description: what determines them.
    """

    has_depth = True

    def __init__(self, name: str, subject: Subject, texts: PasskeyTask, description: dict[str, Any]) -> None:
        self.name = name
        self._texts = texts
        self._description = description
        self._beginning = subject.beginning()
        # Where digits may be joined: one for the space before them, and one to see that the number ends.
        self._answer_tokens = texts.digits + (2 if texts.joins_digits else 0)

    def description(self) -> dict[str, Any]:
        """What determines the texts."""
        return {"task": self.name, "digits": self._texts.digits} | self._description

    def check(self, length: int) -> None:
        """Raise a ValueError if there is no room for any filler."""
        shortest = self._texts.minimum_length + len(self._beginning)
        if length < shortest:
            raise ValueError(
                f"lengths: {length} tokens for the task {self.name!r}; with this tokenizer its texts have at least "
                f"{shortest} tokens"
            )

    def tokens_read(self, length: int) -> int:
        """The last token of an answer is written and not read."""
        return length + self._answer_tokens - 1

    def question(self, length: int, depth: float | None, seed: int) -> Question:
        """A text with a number at this depth, and the question for it."""
        assert depth is not None
        generator = torch.Generator().manual_seed(seed)
        sample = self._texts.sample(length - len(self._beginning), depth, generator)
        prompt = torch.cat([self._beginning, sample.prompt])
        # Where digits are joined, other tokens may spell the same number: what counts is the text.
        answer = None if self._texts.joins_digits else sample.answer
        needle = sample.needle_start + len(self._beginning), sample.needle_end + len(self._beginning)
        return Question(prompt, (str(sample.key),), self._answer_tokens, answer, needle=needle)

    def score(self, output: str, expected: Sequence[str]) -> float:
        """1 if the continuation starts with the number, and with no longer one."""
        (key,) = expected
        output = output.lstrip()
        return float(output.startswith(key) and not output[len(key) : len(key) + 1].isdigit())


@dataclass(frozen=True)
class Answer:
    """What a model made of a question."""

    score: float
    """From 0 to 1."""
    output: str
    tokens_right: tuple[bool, ...] | None
    """Which of the answer's tokens are predicted right, each with the true ones before it; None where there is no one
    right answer."""


def ask(
    subject: Subject, task: RetrievalTask, questions: Sequence[Question], *, chunk: int, on_tokens: Any
) -> list[Answer]:
    """What the model answers to questions of one length.

    Args:
        subject: the model.
        task: judges the answers.
        questions: their prompts must have equally many tokens.
        chunk: tokens per forward pass.
        on_tokens: called with the number of tokens that each text has been read up to.
    """
    prompts = torch.stack([question.prompt for question in questions])
    answers = [question.answer for question in questions if question.answer is not None]
    if len(answers) == len(questions):
        expected = torch.stack(answers)
        found = forced_predictions(subject.model, prompts, expected, chunk=chunk, on_tokens=on_tokens)
        right = found == expected
        return [
            Answer(float(ok.all()), _decoded(subject, tokens), tuple(ok.tolist()))
            for ok, tokens in zip(right, found.tolist(), strict=True)
        ]
    longest = max(question.new_tokens for question in questions)
    texts = greedy(subject.model, prompts, longest, chunk=chunk, stop=subject.ends(), on_tokens=on_tokens)
    outputs = [
        _decoded(subject, tokens[: question.new_tokens]) for tokens, question in zip(texts, questions, strict=True)
    ]
    return [
        Answer(task.score(output, question.expected), output, None)
        for output, question in zip(outputs, questions, strict=True)
    ]


def question_seed(seed: int, length: int, depth: int, trial: int) -> int:
    """One number for one text: a hash, so that neighbours have nothing in common."""
    digest = hashlib.sha256(f"{seed}:{length}:{depth}:{trial}".encode()).digest()
    # PyTorch and NumPy read 32 bits of a seed.
    return int.from_bytes(digest[:4], "big")


def _decoded(subject: Subject, tokens: list[int]) -> str:
    # Cleaning up would take spaces away that the model wrote.
    return str(subject.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))
