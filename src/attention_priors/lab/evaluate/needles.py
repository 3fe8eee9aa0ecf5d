"""RULER's needle tasks as tasks of an evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from attention_priors.lab.data.needles import Haystack, NeedleTask, SentenceSplitter, match_all
from attention_priors.lab.evaluate.retrieval import Question, RetrievalTask
from attention_priors.lab.evaluate.subject import Subject


class NeedleRetrieval(RetrievalTask):
    """Find needles: :class:`NeedleTask`. The score is the share of the expected strings that the answer holds.

    A length counts the prompt and the tokens that are left free for the answer, as in RULER, and prompts of one length
    may be some tokens shorter.

    Args:
        name: of the task.
        subject: whose tokenizer it is for.
        haystack: the text of essays, for tasks that hide needles in one.
        splitter: finds the places in an essay where a needle may stand.
    """

    has_depth = False

    def __init__(
        self,
        name: str,
        subject: Subject,
        haystack: Haystack | None = None,
        splitter: SentenceSplitter | None = None,
    ) -> None:
        self.name = name
        self._tokenizer = subject.tokenizer
        self._beginning = subject.beginning()
        self._task = NeedleTask(subject.tokenizer, name, haystack, split_sentences=splitter)

    def description(self) -> dict[str, Any]:
        """What determines the prompts."""
        text = self._task.haystack
        found: dict[str, Any] = {"task": self.name, "answer_tokens": self._task.tokens_to_generate}
        if text is not None:
            splitter = self._task.split_sentences.name
            found |= {"haystack": text.name, "haystack_fingerprint": text.fingerprint, "splitter": splitter}
        return found

    def check(self, length: int) -> None:
        """Raise a ValueError if not even the smallest haystack fits."""
        try:
            self._task.haystack_size(length - len(self._beginning))
        except ValueError as error:
            raise ValueError(f"lengths: for the task {self.name!r}, {error}") from error

    def tokens_read(self, length: int) -> int:
        """A length has room for the answer."""
        return length

    def question(self, length: int, depth: float | None, seed: int) -> Question:
        """One prompt; RULER draws the depth."""
        sample = self._task.sample(length - len(self._beginning), seed, depth)
        tokens = self._tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
        prompt = torch.cat([self._beginning, torch.tensor(tokens)])
        place = sample.depths[0] / 100 if len(sample.depths) == 1 else None
        return Question(prompt, sample.expected, self._task.tokens_to_generate, depth=place)

    def score(self, output: str, expected: Sequence[str]) -> float:
        """RULER's string match."""
        return match_all(output, expected)
