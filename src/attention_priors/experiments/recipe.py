"""Recipes: what a comparison trains and tests, checked before any work is done."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from attention_priors.data import ANSWER_LENGTH, EMBEDDED
from attention_priors.encodings import LearnedTable, Rotary
from attention_priors.evaluation import EvaluationSettings
from attention_priors.models.decoder import PriorDecoderConfig
from attention_priors.strict_yaml import Strict, explain, read_strictly
from attention_priors.training import DecoderSettings, DecoderSizes, PositionSettings, TrainingSettings


class CorpusSettings(Strict):
    """The text to train and test on."""

    source: str = EMBEDDED
    """``embedded``, or the path of a text file or of a folder of text files."""
    max_characters: int | None = Field(default=None, gt=0)
    """Train on so much of it at most; the held-out part is always whole."""


class MixtureSettings(TrainingSettings):
    """A training, and the mixture of rows that it reads. Lengths are in tokens."""

    passkey_ratio: float = Field(default=0.0, ge=0, le=1)
    """Share of rows that begin with a passkey text."""
    passkey_filler: Literal["corpus", "sentence"] = "corpus"
    passkey_minimum_length: int | None = Field(default=None, gt=0)
    """Shortest passkey text, its answer included; the shortest there is by default."""
    passkey_decoys: int = Field(default=0, ge=0)
    """Up to so many other numbers are strewn into the filler of each passkey text."""
    passkey_answer_weight: float = Field(default=1.0, gt=0)
    """Weight of an answer token's loss; every other token has weight 1."""


class EvaluationChanges(Strict):
    """What is changed in a trained model before it is tested."""

    window: int | None = Field(default=None, gt=0)
    """Add a window of so many tokens to every layer ("RoPE local")."""
    base_multiplier: float | None = Field(default=None, gt=0)
    """Multiply the base of rotary positions."""


class Scheme(PositionSettings):
    """One way to put positions into the model. Everything else is the same for all schemes of a recipe."""

    training: dict[str, Any] = Field(default_factory=dict)
    """Settings of the training that differ for this scheme."""
    at_evaluation: EvaluationChanges = EvaluationChanges()


class Recipe(Strict):
    """A comparison: every scheme is trained on the same rows and tested on the same texts, seed by seed."""

    name: str = Field(min_length=1)
    description: str = ""
    corpus: CorpusSettings = CorpusSettings()
    tokenizer: Annotated[int, Field(gt=256)] | str = 2048
    """Entries of a byte-level BPE trained on the corpus, or a tokenizer's path or Hugging Face name."""
    model: DecoderSizes
    training: MixtureSettings
    evaluation: EvaluationSettings
    seeds: tuple[Annotated[int, Field(ge=0, lt=2**32)], ...] = Field(default=(0,), min_length=1)
    threads_per_run: int = Field(default=1, gt=0)
    schemes: dict[str, Scheme] = Field(min_length=1)

    @field_validator("seeds")
    @classmethod
    def _distinct(cls, seeds: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(seeds)) < len(seeds):
            raise ValueError(f"seeds must be distinct, got {list(seeds)}")
        return seeds

    @field_validator("schemes")
    @classmethod
    def _distinct_folders(cls, schemes: dict[str, Scheme]) -> dict[str, Scheme]:
        folders: dict[str, str] = {}
        for name in schemes:
            other = folders.setdefault(folder_name(name), name)
            if other != name:
                raise ValueError(f"schemes {other!r} and {name!r} would share the folder {folder_name(name)!r}")
        return schemes

    @model_validator(mode="after")
    def _possible(self) -> Recipe:
        for name in self.schemes:
            try:
                self.training_of(name)
            except ValidationError as error:
                raise ValueError(f"schemes.{name}.training: {explain(error, MixtureSettings)}") from error
        for name, scheme in self.schemes.items():
            try:
                config = self.config_of(name, vocab_size=1)
            except ValueError as error:
                raise ValueError(f"schemes.{name}: {error}") from error
            encoding = config.make_encoding()
            if isinstance(encoding, LearnedTable) and encoding.max_length < self.longest_text:
                raise ValueError(
                    f"schemes.{name}.encoding: the learned table has max_length={encoding.max_length} positions, "
                    f"but this recipe reads texts of {self.longest_text} tokens"
                )
            if scheme.at_evaluation.base_multiplier is not None and not isinstance(encoding, Rotary):
                raise ValueError(
                    f"schemes.{name}.at_evaluation.base_multiplier needs the encoding 'rotary', got {scheme.encoding!r}"
                )
        return self

    @property
    def longest_text(self) -> int:
        """Tokens of the longest text that any scheme reads."""
        lengths = [self.training_of(name).context_length for name in self.schemes]
        if self.evaluation.passkey is not None:
            lengths += [length + ANSWER_LENGTH for length in self.evaluation.passkey.lengths]
        if self.evaluation.perplexity is not None:
            lengths.append(self.evaluation.perplexity.length)
        return max(lengths)

    def training_of(self, scheme: str) -> MixtureSettings:
        """The training settings of one scheme."""
        own = self.schemes[scheme].training
        return MixtureSettings.model_validate(self.training.model_dump() | own) if own else self.training

    def config_of(self, scheme: str, *, vocab_size: int, eos_token_id: int | None = None) -> PriorDecoderConfig:
        """The model of one scheme."""
        positions = self.schemes[scheme].model_dump(include=set(PositionSettings.model_fields))
        return DecoderSettings(**self.model.model_dump(), **positions).config(
            vocab_size=vocab_size, eos_token_id=eos_token_id
        )


def folder_name(scheme: str) -> str:
    """A scheme's name as the name of a folder."""
    return re.sub(r"[^A-Za-z0-9._+-]+", "_", scheme).strip(".") or "_"


def load_recipe(path: Path) -> Recipe:
    """Read and check a recipe.

    Raises:
        RecipeError: if the file is not YAML, or a key or value is impossible; it names the key, its value and
            what is allowed.
        FileNotFoundError: if there is no such file.
    """
    return read_strictly(path, Recipe)
