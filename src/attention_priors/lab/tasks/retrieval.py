"""Tasks that hide an answer in a text and ask for it."""

from __future__ import annotations

import hashlib
import statistics
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from attention_priors.lab.tasks.generation import continue_texts, forced_predictions
from attention_priors.lab.tasks.task import Record, Task, Unit


@dataclass(frozen=True)
class Question:
    """Prompt and its expected continuation.

    Attributes:
        prompt: Token ids, shape ``(L,)``.
        expected: Strings that a right continuation contains.
        new_tokens: Largest number of tokens of the continuation.
        answer: Token ids of the only right continuation, ``(A,)``. None if several are right.
        depth: Place of the answer in the text, from 0 to 1. Only for tasks that choose the depth themselves and have
            one answer.
        needle: Start and end index of the answer in the prompt. None if unknown.
    """

    prompt: Tensor
    expected: tuple[str, ...]
    new_tokens: int
    answer: Tensor | None = None
    depth: float | None = None
    needle: tuple[int, int] | None = None


def depths(count: int) -> tuple[float, ...]:
    """Return depths evenly spaced from 0 to 1: ``0, 1/(count-1), ..., 1``.

    Raises:
        ValueError: ``count`` is below 2.
    """
    if count < 2:
        raise ValueError(f"count must be at least 2, to include both ends; it is {count}")
    return tuple(index / (count - 1) for index in range(count))


def text_seed(rule: str, seed: int, length: int, depth: int, trial: int) -> int:
    """Return the seed of one text.

    Args:
        rule: ``hashed``, or ``mixed``. Comparisons and all published pass keys use ``mixed``.
        seed: Seed of the plan.
        length: Length of the text, in tokens.
        depth: Index of the depth.
        trial: Number of the text at this length and depth.
    """
    if rule == "mixed":
        mixed = seed
        for part in (length, depth, trial):
            mixed = (mixed * 1_000_003 + part + 1) % (2**31 - 1)
        return mixed
    digest = hashlib.sha256(f"{seed}:{length}:{depth}:{trial}".encode()).digest()
    # PyTorch and NumPy use 32 bits of a seed.
    return int.from_bytes(digest[:4], "big")


class Retrieval(Task):
    """Ask for something in a text, and score the answer from 0 to 1.

    If a question has one right answer, each answer token is predicted from the true tokens before it. Greedy decoding
    gives the whole answer if and only if all predictions are right, so one pass is enough.
    """

    stops_after_zeros = True
    has_depth = True
    """Whether the plan chooses the depth."""

    @abstractmethod
    def question(self, length: int, depth: float | None, seed: int) -> Question:
        """Make a question as a function of the arguments alone.

        Args:
            length: Length of the prompt, in tokens.
            depth: Place of the answer in the text, from 0 to 1; None for tasks that choose the depth.
            seed: Seed of the text.
        """

    @abstractmethod
    def score(self, output: str, expected: Sequence[str]) -> float:
        """Return the score of a continuation, from 0 to 1."""

    @abstractmethod
    def text_identity(self) -> dict[str, Any]:
        """Return everything that determines a question besides length, depth and seed, as plain JSON."""

    def identity(self) -> dict[str, Any]:
        """Return everything that determines the records."""
        plan = self.plan
        rule = {} if plan.seeding == "hashed" else {"seeding": plan.seeding}
        drawn = {"seed": plan.seed, "depths": plan.depths if self.has_depth else None}
        return self.text_identity() | drawn | rule

    def groups(self, length: int) -> Iterator[Sequence[Unit]]:
        """Yield every depth once per trial, so that adding trials does not change earlier groups."""
        plan = self.plan
        places = depths(plan.depths) if self.has_depth else (None,) * plan.depths
        grid = [
            Unit(
                {"depth_index": index, "trial": trial},
                length,
                (place, text_seed(plan.seeding, plan.seed, length, index, trial)),
            )
            for trial, (index, place) in product(range(plan.trials), enumerate(places))
        ]
        for start in range(0, len(grid), self.setting.batch):
            yield grid[start : start + self.setting.batch]

    def questions(self, length: int, units: Sequence[Unit]) -> list[Question]:
        """Return the question of each unit."""
        return [self.question(length, *unit.content) for unit in units]

    def place(self, unit: Unit, question: Question) -> Record:
        """Return the depth and the size of a question for its record."""
        return {"depth": unit.content[0] if self.has_depth else question.depth, "tokens": len(question.prompt)}

    def ask(self, length: int, units: Sequence[Unit]) -> list[Record]:
        """Return score and output of each unit."""
        questions = self.questions(length, units)
        # Group by length, because a batch has no padding.
        groups: dict[tuple[int, int], list[int]] = {}
        for index, question in enumerate(questions):
            size = len(question.prompt), 0 if question.answer is None else len(question.answer)
            groups.setdefault(size, []).append(index)
        records: list[Record] = [{} for _ in units]
        for indices in groups.values():
            answers = self._answers([questions[index] for index in indices])
            for index, answer in zip(indices, answers, strict=True):
                question = questions[index]
                records[index] = self.place(units[index], question) | answer | {"expected": list(question.expected)}
        return records

    def _answers(self, questions: Sequence[Question]) -> list[Record]:
        """Return score and output of questions of the same length."""
        model, chunk = self.subject.model, self.setting.chunk
        prompts = torch.stack([question.prompt for question in questions])
        answers = [question.answer for question in questions if question.answer is not None]
        if len(answers) == len(questions):
            expected = torch.stack(answers)
            found, margins = forced_predictions(model, prompts, expected, chunk=chunk)
            right = found == expected
            return [
                {
                    "score": float(ok.all()),
                    "output": self._decoded(tokens),
                    "token_accuracy": round(statistics.fmean(ok.tolist()), 7),
                    "tokens_right": ok.tolist(),
                    "margins": [round(margin, 4) for margin in of_tokens],
                }
                for ok, tokens, of_tokens in zip(right, found.tolist(), margins.tolist(), strict=True)
            ]
        longest = max(question.new_tokens for question in questions)
        texts = continue_texts(model, prompts, longest, chunk=chunk, stop=self.subject.ends())
        outputs = [
            self._decoded(tokens[: question.new_tokens]) for tokens, question in zip(texts, questions, strict=True)
        ]
        return [
            {"score": self.score(output, question.expected), "output": output}
            for output, question in zip(outputs, questions, strict=True)
        ]

    def _decoded(self, tokens: list[int]) -> str:
        # Cleaning up would remove spaces that the model wrote.
        decode = self.subject.tokenizer.decode
        return str(decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))
