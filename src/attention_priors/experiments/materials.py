"""What every run of a recipe reads: the corpus, the tokenizer, and the texts made of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from attention_priors.data import (
    EMBEDDED,
    Corpus,
    PasskeyTask,
    TokenStream,
    TrainingMixture,
    load_corpus,
    load_tokenizer,
    token_stream,
    tokenizer_fingerprint,
)
from attention_priors.experiments.recipe import MixtureSettings, Recipe
from attention_priors.strict_yaml import RecipeError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
    def held_out_stream(self) -> TokenStream:
        """The documents to test on."""
        return token_stream(self.tokenizer, self.corpus.held_out)

    def training_rows(self, settings: MixtureSettings, seed: int) -> TrainingMixture:
        """The rows that one training reads."""
        task = None
        if settings.passkey_ratio > 0:
            filler = self.train_stream if settings.passkey_filler == "corpus" else None
            task = PasskeyTask(self.tokenizer, filler, decoys=settings.passkey_decoys)
        return TrainingMixture(
            self.train_stream,
            context_length=settings.context_length,
            num_rows=settings.total_rows,
            seed=seed,
            passkey_task=task,
            passkey_ratio=settings.passkey_ratio,
            passkey_min_length=settings.passkey_minimum_length,
            answer_weight=settings.passkey_answer_weight,
        )

    def passkey_task(self) -> PasskeyTask:
        """The passkey texts to test on, with held-out filler."""
        assert self.recipe.evaluation.passkey is not None
        filler = self.recipe.evaluation.passkey.filler
        return PasskeyTask(self.tokenizer, self.held_out_stream if filler == "corpus" else None)

    def perplexity_texts(self) -> list[Tensor]:
        """The beginnings of held-out documents that are long enough."""
        settings = self.recipe.evaluation.perplexity
        assert settings is not None
        _, lengths = self.held_out_stream.document_ids.unique_consecutive(return_counts=True)
        texts = [text[: settings.length] for text in self.held_out_stream.tokens.split(lengths.tolist())]
        return [text for text in texts if len(text) == settings.length][: settings.documents]

    def check(self) -> None:
        """Raise a RecipeError if some text that the recipe asks for cannot be made."""
        for name in self.recipe.schemes:
            try:
                self.training_rows(
                    self.recipe.training_of(name).model_copy(update={"steps": 1, "tokens": None}), seed=0
                )
            except ValueError as error:
                raise RecipeError(f"schemes.{name}: {error}") from error
        evaluation = self.recipe.evaluation
        if evaluation.passkey is not None:
            task = self.passkey_task()
            for length in evaluation.passkey.lengths:
                if length < task.minimum_length or length > (task.maximum_length or length):
                    raise RecipeError(
                        f"evaluation.passkey.lengths: {length} tokens; with this tokenizer and filler a text has "
                        f"at least {task.minimum_length} and at most {task.maximum_length or 'any number of'} tokens"
                    )
        if evaluation.perplexity is not None and not self.perplexity_texts():
            raise RecipeError(
                f"evaluation.perplexity.length: no held-out document of corpus {self.corpus.name!r} has "
                f"{evaluation.perplexity.length} tokens"
            )
