"""The passkey task: find five digits hidden at a chosen depth of a text of a chosen length."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attention_priors.data.stream import TokenStream
from attention_priors.data.tokenizer import digit_token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ANSWER_LENGTH = 5
"""Tokens of an answer: the five digits of a pass key."""

# Short, so that short contexts have room for filler.
INSTRUCTION = "Remember the pass key in this text.\n"
# The space stands first, so that a repeated sentence is tokenised as running text is.
FILLER_SENTENCE = " The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = "\nThe pass key is {key}. Remember it. {key} is the pass key.\n"
QUESTION = "\nWhat is the pass key? The pass key is {key}"

_SMALLEST_KEY, _LARGEST_KEY = 10_000, 99_999
_LONGEST_DECOY = 8
_PROBE_KEYS = ("12345", "90678")  # together, every digit


@dataclass(frozen=True)
class PasskeySample:
    """One passkey text and its answer.

    Attributes:
        tokens: The prompt and the five tokens of the answer, int64, shape ``(length + 5,)``.
        answer_start: Index of the answer's first token, equal to ``length``: the model has read exactly that
            many tokens when it predicts it.
        needle_start: Index of the needle's first token.
        key: The pass key, from 10000 to 99999.
    """

    tokens: Tensor
    answer_start: int
    needle_start: int
    key: int

    @property
    def prompt(self) -> Tensor:
        """What the model reads, shape ``(length,)``."""
        return self.tokens[: self.answer_start]

    @property
    def answer(self) -> Tensor:
        """The digits of the pass key, shape ``(5,)``."""
        return self.tokens[self.answer_start :]


class PasskeyTask:
    """Makes passkey texts of an exact length in tokens.

    A text is an instruction, filler with the needle in it, and a question; the answer follows. Everything is
    tokenised once, here: `sample` only joins tokens, and the tokenizer is not kept.

    Args:
        tokenizer: A tokenizer that gives every digit its own token.
        filler: Documents, encoded by the same tokenizer: each sample takes a random contiguous window of them,
            joined by line ends. ``None`` repeats one paragraph of short sentences.
        decoys: Up to so many numbers of 1 to 8 digits take the place of filler in each text; how many is drawn
            uniformly, from 0. To train on: short texts hold few other numbers that a key could be taken for.

    Raises:
        ValueError: ``decoys`` is negative, or ``tokenizer`` joins digits to what stands beside them.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        filler: TokenStream | None = None,
        decoys: int = 0,
    ) -> None:
        if decoys < 0:
            raise ValueError(f"decoys must be at least 0; it is {decoys}")
        self._decoys = decoys
        self._digits = torch.tensor(digit_token_ids(tokenizer))
        self._instruction = _encode(tokenizer, INSTRUCTION)
        self._needle = self._around_keys(tokenizer, NEEDLE, count=3)
        self._question = self._around_keys(tokenizer, QUESTION, count=2)[0]
        self._repeats = filler is None
        if filler is None:
            self._filler = _encode(tokenizer, FILLER_SENTENCE)
        else:
            # A line end in place of the end-of-text token, which only ever ends a document.
            line_end = int(_encode(tokenizer, "\n")[-1])
            ends = filler.tokens.eq(int(tokenizer.eos_token_id))  # pyright: ignore[reportArgumentType]
            self._filler = filler.tokens.masked_fill(ends, line_end)

    @property
    def minimum_length(self) -> int:
        """Tokens of the shortest prompt, which has no filler: instruction, needle and question."""
        needle = sum(piece.numel() for piece in self._needle) + (len(self._needle) - 1) * ANSWER_LENGTH
        return self._instruction.numel() + needle + self._question.numel()

    @property
    def maximum_length(self) -> int | None:
        """Tokens of the longest prompt there is filler for; ``None`` for the sentence filler: no limit."""
        return None if self._repeats else self.minimum_length + self._filler.numel()

    def sample(self, length: int, depth: float, generator: torch.Generator) -> PasskeySample:
        """Make one text with a random pass key.

        Args:
            length: Tokens of the whole prompt, question included and answer not.
            depth: Where in the filler the needle stands: 0 before all of it, 1 after. The needle follows
                ``round(depth * filler_length)`` tokens of filler, where ``filler_length`` is
                ``length - minimum_length``.
            generator: Draws the pass key, the decoys and, for the corpus filler, the window.

        Raises:
            ValueError: ``length`` is below `minimum_length` or above `maximum_length`, or ``depth`` is
                outside [0, 1].
        """
        if length < self.minimum_length:
            raise ValueError(f"length must be at least minimum_length, {self.minimum_length} tokens; it is {length}")
        if self.maximum_length is not None and length > self.maximum_length:
            raise ValueError(
                f"length must be at most maximum_length, {self.maximum_length} tokens (the filler documents "
                f"have no more); it is {length}"
            )
        if not 0 <= depth <= 1:
            raise ValueError(f"depth must be from 0 to 1; it is {depth}")
        filler_length = length - self.minimum_length
        filler = self._draw_filler(filler_length, generator)
        key = int(torch.randint(_SMALLEST_KEY, _LARGEST_KEY + 1, (), generator=generator))
        answer = self._key_tokens(str(key))
        before = round(depth * filler_length)
        first, middle, last = self._needle
        tokens = torch.cat(
            [
                self._instruction,
                filler[:before],
                *(first, answer, middle, answer, last),
                filler[before:],
                self._question,
                answer,
            ]
        )
        needle_start = self._instruction.numel() + before
        return PasskeySample(tokens=tokens, answer_start=length, needle_start=needle_start, key=key)

    def _draw_filler(self, filler_length: int, generator: torch.Generator) -> Tensor:
        size = self._filler.numel()
        if self._repeats:
            filler = self._filler.repeat(math.ceil(filler_length / size))[:filler_length]
        else:
            start = int(torch.randint(size - filler_length + 1, (), generator=generator))
            filler = self._filler[start : start + filler_length]
        return self._with_decoys(filler, generator) if self._decoys else filler

    def _with_decoys(self, filler: Tensor, generator: torch.Generator) -> Tensor:
        filler = filler.clone()
        for _ in range(int(torch.randint(self._decoys + 1, (), generator=generator))):
            size = int(torch.randint(1, _LONGEST_DECOY + 1, (), generator=generator))
            if size <= filler.numel():
                start = int(torch.randint(filler.numel() - size + 1, (), generator=generator))
                filler[start : start + size] = self._digits[torch.randint(10, (size,), generator=generator)]
        return filler

    def _around_keys(self, tokenizer: PreTrainedTokenizerBase, template: str, count: int) -> list[Tensor]:
        """The `count` pieces of a template around its keys, as they are tokenised with keys in place."""
        pieces, other_pieces = (
            _split_at(_encode(tokenizer, template.format(key=key)), self._key_tokens(key)) for key in _PROBE_KEYS
        )
        same = all(torch.equal(piece, other) for piece, other in zip(pieces, other_pieces, strict=False))
        if len(pieces) != count or len(other_pieces) != count or not same:
            raise ValueError(
                f"tokenizer {tokenizer.name_or_path!r} encodes the digits of a pass key differently in "
                f"{template!r}: expected one token for each, the same in every text"
            )
        return pieces

    def _key_tokens(self, key: str) -> Tensor:
        return self._digits[[int(digit) for digit in key]]


def depths(count: int) -> tuple[float, ...]:
    """Depths evenly spaced from 0 to 1: ``0, 1/(count-1), ..., 1``.

    Raises:
        ValueError: ``count`` is below 2.
    """
    if count < 2:
        raise ValueError(f"count must be at least 2, to have both ends; it is {count}")
    return tuple(index / (count - 1) for index in range(count))


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> Tensor:
    return torch.tensor(tokenizer.encode(text, add_special_tokens=False), dtype=torch.int64)


def _split_at(tokens: Tensor, separator: Tensor) -> list[Tensor]:
    """What stands before, between and after each occurrence of `separator`; may be empty."""
    pieces, start, position, size = [], 0, 0, separator.numel()
    while position + size <= tokens.numel():
        if torch.equal(tokens[position : position + size], separator):
            pieces.append(tokens[start:position])
            start = position = position + size
        else:
            position += 1
    return [*pieces, tokens[start:]]
