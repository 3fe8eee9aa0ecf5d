"""What every run of a recipe reads: rows to train on and texts to test on, made of a corpus or of a synthetic task."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attention_priors.lab.data import (
    ANSWER_LENGTH,
    CopyMixture,
    CopyMixtureRows,
    CopySample,
    Corpus,
    Haystack,
    NeedleTexts,
    PasskeyTask,
    RetrievalShare,
    TokenStream,
    TrainingMixture,
    load_corpus,
    load_tokenizer,
    token_stream,
    tokenizer_fingerprint,
)
from attention_priors.lab.data.corpora import left_out
from attention_priors.lab.data.packing import packed_row
from attention_priors.lab.evaluate import (
    CopyingSettings,
    EvaluationPlan,
    EvaluationSettings,
    PasskeySettings,
    Subject,
    check_plan,
)
from attention_priors.lab.strict_yaml import RecipeError
from attention_priors.lab.study.recipe import MixtureSettings, Recipe
from attention_priors.models.decoder import PriorDecoderForCausalLM

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HELD_OUT_TOKENS = 65536
"""Losses before and after a context extension are measured on so many held-out tokens at most."""


HELD_OUT_SEED = -1
"""Of synthetic rows to test on; no training has it."""

Rows = torch.utils.data.Dataset[dict[str, Tensor]]


class Materials(ABC):
    """What a recipe's models read. Which kind it is follows from the recipe's ``corpus``."""

    recipe: Recipe

    @staticmethod
    def load(recipe: Recipe, cache: Path) -> Materials:
        """Make everything ready: load the corpus, train its tokenizer unless ``cache`` holds it already."""
        task = recipe.corpus.copy_mixture
        return TextMaterials.read(recipe, cache) if task is None else CopyMixtureMaterials(recipe, task.task())

    # ---- what it is

    @property
    @abstractmethod
    def fingerprints(self) -> Mapping[str, str]:
        """What tells these materials from others that are described alike."""

    @property
    @abstractmethod
    def description(self) -> Mapping[str, Any]:
        """What the results say of it: name, fingerprint, sizes."""

    @property
    @abstractmethod
    def vocabulary(self) -> Mapping[str, Any]:
        """``vocab_size`` and ``eos_token_id`` of a model's config."""

    @property
    @abstractmethod
    def saved_tokenizer(self) -> PreTrainedTokenizerBase | None:
        """What is saved with a model; None where tokens stand for nothing."""

    @property
    def left_out(self) -> str | None:
        """What a user should know of files that are not used."""
        return None

    # ---- what is read

    @abstractmethod
    def training_rows(self, settings: MixtureSettings, seed: int) -> Rows:
        """The rows that one training reads.

        Raises:
            ValueError: they cannot be made.
        """

    @abstractmethod
    def held_out_rows(self, length: int) -> Iterator[dict[str, Tensor]]:
        """Rows of a length to measure a loss on; :data:`HELD_OUT_TOKENS` at most.

        Raises:
            ValueError: there is not one.
        """

    @abstractmethod
    def texts(self, length: int, count: int) -> list[Tensor]:
        """So many held-out texts of a length, without others packed beside them; fewer if there are no more.

        Raises:
            ValueError: there is not one.
        """

    @abstractmethod
    def passkey_task(self, settings: PasskeySettings) -> PasskeyTask:
        """The passkey texts to test on.

        Raises:
            ValueError: they cannot be made.
        """

    @abstractmethod
    def subject(self, scheme: str, model: PriorDecoderForCausalLM) -> Subject:
        """What is asked the questions of ``evaluation.plans``.

        Raises:
            ValueError: it cannot be asked any.
        """

    @abstractmethod
    def copying_task(self) -> CopyMixture:
        """The copy-mixture task.

        Raises:
            ValueError: this is none.
        """

    def copying_samples(self, settings: CopyingSettings, length: int) -> list[CopySample]:
        """The rows of a length to test copying on."""
        rows = max(1, settings.tokens // length)
        made = CopyMixtureRows(self.copying_task(), context_length=length, num_rows=rows, seed=HELD_OUT_SEED)
        return [made.sample(index) for index in range(rows)]

    # ---- whether it can be

    def check(self) -> None:
        """Raise a RecipeError if something that the recipe asks for cannot be made."""
        recipe = self.recipe
        for name in recipe.schemes:
            self._check_rows(f"schemes.{name}", recipe.training_of(name))
            for way, extension in recipe.extensions_of(name).items():
                place = f"schemes.{name}.extensions.{way}"
                if extension.training is not None:
                    self._check_rows(place, extension.training)
                with _at(f"{place}.context_length"):
                    self.held_out_rows(extension.context_length)
        self._check_plans()
        self._check_evaluation("", recipe.evaluation)
        for name, scheme in recipe.schemes.items():
            if scheme.evaluation:
                self._check_evaluation(f"schemes.{name}.", recipe.evaluation_of(name))

    def _check_rows(self, place: str, settings: MixtureSettings) -> None:
        with _at(place):
            self.training_rows(settings.model_copy(update={"steps": 1, "tokens": None}), seed=0)

    def _check_plans(self) -> None:
        checked: list[EvaluationPlan] = []
        for scheme in self.recipe.schemes:
            for name, plan in self.recipe.evaluation_of(scheme).plans.items():
                if plan in checked:
                    continue
                # What a plan needs of a model is its kind; a model of its size has no weights here yet.
                with torch.device("meta"):
                    model = PriorDecoderForCausalLM(self.recipe.config_of(scheme, **self.vocabulary))
                with _at(f"evaluation.plans.{name}"):
                    check_plan(self.subject(scheme, model), plan, chunk=self.recipe.evaluation_of(scheme).chunk)
                checked.append(plan)

    def _check_evaluation(self, place: str, evaluation: EvaluationSettings) -> None:
        place = f"{place}evaluation"
        if evaluation.passkey is not None:
            with _at(f"{place}.passkey"):
                task = self.passkey_task(evaluation.passkey)
            for length in evaluation.passkey.lengths:
                if length < task.minimum_length:
                    raise RecipeError(
                        f"{place}.passkey.lengths: {length} tokens; with this tokenizer a text has at least "
                        f"{task.minimum_length} tokens"
                    )
        if evaluation.copying is not None:
            with _at(f"{place}.copying"):
                self.copying_task()
        for name, settings in (("perplexity", evaluation.perplexity), ("sink_mass", evaluation.sink_mass)):
            if settings is not None:
                with _at(f"{place}.{name}.length"):
                    self.texts(settings.length, 1)


@contextmanager
def _at(place: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise RecipeError(f"{place}: {error}") from error


@dataclass(frozen=True)
class TextMaterials(Materials):
    """A corpus of text and its tokenizer."""

    recipe: Recipe
    corpus: Corpus
    tokenizer: PreTrainedTokenizerBase

    @classmethod
    def read(cls, recipe: Recipe, cache: Path) -> TextMaterials:
        """Load the corpus, and train the tokenizer unless ``cache`` holds it already."""
        source = recipe.corpus.source
        assert source is not None
        assert recipe.tokenizer is not None
        corpus = load_corpus(source, max_characters=recipe.corpus.max_characters)
        return cls(recipe, corpus, load_tokenizer(recipe.tokenizer, corpus, cache))

    @property
    def fingerprints(self) -> Mapping[str, str]:
        """Of the corpus and of the tokenizer."""
        return {"corpus_fingerprint": self.corpus.fingerprint, "tokenizer_fingerprint": self.tokenizer_fingerprint}

    @property
    def left_out(self) -> str | None:
        """Of the corpus' files."""
        return left_out(self.corpus.name, self.corpus.skipped)

    @property
    def description(self) -> Mapping[str, Any]:
        """The corpus and its sizes."""
        return {
            "name": self.corpus.name,
            "fingerprint": self.corpus.fingerprint,
            "train_characters": sum(len(document.text) for document in self.corpus.train),
            "held_out_characters": sum(len(document.text) for document in self.corpus.held_out),
        }

    @property
    def vocabulary(self) -> Mapping[str, Any]:
        """The tokenizer's."""
        return {"vocab_size": len(self.tokenizer), "eos_token_id": self.tokenizer.eos_token_id}

    @property
    def saved_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer."""
        return self.tokenizer

    @cached_property
    def tokenizer_fingerprint(self) -> str:
        """What tells this tokenizer from others of its name."""
        return tokenizer_fingerprint(self.tokenizer)

    @cached_property
    def train_stream(self) -> TokenStream:
        """The documents to train on."""
        return token_stream(self.tokenizer, self.corpus.train)

    @cached_property
    def train_haystack(self) -> Haystack:
        """The documents to train on, as the text that needles hide in."""
        return Haystack.of(f"{self.corpus.name} (train)", self.corpus.train)

    @cached_property
    def _needle_texts(self) -> dict[str, NeedleTexts]:
        """By task, what makes its texts to train on: all schemes share it, as it takes a moment to begin."""
        return {}

    @cached_property
    def held_out_stream(self) -> TokenStream:
        """The documents to test on."""
        return token_stream(self.tokenizer, self.corpus.held_out)

    def training_rows(self, settings: MixtureSettings, seed: int) -> TrainingMixture:
        """The rows that one training reads."""
        return TrainingMixture(
            self.train_stream,
            context_length=settings.context_length,
            num_rows=settings.total_rows,
            seed=seed,
            retrieval=[*self._passkey_shares(settings), *self._needle_shares(settings)],
        )

    def _passkey_shares(self, settings: MixtureSettings) -> Iterator[RetrievalShare]:
        if settings.passkey_ratio == 0:
            return
        texts = PasskeyTask(
            self.tokenizer,
            self.train_stream if settings.passkey_filler == "corpus" else None,
            decoys=settings.passkey_decoys,
            decoy_overlap=settings.passkey_decoy_overlap or 0.0,
            digits=settings.passkey_digits or ANSWER_LENGTH,
            wording=settings.passkey_wording or "short",
        )
        yield RetrievalShare(
            texts, settings.passkey_ratio, settings.passkey_minimum_length, settings.passkey_answer_weight
        )

    def _needle_shares(self, settings: MixtureSettings) -> Iterator[RetrievalShare]:
        if settings.needle_ratio is None or settings.needle_tasks is None:
            return
        for task in settings.needle_tasks:
            texts = self._needle_texts.get(task)
            if texts is None:
                texts = self._needle_texts[task] = NeedleTexts(self.tokenizer, task, self.train_haystack)
            least = settings.needle_minimum_length
            yield RetrievalShare(
                texts,
                settings.needle_ratio / len(settings.needle_tasks),
                None if least is None else max(least, texts.shortest_text),
                settings.needle_answer_weight or settings.passkey_answer_weight,
            )

    def passkey_task(self, settings: PasskeySettings) -> PasskeyTask:
        """The passkey texts to test on, with held-out filler."""
        return PasskeyTask(self.tokenizer, self.held_out_stream if settings.filler == "corpus" else None)

    def subject(self, scheme: str, model: PriorDecoderForCausalLM) -> Subject:
        """The model with its tokenizer, and the corpus whose held-out part it is asked about."""
        assert self.recipe.corpus.source is not None
        return Subject(scheme, model, self.tokenizer, (self.recipe.corpus.source, self.corpus))

    def copying_task(self) -> CopyMixture:
        """None: this is text."""
        raise ValueError("the corpus is a text; it needs corpus.copy_mixture")

    def texts(self, length: int, count: int) -> list[Tensor]:
        """The beginnings of held-out documents that are long enough."""
        _, lengths = self.held_out_stream.document_ids.unique_consecutive(return_counts=True)
        texts = [text[:length] for text in self.held_out_stream.tokens.split(lengths.tolist())]
        texts = [text for text in texts if len(text) == length]
        if not texts:
            raise ValueError(f"no held-out document of corpus {self.corpus.name!r} has {length} tokens")
        return texts[:count]

    def held_out_rows(self, length: int) -> Iterator[dict[str, Tensor]]:
        """The held-out documents, up to :data:`HELD_OUT_TOKENS`, cut into packed rows of a length."""
        stream = self.held_out_stream
        if len(stream) < length:
            raise ValueError(
                f"corpus {self.corpus.name!r} holds out {len(stream)} tokens, fewer than a row of {length}"
            )
        starts = range(0, min(len(stream), max(HELD_OUT_TOKENS, length)) - length + 1, length)
        parts = (slice(start, start + length) for start in starts)
        return (packed_row(stream.tokens[part], stream.document_ids[part]) for part in parts)


@dataclass(frozen=True)
class CopyMixtureMaterials(Materials):
    """GOAT's copy-mixture task: rows that are drawn, of tokens that stand for nothing."""

    recipe: Recipe
    task: CopyMixture

    @property
    def fingerprints(self) -> Mapping[str, str]:
        """Of some rows: another generator of random numbers would draw others."""
        (text,) = self.texts(256, 1)
        return {"corpus_fingerprint": hashlib.sha256(bytes(str(text.tolist()), "ascii")).hexdigest()}

    @property
    def description(self) -> Mapping[str, Any]:
        """The task, its shares and sizes."""
        return {
            "name": "copy mixture",
            "fingerprint": self.fingerprints["corpus_fingerprint"],
            "vocabulary_size": self.task.vocabulary_size,
            "lag": self.task.lag,
            "shares": self.task.shares,
        }

    @property
    def vocabulary(self) -> Mapping[str, Any]:
        """The task's."""
        return {"vocab_size": self.task.vocabulary_size, "eos_token_id": None}

    @property
    def saved_tokenizer(self) -> None:
        """None."""
        return None

    def training_rows(self, settings: MixtureSettings, seed: int) -> CopyMixtureRows:
        """Rows of a seed's own."""
        for name, share in (("passkey_ratio", settings.passkey_ratio), ("needle_ratio", settings.needle_ratio)):
            if share:
                raise ValueError(f"{name}={share} needs a corpus of text; it is copy_mixture")
        return self._rows(settings.context_length, settings.total_rows, seed)

    def held_out_rows(self, length: int) -> Iterator[dict[str, Tensor]]:
        """As many rows as hold :data:`HELD_OUT_TOKENS`."""
        rows = self._rows(length, max(1, HELD_OUT_TOKENS // length), HELD_OUT_SEED)
        return (rows[index] for index in range(len(rows)))

    def texts(self, length: int, count: int) -> list[Tensor]:
        """Rows."""
        rows = self._rows(length, count, HELD_OUT_SEED)
        return [rows.sample(index).tokens for index in range(count)]

    def passkey_task(self, settings: PasskeySettings) -> PasskeyTask:
        """None: there is no text."""
        raise ValueError("pass keys need a corpus of text; it is copy_mixture")

    def subject(self, scheme: str, model: PriorDecoderForCausalLM) -> Subject:
        """None: there is no tokenizer."""
        raise ValueError("plans need a corpus of text; it is copy_mixture")

    def copying_task(self) -> CopyMixture:
        """What the rows are drawn from."""
        return self.task

    def _rows(self, length: int, count: int, seed: int) -> CopyMixtureRows:
        return CopyMixtureRows(self.task, context_length=length, num_rows=count, seed=seed)
