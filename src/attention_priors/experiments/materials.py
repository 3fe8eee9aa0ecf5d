"""What every run of a recipe reads: the corpus, the tokenizer, and the texts made of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attention_priors.data import (
    EMBEDDED,
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
from attention_priors.data.packing import packed_row
from attention_priors.evaluation import (
    EvaluationPlan,
    EvaluationSettings,
    PasskeySettings,
    PerplexitySettings,
    Subject,
    check_plan,
)
from attention_priors.experiments.recipe import MixtureSettings, Recipe
from attention_priors.models.decoder import PriorDecoderForCausalLM
from attention_priors.strict_yaml import RecipeError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HELD_OUT_TOKENS = 65536
"""Losses before and after a context extension are measured on so many held-out tokens at most."""


@dataclass(frozen=True)
class Materials:
    """A recipe's corpus and tokenizer."""

    recipe: Recipe
    corpus: Corpus
    tokenizer: PreTrainedTokenizerBase

    @classmethod
    def load(cls, recipe: Recipe, cache: Path) -> Materials:
        """Load the corpus, and train the tokenizer unless ``cache`` holds it already."""
        source = recipe.corpus.source
        corpus = load_corpus(
            source if source == EMBEDDED else Path(source), max_characters=recipe.corpus.max_characters
        )
        return cls(recipe, corpus, load_tokenizer(recipe.tokenizer, corpus, cache))

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
        return Haystack(f"{self.corpus.name} (train)", " ".join(document.text for document in self.corpus.train))

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

    def perplexity_texts(self, settings: PerplexitySettings) -> list[Tensor]:
        """The beginnings of held-out documents that are long enough."""
        _, lengths = self.held_out_stream.document_ids.unique_consecutive(return_counts=True)
        texts = [text[: settings.length] for text in self.held_out_stream.tokens.split(lengths.tolist())]
        return [text for text in texts if len(text) == settings.length][: settings.documents]

    def held_out_rows(self, length: int) -> Iterator[dict[str, Tensor]]:
        """The held-out documents, up to :data:`HELD_OUT_TOKENS`, cut into packed rows of a length."""
        stream = self.held_out_stream
        for start in range(0, min(len(stream), max(HELD_OUT_TOKENS, length)) - length + 1, length):
            part = slice(start, start + length)
            yield packed_row(stream.tokens[part], stream.document_ids[part])

    def check(self) -> None:
        """Raise a RecipeError if some text that the recipe asks for cannot be made."""
        recipe = self.recipe
        for name in recipe.schemes:
            self._check_rows(f"schemes.{name}", recipe.training_of(name))
            for way, extension in recipe.extensions_of(name).items():
                place = f"schemes.{name}.extensions.{way}"
                if extension.training is not None:
                    self._check_rows(place, extension.training)
                if len(self.held_out_stream) < extension.context_length:
                    raise RecipeError(
                        f"{place}.context_length: corpus {self.corpus.name!r} holds out {len(self.held_out_stream)} "
                        f"tokens, fewer than a row of {extension.context_length}"
                    )
        self._check_plans()
        self._check_evaluation("", recipe.evaluation)
        for name, scheme in recipe.schemes.items():
            if scheme.evaluation:
                self._check_evaluation(f"schemes.{name}.", recipe.evaluation_of(name))

    def _check_plans(self) -> None:
        end: Any = self.tokenizer.eos_token_id
        checked: list[EvaluationPlan] = []
        for scheme in self.recipe.schemes:
            for name, plan in self.recipe.evaluation_of(scheme).plans.items():
                if plan in checked:
                    continue
                # What a plan needs of a model is its kind; a model of its size has no weights here yet.
                with torch.device("meta"):
                    model = PriorDecoderForCausalLM(
                        self.recipe.config_of(scheme, vocab_size=len(self.tokenizer), eos_token_id=end)
                    )
                try:
                    check_plan(Subject(scheme, model, self.tokenizer), plan)
                except ValueError as error:
                    raise RecipeError(f"evaluation.plans.{name}: {error}") from error
                checked.append(plan)

    def _check_rows(self, place: str, settings: MixtureSettings) -> None:
        try:
            self.training_rows(settings.model_copy(update={"steps": 1, "tokens": None}), seed=0)
        except ValueError as error:
            raise RecipeError(f"{place}: {error}") from error

    def _check_evaluation(self, place: str, evaluation: EvaluationSettings) -> None:
        if evaluation.passkey is not None:
            task = self.passkey_task(evaluation.passkey)
            for length in evaluation.passkey.lengths:
                if length < task.minimum_length:
                    raise RecipeError(
                        f"{place}evaluation.passkey.lengths: {length} tokens; with this tokenizer a text has at least "
                        f"{task.minimum_length} tokens"
                    )
        if evaluation.perplexity is not None and not self.perplexity_texts(evaluation.perplexity):
            raise RecipeError(
                f"{place}evaluation.perplexity.length: no held-out document of corpus {self.corpus.name!r} has "
                f"{evaluation.perplexity.length} tokens"
            )
