"""Passkey texts and tasks: hide a number at a chosen depth, ask for it, and measure each head's attention to it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from attention_priors.attention.reference import reference
from attention_priors.hf.observe import LayerAttention, observed_attention
from attention_priors.lab.data.packing import RetrievalText
from attention_priors.lab.data.tokenizer import TokenStream, check_writes, digit_token_ids, letters
from attention_priors.lab.tasks.generation import chunked_logits
from attention_priors.lab.tasks.plan import LONGEST_KEY
from attention_priors.lab.tasks.retrieval import Question, Retrieval
from attention_priors.lab.tasks.task import Record, Setting, Unit

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ANSWER_LENGTH = 5
"""Default number of digits of a pass key, and of tokens of its answer."""

# The leading space makes repeated sentences tokenize like running text.
FILLER_SENTENCE = " The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


class Wording(NamedTuple):
    """Sentences around the filler, with ``{key}`` in place of the pass key."""

    instruction: str
    needle: str
    question: str
    """Question, followed by its answer."""


WORDINGS = {
    # Leaves room for filler in short contexts.
    "short": Wording(
        "Remember the pass key in this text.\n",
        "\nThe pass key is {key}. Remember it. {key} is the pass key.\n",
        "\nWhat is the pass key? The pass key is {key}",
    ),
    # Common wording for evaluations of large models.
    "long": Wording(
        "There is an important info hidden inside a lot of irrelevant text. Find it and memorize it. I will quiz you "
        "about the important information there.\n",
        "\nThe pass key is {key}. Remember it. {key} is the pass key.\n",
        "\nWhat is the pass key? The pass key is {key}",
    ),
}
_LONGEST_DECOY = 8
_PROBES = ("1234567890", "9067812345")
"""Probe keys that together have every digit in the first places of a key."""


@dataclass(frozen=True)
class PasskeySample(RetrievalText):
    """Passkey text with its answer: one token per digit, unless the tokenizer merges digits.

    Attributes:
        needle_start: Index of the needle's first token.
        needle_end: Index of the token after the needle.
        question_start: Index of the question's first token.
        key: Pass key; its first digit is not 0.
    """

    needle_start: int
    needle_end: int
    question_start: int
    key: int


class PasskeyTexts:
    """Generator of passkey texts with an exact length in tokens.

    A text is an instruction, filler with the needle in it, a question, and the answer.

    Args:
        tokenizer: Tokenizer with an end-of-text token. If it merges digits (see :attr:`joins_digits`), the texts serve
            for evaluation, but not for training.
        filler: Documents, encoded by the same tokenizer. Each sample takes a random contiguous window of the documents,
            joined by line ends. A longer window repeats the documents. ``None`` repeats one paragraph of short
            sentences.
        decoys: Largest number of decoys, which are numbers of 1 to 8 digits that replace filler. Their number is drawn
            uniformly from 0 to ``decoys``. Decoys make short training texts harder, because these hold few other
            numbers.
        decoy_overlap: Probability that a decoy begins with consecutive digits of the key and then differs. Numbers in a
            long text often share a digit or two with the key; those in a short text rarely do.
        digits: Digits of a pass key, from 1 to 9.
        wording: Key of ``WORDINGS``.

    Raises:
        ValueError: an argument is outside the range given above, or ``tokenizer`` merges a pass key with the words
            before it.
    """

    name = "passkey"

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        filler: TokenStream | None = None,
        decoys: int = 0,
        decoy_overlap: float = 0.0,
        digits: int = ANSWER_LENGTH,
        wording: str = "short",
    ) -> None:
        if decoys < 0:
            raise ValueError(f"decoys must be at least 0; it is {decoys}")
        if not 0 <= decoy_overlap <= 1:
            raise ValueError(f"decoy_overlap must be from 0 to 1; it is {decoy_overlap}")
        if not 1 <= digits <= 9:
            raise ValueError(f"digits must be from 1 to 9; it is {digits}")
        if wording not in WORDINGS:
            raise ValueError(f"wording must be one of {', '.join(WORDINGS)}; it is {wording!r}")
        self._decoys = decoys
        self._decoy_overlap = decoy_overlap
        self.digits = digits
        self._digit_tokens = digit_token_ids(tokenizer)
        self.joins_digits = self._digit_tokens is None
        """Whether a token may hold several digits, so that keys differ in their number of tokens."""
        check_writes(tokenizer, "12345")
        if self.joins_digits and decoys:
            raise ValueError(
                f"decoys={decoys} need a tokenizer that gives every digit its own token, and tokenizer "
                f"{tokenizer.name_or_path!r} joins digits; tokenizers trained by a recipe (tokenizer: 2048) do not"
            )
        instruction, self._needle_text, self._question_text = WORDINGS[wording]
        self._tokenizer = tokenizer
        self._instruction = _encode(tokenizer, instruction)
        probes = [probe[:digits] for probe in _PROBES]
        first, second = (_encode(tokenizer, self._question_text.format(key=key)) for key in probes)
        differs = [one != other for one, other in zip(first.tolist(), second.tolist(), strict=False)]
        self._question = first[: [*differs, True].index(True)]
        before = self._question_text.partition("{key}")[0]
        # Some tokenizers encode the space before a number as a separate token.
        if not letters(str(tokenizer.decode(self._question))).endswith(letters(before)):
            raise ValueError(
                f"tokenizer {tokenizer.name_or_path!r} joins a pass key to the words before it: expected separate "
                f"tokens for {before[-20:]!r}"
            )
        if self.joins_digits:
            # A key has at most one token per digit, and one for the space before it.
            self._slack = (digits + 1) * self._needle_text.count("{key}")
            self._longest_needle = _encode(tokenizer, self._needle_text.format(key="")).numel() + self._slack
        else:
            self._slack = 0
            self._longest_needle = _encode(tokenizer, self._needle_text.format(key=probes[0])).numel()
        self._varies = filler is not None
        if filler is None:
            self._filler = _encode(tokenizer, FILLER_SENTENCE)
        else:
            # A line end replaces the end-of-text token between documents. A tokenizer without line ends drops it.
            line_end = _encode(tokenizer, "\n")
            ends = filler.tokens.eq(int(tokenizer.eos_token_id))  # pyright: ignore[reportArgumentType]
            if line_end.numel():
                self._filler = filler.tokens.masked_fill(ends, int(line_end[-1]))
            else:
                self._filler = filler.tokens[~ends]

    @property
    def minimum_length(self) -> int:
        """Smallest number of tokens of a prompt for any key: instruction, needle and question with almost no filler."""
        return self._instruction.numel() + self._longest_needle + self._question.numel()

    @property
    def shortest_text(self) -> int:
        """Number of tokens of the shortest prompt with its answer.

        Raises:
            ValueError: the tokenizer merges digits, so that texts of an exact length are impossible.
        """
        if self.joins_digits:
            raise ValueError(
                f"tokenizer {self._tokenizer.name_or_path!r} joins digits: expected one token for each, to train "
                "on pass keys; tokenizers trained by a recipe (tokenizer: 2048) have separate digits"
            )
        return self.minimum_length + self.digits

    def draw_text(self, length: int, generator: torch.Generator) -> PasskeySample:
        """Draw a training text, with the needle at a random depth.

        Args:
            length: Tokens of the whole text, including its answer; at least `shortest_text`.
            generator: Generator of the depth and of all draws of `sample`.
        """
        depth = float(torch.rand((), generator=generator))
        return self.sample(length - self.digits, depth, generator)

    def sample(self, length: int, depth: float, generator: torch.Generator) -> PasskeySample:
        """Make one text with a random pass key.

        Args:
            length: Tokens of the prompt, including the question but not the answer.
            depth: Place of the needle in the filler, from 0 (before all filler) to 1 (after). The needle follows
                ``round(depth * filler_length)`` tokens of filler.
            generator: Generator of the pass key, the decoys and, for filler from a corpus, the window.

        Raises:
            ValueError: ``length`` is below `minimum_length`, or ``depth`` is outside [0, 1].
        """
        if length < self.minimum_length:
            raise ValueError(f"length must be at least minimum_length, {self.minimum_length} tokens; it is {length}")
        if not 0 <= depth <= 1:
            raise ValueError(f"depth must be from 0 to 1; it is {depth}")
        # Keep the order of draws, so that a seed always gives the same text.
        filler = self._draw_filler(length - self.minimum_length + self._slack, generator)
        if self._decoys and not self._decoy_overlap:
            filler = self._with_decoys(filler, None, generator)
        smallest = 10 ** (self.digits - 1)
        key = int(torch.randint(smallest, 10 * smallest, (), generator=generator))
        if self._decoys and self._decoy_overlap:
            filler = self._with_decoys(filler, str(key), generator)
        needle, question, answer = self._parts(str(key))
        room = length - self._instruction.numel() - needle.numel() - question.numel()
        if not 0 <= room <= filler.numel():
            raise ValueError(
                f"tokenizer {self._tokenizer.name_or_path!r} gives the sentence of pass key {key} {needle.numel()} "
                f"tokens: expected at most {self._longest_needle}, and at most {self._slack} fewer"
            )
        filler = filler[:room]
        before = round(depth * filler.numel())
        tokens = torch.cat([self._instruction, filler[:before], needle, filler[before:], question, answer])
        needle_start = self._instruction.numel() + before
        return PasskeySample(
            tokens=tokens,
            answers=((length, tokens.numel()),),
            needle_start=needle_start,
            needle_end=needle_start + needle.numel(),
            question_start=length - question.numel(),
            key=key,
        )

    def _parts(self, key: str) -> tuple[Tensor, Tensor, Tensor]:
        """Return the needle, the question without its answer, and the answer."""
        question = _encode(self._tokenizer, self._question_text.format(key=key))
        start = self._question.numel()
        if not torch.equal(question[:start], self._question):
            raise ValueError(
                f"tokenizer {self._tokenizer.name_or_path!r} encodes the words before the pass key {key} differently "
                "than before other keys: expected the same tokens in every text"
            )
        return _encode(self._tokenizer, self._needle_text.format(key=key)), self._question, question[start:]

    def _draw_filler(self, filler_length: int, generator: torch.Generator) -> Tensor:
        size, start = self._filler.numel(), 0
        if self._varies:
            # A window longer than the documents starts anywhere and wraps around.
            places = size if filler_length > size else size - filler_length + 1
            start = int(torch.randint(places, (), generator=generator))
        return self._filler[(start + torch.arange(filler_length)) % size]

    def _with_decoys(self, filler: Tensor, key: str | None, generator: torch.Generator) -> Tensor:
        """Replace some of the filler with numbers, some of them similar to ``key`` if given."""
        filler, digits = filler.clone(), torch.tensor(self._digit_tokens)
        for _ in range(int(torch.randint(self._decoys + 1, (), generator=generator))):
            size = int(torch.randint(1, _LONGEST_DECOY + 1, (), generator=generator))
            part = "" if key is None else self._part_of(key, generator)
            size = max(size, len(part))
            if size <= filler.numel():
                start = int(torch.randint(filler.numel() - size + 1, (), generator=generator))
                number = digits[torch.randint(10, (size,), generator=generator)]
                number[: len(part)] = digits[[int(digit) for digit in part]]
                filler[start : start + size] = number
        return filler

    def _part_of(self, key: str, generator: torch.Generator) -> str:
        """Return consecutive digits of a key followed by a wrong digit, or an empty string."""
        if float(torch.rand((), generator=generator)) >= self._decoy_overlap:
            return ""
        size = int(torch.randint(1, max(2, self.digits), (), generator=generator))
        start = int(torch.randint(self.digits - size + 1, (), generator=generator))
        step = int(torch.randint(1, 10, (), generator=generator))
        following = key[start + size] if start + size < self.digits else key[0]
        return key[start : start + size] + str((int(following) + step) % 10)


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> Tensor:
    return torch.tensor(tokenizer.encode(text, add_special_tokens=False), dtype=torch.int64)


class PasskeyRetrieval(Retrieval):
    """Ask for a pass key (:class:`PasskeyTexts`). A text counts if greedy decoding gives all digits.

    The task name selects the texts. ``passkey`` and ``passkey_8`` use the long wording and repeated sentences.
    ``passkey_sentence`` and ``passkey_corpus`` use the short wording of training recipes.
    """

    def __init__(self, name: str, setting: Setting) -> None:
        super().__init__(name, setting)
        self._corpus = None if name in ("passkey", "passkey_8", "passkey_sentence") else self.texts.corpus
        self._wording = "long" if name in ("passkey", "passkey_8") else "short"
        self._texts = PasskeyTexts(
            self.subject.tokenizer,
            None if self._corpus is None else self._corpus.stream,
            digits=LONGEST_KEY if name == "passkey_8" else ANSWER_LENGTH,
            wording=self._wording,
        )
        self._beginning = self.subject.beginning()
        # With merged digits: one token for the space before the number, and one to see that the number ends.
        self._answer_tokens = self._texts.digits + (2 if self._texts.joins_digits else 0)

    def text_identity(self) -> dict[str, Any]:
        """Return everything that determines the texts."""
        filler = {"filler": "sentence"} if self._corpus is None else self._corpus.description()
        return {"digits": self._texts.digits, "wording": self._wording} | filler

    def check_length(self, length: int) -> None:
        """Raise a ValueError if the length leaves no room for filler."""
        shortest = self._texts.minimum_length + len(self._beginning)
        if length < shortest:
            raise ValueError(
                f"lengths: {length} tokens for the task {self.name!r}; with this tokenizer its texts have at least "
                f"{shortest} tokens"
            )

    def tokens_read(self, length: int) -> int:
        """Return the tokens of prompt and answer except for the last, which the model generates but does not read."""
        return length + self._answer_tokens - 1

    def question(self, length: int, depth: float | None, seed: int) -> Question:
        """Make a text with a number at this depth, and the question for the number."""
        assert depth is not None
        generator = torch.Generator().manual_seed(seed)
        sample = self._texts.sample(length - len(self._beginning), depth, generator)
        prompt = torch.cat([self._beginning, sample.prompt])
        # With merged digits, other tokens may spell the same number, so the decoded text is scored.
        answer = None if self._texts.joins_digits else sample.answer
        needle = sample.needle_start + len(self._beginning), sample.needle_end + len(self._beginning)
        return Question(prompt, (str(sample.key),), self._answer_tokens, answer, needle=needle)

    def score(self, output: str, expected: Sequence[str]) -> float:
        """Return 1 if the continuation starts with exactly this number, else 0."""
        (key,) = expected
        output = output.lstrip()
        return float(output.startswith(key) and not output[len(key) : len(key) + 1].isdigit())


@torch.no_grad()
def needle_weights(model: PreTrainedModel, prompt: Tensor, needle: tuple[int, int], *, chunk: int) -> list[list[float]]:
    """Return the attention weight of a prompt's last token on the needle, ``Σ_{j in needle} p_Lj``.

    Args:
        model: causal language model in evaluation mode that :func:`observed_attention` supports.
        prompt: token ids ``(L,)``. At least two.
        needle: indices of the needle's first token and of the token after the needle.
        chunk: tokens per forward pass.

    Returns:
        One number from 0 to 1 for each head of each layer.
    """
    cache = DynamicCache(config=model.config)
    for _ in chunked_logits(model, prompt[None, :-1], chunk=chunk, keep=1, cache=cache):
        pass
    weights: list[list[float]] = []

    def see(layer: LayerAttention) -> None:
        of_keys = reference(layer.problem)[2][0, :, -1]
        # A sliding window keeps only the last keys.
        gone = len(prompt) - of_keys.shape[-1]
        weights.append(of_keys[:, max(0, needle[0] - gone) : max(0, needle[1] - gone)].sum(-1).tolist())

    with observed_attention(model, see):
        model(prompt[None, -1:].to(model.device), cache=cache, use_cache=True)
    return weights


class PasskeyWeight(PasskeyRetrieval):
    """Measure each head's attention from the question's last token to the pass key."""

    stops_after_zeros = False

    def tokens_read(self, length: int) -> int:
        """Return the tokens of the prompt; the answer is not read."""
        return length

    def check(self) -> None:
        """Raise a ValueError if the task cannot be measured, or the model's attention cannot be observed."""
        super().check()
        with observed_attention(self.subject.model, lambda layer: None):
            pass

    def groups(self, length: int) -> Iterator[Sequence[Unit]]:
        """Yield each text in a group of its own."""
        for group in super().groups(length):
            yield from ([unit] for unit in group)

    def ask(self, length: int, units: Sequence[Unit]) -> list[Record]:
        """Return the weights of all heads, one list per layer."""
        ((unit,), (question,)) = units, self.questions(length, units)
        assert question.needle is not None
        weights = needle_weights(self.subject.model, question.prompt, question.needle, chunk=self.setting.chunk)
        return [self.place(unit, question) | {"weights": [[round(weight, 7) for weight in layer] for layer in weights]}]
