"""Training rows and test texts of runs, from a corpus or a synthetic task."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attention_priors.lab.data import (
    RetrievalShare,
    TokenStream,
    TrainingMixture,
    load_corpus,
    token_stream,
    tokenizer_fingerprint,
)
from attention_priors.lab.data.corpora import left_out
from attention_priors.lab.data.packing import packed_row
from attention_priors.lab.data.tokenizer import load_tokenizer
from attention_priors.lab.evaluate.evaluate import check_plan
from attention_priors.lab.strict_yaml import RecipeError, errors_at
from attention_priors.lab.study.recipe import MixtureSettings, Recipe
from attention_priors.lab.tasks import (
    CopyMixture,
    CopyMixtureRows,
    EvaluationPlan,
    Haystack,
    PasskeyTexts,
    RulerTexts,
    Subject,
)
from attention_priors.lab.tasks.copying import HELD_OUT_SEED
from attention_priors.lab.tasks.passkey import ANSWER_LENGTH
from attention_priors.lab.tasks.ruler import RULER_TASKS
from attention_priors.lab.tasks.ruler.needles import NeedleSettings
from attention_priors.lab.tasks.ruler.settings import RulerSettings
from attention_priors.lab.train.recipe import MODEL, check_model, files_fingerprint
from attention_priors.models.decoder import PriorDecoderForCausalLM

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

HELD_OUT_TOKENS = 65536
"""Largest number of held-out tokens for the losses before and after a context extension."""

Rows = torch.utils.data.Dataset[dict[str, Tensor]]


class Materials(ABC):
    """Data that a recipe's models read, chosen by the recipe's ``corpus``.

    Attributes:
        recipe: Recipe of the comparison.
        fingerprints: Hashes that identify the data.
        description: Name, fingerprint and sizes for results.
        vocabulary: ``vocab_size`` and ``eos_token_id`` of a model's config.
        saved_tokenizer: Tokenizer to save with a model. None if the tokens do not represent text.
        left_out: Message about unused files. None if all files are used.
    """

    fingerprints: Mapping[str, str]
    description: Mapping[str, Any]
    vocabulary: Mapping[str, Any]
    saved_tokenizer: PreTrainedTokenizerBase | None = None
    left_out: str | None = None

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self._checked: list[EvaluationPlan] = []

    @staticmethod
    def load(recipe: Recipe, cache: Path) -> Materials:
        """Load the corpus, and train its tokenizer unless ``cache`` holds it."""
        task = recipe.corpus.copy_mixture
        return TextMaterials(recipe, cache) if task is None else CopyMixtureMaterials(recipe, task)

    @abstractmethod
    def training_rows(self, settings: MixtureSettings, seed: int) -> Rows:
        """Return the rows of one training.

        Raises:
            ValueError: the rows cannot be made.
        """

    @abstractmethod
    def held_out_rows(self, length: int) -> Iterator[dict[str, Tensor]]:
        """Return held-out rows of this length for measuring a loss, at most :data:`HELD_OUT_TOKENS` tokens.

        Raises:
            ValueError: no row has this length.
        """

    @abstractmethod
    def texts(self, length: int, count: int) -> list[Tensor]:
        """Return held-out texts of this length, one text per row; fewer than ``count`` if not enough are available.

        Raises:
            ValueError: no text has this length.
        """

    @abstractmethod
    def subject(self, scheme: str, model: PreTrainedModel) -> Subject:
        """Return a model as the subject of an evaluation.

        Args:
            scheme: Name of the model.
            model: Model to evaluate.
        """

    def check(self) -> None:
        """Raise a RecipeError if the data for a part of the recipe cannot be made."""
        recipe = self.recipe
        for name in recipe.schemes:
            for model in recipe.models_of(name):
                place = f"schemes.{name}{model.section}"
                if model.training is not None:
                    with errors_at(place):
                        self.training_rows(model.training.model_copy(update={"steps": 1, "tokens": None}), seed=0)
                if model.way is not None:
                    with errors_at(f"{place}.context_length"):
                        self.held_out_rows(model.context_length)
        for name in recipe.schemes:
            self._check_evaluation(name)

    def _without_weights(self, scheme: str) -> PreTrainedModel:
        """Make a model of the right kind and size, which is enough to check a plan."""
        if self.recipe.pretrained is None:
            with torch.device("meta"):
                return PriorDecoderForCausalLM(self.recipe.config_of(scheme, **self.vocabulary))
        with errors_at(f"schemes.{scheme}"):
            length = self.recipe.training_of(scheme).context_length
            return check_model(
                self.recipe.start_of(scheme), length=length, tokenizer_size=self.vocabulary["vocab_size"]
            )

    def _check_evaluation(self, scheme: str) -> None:
        recipe = self.recipe
        place = f"schemes.{scheme}.evaluation" if recipe.schemes[scheme].evaluation else "evaluation"
        evaluation = recipe.evaluation_of(scheme)
        for name, plan in recipe.plans_of(scheme):
            strict = plan.model_copy(update={"minimum_documents": plan.minimum_documents or plan.documents})
            if strict in self._checked:
                continue
            model = self._without_weights(scheme)
            preset = plan.tasks[0].partition("_")[0]
            with errors_at(f"{place}.{preset if name is None else f'plans.{name}'}"):
                check_plan(self.subject(scheme, model), strict, chunk=evaluation.chunk)
            self._checked.append(strict)
        sinks = evaluation.sink_mass
        if sinks is not None:
            with errors_at(f"{place}.sink_mass.length"):
                found = len(self.texts(sinks.length, sinks.texts))
            if found < sinks.texts:
                raise RecipeError(
                    f"{place}.sink_mass.texts: the held-out part of the corpus has {found} of the {sinks.texts} texts "
                    f"of {sinks.length} tokens: set texts: {found} or a shorter length"
                )


class TextMaterials(Materials):
    """Text corpus and its tokenizer.

    Args:
        recipe: Recipe of the comparison.
        cache: Folder of trained tokenizers and encoded texts.
    """

    def __init__(self, recipe: Recipe, cache: Path) -> None:
        super().__init__(recipe)
        assert recipe.corpus.source is not None
        assert recipe.tokenizer is not None
        corpus = self.corpus = load_corpus(recipe.corpus.source, max_characters=recipe.corpus.max_characters)
        self.tokenizer = self.saved_tokenizer = load_tokenizer(recipe.tokenizer, corpus, cache)
        self.vocabulary = {"vocab_size": len(self.tokenizer), "eos_token_id": self.tokenizer.eos_token_id}
        self.fingerprints = {
            "corpus_fingerprint": corpus.fingerprint,
            "tokenizer_fingerprint": tokenizer_fingerprint(self.tokenizer),
        }
        if recipe.pretrained is not None:
            self.fingerprints["pretrained"] = files_fingerprint(recipe.pretrained, MODEL) or recipe.pretrained
        self.description = {
            "name": corpus.name,
            "fingerprint": corpus.fingerprint,
            "train_characters": sum(len(document.text) for document in corpus.train),
            "held_out_characters": sum(len(document.text) for document in corpus.held_out),
        }
        self.left_out = left_out(corpus.name, corpus.skipped)
        self._ruler_texts: dict[RulerSettings, RulerTexts] = {}
        self._read: dict[str, Any] = {}
        self._cache = cache

    @cached_property
    def train_stream(self) -> TokenStream:
        """Tokens of the training documents."""
        return token_stream(self.tokenizer, self.corpus.train, self._cache)

    @cached_property
    def held_out_stream(self) -> TokenStream:
        """Tokens of the held-out documents."""
        return token_stream(self.tokenizer, self.corpus.held_out, self._cache)

    @cached_property
    def _train_haystack(self) -> Haystack:
        return Haystack.of(f"{self.corpus.name} (train)", self.corpus.train)

    def training_rows(self, settings: MixtureSettings, seed: int) -> TrainingMixture:
        """Return the rows of one training."""
        return TrainingMixture(
            self.train_stream,
            context_length=settings.context_length,
            num_rows=settings.total_rows,
            seed=seed,
            retrieval=[*self._shares(settings)],
        )

    def _shares(self, settings: MixtureSettings) -> Iterator[RetrievalShare]:
        if settings.passkey_ratio:
            texts = PasskeyTexts(
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
        tasks, least = settings.needle_tasks or (), settings.needle_minimum_length
        for task in tasks:
            questions, restatements = settings.needle_questions, settings.needle_restatements
            while (
                texts := self._ruler(task, questions, restatements)
            ).shortest_text > settings.context_length and questions > 1:
                questions -= 1
            yield RetrievalShare(
                texts,
                (settings.needle_ratio or 0.0) / len(tasks),
                None if least is None else max(least, texts.shortest_text),
                settings.needle_answer_weight or settings.passkey_answer_weight,
            )

    def _ruler(self, task: str, questions: int, restatements: int) -> RulerTexts:
        settings = RULER_TASKS[task]
        if isinstance(settings, NeedleSettings):
            settings = replace(settings, num_questions=questions, num_restatements=restatements)
        if settings not in self._ruler_texts:  # shared by all schemes, because creation is slow
            self._ruler_texts[settings] = RulerTexts(self.tokenizer, settings, self._train_haystack, name=task)
        return self._ruler_texts[settings]

    def subject(self, scheme: str, model: PreTrainedModel) -> Subject:
        """Return the model with its tokenizer and the corpus that holds its test texts."""
        assert self.recipe.corpus.source is not None
        trained_on = (self.recipe.corpus.source, self.corpus)
        return Subject(scheme, model, self.tokenizer, trained_on, read=self._read, cache_dir=self._cache)

    def texts(self, length: int, count: int) -> list[Tensor]:
        """Return the beginnings of held-out documents that are long enough."""
        _, lengths = self.held_out_stream.document_ids.unique_consecutive(return_counts=True)
        documents = self.held_out_stream.tokens.split(lengths.tolist())
        texts = [text[:length] for text in documents if len(text) >= length]
        if not texts:
            raise ValueError(f"no held-out document of corpus {self.corpus.name!r} has {length} tokens")
        return texts[:count]

    def held_out_rows(self, length: int) -> Iterator[dict[str, Tensor]]:
        """Return the held-out documents, up to :data:`HELD_OUT_TOKENS`, as packed rows of this length."""
        stream = self.held_out_stream
        if len(stream) < length:
            raise ValueError(
                f"corpus {self.corpus.name!r} has {len(stream)} held-out tokens, fewer than a row of {length}"
            )
        starts = range(0, min(len(stream), max(HELD_OUT_TOKENS, length)) - length + 1, length)
        parts = (slice(start, start + length) for start in starts)
        return (packed_row(stream.tokens[part], stream.document_ids[part]) for part in parts)


class CopyMixtureMaterials(Materials):
    """Rows drawn from GOAT's copy-mixture task, whose tokens do not represent text.

    Args:
        recipe: Recipe of the comparison.
        task: Task from which rows are drawn.
    """

    def __init__(self, recipe: Recipe, task: CopyMixture) -> None:
        super().__init__(recipe)
        self.task = task
        (text,) = self.texts(256, 1)
        # Hash some rows, because another random number generator would draw different rows.
        self.fingerprints = {"corpus_fingerprint": hashlib.sha256(bytes(str(text.tolist()), "ascii")).hexdigest()}
        self.vocabulary = {"vocab_size": task.vocabulary_size, "eos_token_id": None}
        self.description = {
            "name": "copy mixture",
            "fingerprint": self.fingerprints["corpus_fingerprint"],
            "vocabulary_size": task.vocabulary_size,
            "lag": task.lag,
            "shares": task.shares,
        }

    def training_rows(self, settings: MixtureSettings, seed: int) -> CopyMixtureRows:
        """Return the rows of a seed."""
        for name, share in (("passkey_ratio", settings.passkey_ratio), ("needle_ratio", settings.needle_ratio)):
            if share:
                raise ValueError(f"{name}={share} needs a text corpus; the corpus is copy_mixture")
        return self._rows(settings.context_length, settings.total_rows, seed)

    def held_out_rows(self, length: int) -> Iterator[dict[str, Tensor]]:
        """Return rows with :data:`HELD_OUT_TOKENS` tokens in total."""
        rows = self._rows(length, max(1, HELD_OUT_TOKENS // length), HELD_OUT_SEED)
        return (rows[index] for index in range(len(rows)))

    def texts(self, length: int, count: int) -> list[Tensor]:
        """Return the tokens of rows."""
        rows = self._rows(length, count, HELD_OUT_SEED)
        return [rows.sample(index).tokens for index in range(count)]

    def subject(self, scheme: str, model: PreTrainedModel) -> Subject:
        """Return the model with its training mixture, without a tokenizer."""
        return Subject(scheme, model, None, mixture=self.task)

    def _rows(self, length: int, count: int, seed: int) -> CopyMixtureRows:
        return CopyMixtureRows(self.task, context_length=length, num_rows=count, seed=seed)
