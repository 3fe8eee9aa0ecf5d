"""Recipes: what a comparison trains and tests, checked before any work is done."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from attention_priors.data import ANSWER_LENGTH, EMBEDDED, CopyMixture
from attention_priors.encodings import LearnedTable, Rotary
from attention_priors.evaluation import LONGEST_KEY, EvaluationSettings
from attention_priors.experiments.sweep import EXTENSION_AXIS, SCHEME_AXIS, Sweep, expand, overlaid
from attention_priors.models.decoder import PriorDecoderConfig
from attention_priors.strict_yaml import Strict, explain, read_strictly
from attention_priors.training import DecoderSettings, DecoderSizes, PositionSettings, TrainingSettings, continued

LONGEST_FOLDER_NAME = 255
"""Bytes; what file systems allow."""

TOKENIZER_ENTRIES = 2048

EXTENSION_STEPS = 256
"""BAM, Appendix C."""


class CopyMixtureSettings(Strict):
    """:class:`~attention_priors.data.CopyMixture`: which rows to draw, where there is no text."""

    vocabulary_size: int = CopyMixture.vocabulary_size
    first: float = CopyMixture.first
    previous: float = CopyMixture.previous
    lag: int = CopyMixture.lag

    @model_validator(mode="after")
    def _possible(self) -> CopyMixtureSettings:
        self.task()
        return self

    def task(self) -> CopyMixture:
        """What the rows are drawn from."""
        return CopyMixture(**self.model_dump())


class CorpusSettings(Strict):
    """What to train and test on: a text, or a synthetic task."""

    source: str | None = None
    """``embedded``, the default where there is no task, or the path of a text file or of a folder of text files."""
    max_characters: int | None = Field(default=None, gt=0)
    """Train on so much of the text at most; the held-out part is always whole."""
    copy_mixture: CopyMixtureSettings | None = None
    """In place of a text, GOAT's copy-mixture task, whose tokens need no tokenizer."""

    @model_validator(mode="before")
    @classmethod
    def _embedded(cls, content: Any) -> Any:
        if isinstance(content, dict) and content.get("source") is None and content.get("copy_mixture") is None:
            return content | {"source": EMBEDDED}
        return content

    @model_validator(mode="after")
    def _one_kind(self) -> CorpusSettings:
        if self.copy_mixture is not None and (self.source is not None or self.max_characters is not None):
            raise ValueError("give either a text (source, max_characters) or copy_mixture, got both")
        return self


class MixtureSettings(TrainingSettings):
    """A training, and the mixture of rows that it reads. Lengths are in tokens."""

    passkey_ratio: float = Field(default=0.0, ge=0, le=1)
    """Share of rows that begin with a passkey text."""
    passkey_filler: Literal["corpus", "sentence"] = "corpus"
    passkey_minimum_length: int | None = Field(default=None, gt=0)
    """Shortest passkey text, its answer included; the shortest there is by default."""
    passkey_decoys: int = Field(default=0, ge=0)
    """Up to so many other numbers are strewn into the filler of each passkey text."""
    passkey_decoy_overlap: float | None = Field(default=None, gt=0, le=1)
    """Share of these numbers that begin with digits of the pass key, and go on with others; none by default."""
    passkey_answer_weight: float = Field(default=1.0, gt=0)
    """Weight of an answer token's loss; every other token has weight 1."""


class EvaluationChanges(Strict):
    """What is changed in a trained model before it is tested."""

    window: int | None = Field(default=None, gt=0)
    """Add a window of so many tokens to every layer ("RoPE local")."""
    base_multiplier: float | None = Field(default=None, gt=0)
    """Multiply the base of rotary positions."""
    tolerance: float | None = Field(default=None, ge=0, lt=1)
    """Leave out keys that weigh no more than this together, which is faster: ``tolerance`` of the model's config."""


class Scheme(PositionSettings):
    """One way to put positions into the model. What it does not say is the same for all schemes of a recipe."""

    extends: str | None = None
    """Another scheme, whose settings it inherits; none in a recipe that has been read."""
    model: dict[str, Any] = Field(default_factory=dict)
    """Sizes of the model that differ for this scheme."""
    training: dict[str, Any] = Field(default_factory=dict)
    """Settings of the training that differ for this scheme."""
    evaluation: dict[str, Any] = Field(default_factory=dict)
    """What is measured differently for this scheme."""
    at_evaluation: EvaluationChanges = EvaluationChanges()
    extension: dict[str, Any] | None = None
    """A second training at a longer context, after the first one and its evaluation, followed by another evaluation:
    ``context_length``, ``steps``, and whatever else differs from the first training."""
    axes: dict[str, str | int | float] = Field(default_factory=dict)
    """Where it stands on each axis that schemes are compared along; a sweep says it of those it makes."""

    @field_validator("axes")
    @classmethod
    def _not_reserved(cls, axes: dict[str, str | int | float]) -> dict[str, str | int | float]:
        if EXTENSION_AXIS in axes:
            raise ValueError(f"an axis cannot be called {EXTENSION_AXIS!r}")
        return axes


class Recipe(Strict):
    """A comparison: every scheme is trained on the same rows and tested on the same texts, seed by seed."""

    name: str = Field(min_length=1)
    description: str = ""
    corpus: CorpusSettings = CorpusSettings()
    tokenizer: Annotated[int, Field(gt=256)] | str | None = None
    """Entries of a byte-level BPE trained on the corpus, 2048 by default, or a tokenizer's path or Hugging Face name;
    none for a synthetic task."""
    model: DecoderSizes
    training: MixtureSettings
    evaluation: EvaluationSettings
    seeds: tuple[Annotated[int, Field(ge=0, lt=2**32)], ...] = Field(default=(0,), min_length=1)
    threads_per_run: int = Field(default=1, gt=0)
    schemes: dict[str, Scheme] = Field(min_length=1)
    sweep: Sweep | None = None
    """Multiplies schemes over axes; none in a recipe that has been read, whose schemes are those it has made."""

    @model_validator(mode="before")
    @classmethod
    def _expanded(cls, content: Any) -> Any:
        return expand(content) if isinstance(content, dict) else content

    @model_validator(mode="before")
    @classmethod
    def _with_tokenizer(cls, content: Any) -> Any:
        if not isinstance(content, dict) or content.get("tokenizer") is not None:
            return content
        corpus = content.get("corpus")
        return content if _is_synthetic(corpus) else content | {"tokenizer": TOKENIZER_ENTRIES}

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
        if self.corpus.copy_mixture is not None and self.tokenizer is not None:
            raise ValueError(f"tokenizer: corpus.copy_mixture has tokens of its own, got {self.tokenizer!r}")
        for name in self.schemes:
            for section, settings, make in (
                ("model", DecoderSizes, self.model_of),
                ("training", MixtureSettings, self.training_of),
                ("evaluation", EvaluationSettings, self.evaluation_of),
                ("extension", MixtureSettings, self.extension_of),
            ):
                try:
                    make(name)
                except ValidationError as error:
                    raise ValueError(f"{self._place(name)}.{section}: {explain(error, settings)}") from error
            extended = self.extended_name(name)
            if extended is not None and extended in self.schemes:
                raise ValueError(f"schemes.{extended}: {name!r} will be called so once it is extended")
        longest = self.longest_text
        for name, scheme in self.schemes.items():
            place = self._place(name)
            try:
                config = self.config_of(name, vocab_size=1)
            except ValueError as error:
                raise ValueError(f"{place}: {error}") from error
            encoding = config.make_encoding()
            if isinstance(encoding, LearnedTable) and encoding.max_length < longest:
                raise ValueError(
                    f"{place}.encoding: the learned table has max_length={encoding.max_length} positions, "
                    f"but this recipe reads texts of {longest} tokens"
                )
            if scheme.at_evaluation.base_multiplier is not None and not isinstance(encoding, Rotary):
                raise ValueError(
                    f"{place}.at_evaluation.base_multiplier needs the encoding 'rotary', got {scheme.encoding!r}"
                )
        return self

    def _place(self, name: str) -> str:
        """Where a scheme stands in the recipe, and on the axes if its name does not say it."""
        stands = [f"{axis}={value}" for axis, value in self.schemes[name].axes.items() if axis != SCHEME_AXIS]
        told = all(words in name for words in stands)
        return f"schemes.{name}" if told else f"schemes.{name} ({', '.join(stands)})"

    @property
    def longest_text(self) -> int:
        """Tokens of the longest text that any scheme reads."""
        lengths: list[int] = []
        for name in self.schemes:
            lengths.append(self.training_of(name).context_length)
            if (extension := self.extension_of(name)) is not None:
                lengths.append(extension.context_length)
            evaluation = self.evaluation_of(name)
            if evaluation.passkey is not None:
                lengths += [length + ANSWER_LENGTH for length in evaluation.passkey.lengths]
            if evaluation.perplexity is not None:
                lengths.append(evaluation.perplexity.length)
            if evaluation.copying is not None:
                lengths += evaluation.copying.lengths
            if evaluation.sink_mass is not None:
                lengths.append(evaluation.sink_mass.length)
            lengths += [max(plan.lengths) + LONGEST_KEY for plan in evaluation.plans.values()]
        return max(lengths)

    def model_of(self, scheme: str) -> DecoderSizes:
        """The sizes of one scheme's model."""
        own = self.schemes[scheme].model
        return DecoderSizes.model_validate(self.model.model_dump() | own) if own else self.model

    def training_of(self, scheme: str) -> MixtureSettings:
        """The training settings of one scheme."""
        own = self.schemes[scheme].training
        return MixtureSettings.model_validate(overlaid(self.training.model_dump(), own)) if own else self.training

    def evaluation_of(self, scheme: str) -> EvaluationSettings:
        """What is measured of one scheme."""
        own = self.schemes[scheme].evaluation
        if not own:
            return self.evaluation
        return EvaluationSettings.model_validate(overlaid(self.evaluation.model_dump(), own))

    def extension_of(self, scheme: str) -> MixtureSettings | None:
        """The second training of one scheme, at a longer context; None if it has none."""
        own = self.schemes[scheme].extension
        if own is None:
            return None
        before = self.training_of(scheme)
        length = own.get("context_length")
        if not isinstance(length, int) or length <= before.context_length:
            raise ValueError(
                f"{self._place(scheme)}.extension.context_length must be above the {before.context_length} tokens of "
                f"the first training, got {length!r}"
            )
        settings = continued(
            before.model_dump(),
            context_length=length,
            steps=EXTENSION_STEPS,
            tokens_per_step=before.step_tokens,
            learning_rate=before.final_learning_rate,
        )
        return MixtureSettings.model_validate(overlaid(settings, own))

    def extended_name(self, scheme: str) -> str | None:
        """What a scheme is called in the results after its extension; None if it has none."""
        extension = self.extension_of(scheme)
        return None if extension is None else f"{scheme}, extended to {extension.context_length}"

    def config_of(self, scheme: str, *, vocab_size: int, eos_token_id: int | None = None) -> PriorDecoderConfig:
        """The model of one scheme."""
        positions = self.schemes[scheme].model_dump(include=set(PositionSettings.model_fields))
        return DecoderSettings(**self.model_of(scheme).model_dump(), **positions).config(
            vocab_size=vocab_size, eos_token_id=eos_token_id
        )


def _is_synthetic(corpus: Any) -> bool:
    """Whether what stands under ``corpus`` says that there is no text; it need not be checked yet."""
    settings = corpus.model_dump() if isinstance(corpus, CorpusSettings) else corpus
    return isinstance(settings, dict) and settings.get("copy_mixture") is not None


def folder_name(scheme: str) -> str:
    """A scheme's name as the name of a folder."""
    name = re.sub(r"[^A-Za-z0-9._+-]+", "_", scheme).strip(".") or "_"
    if len(name) <= LONGEST_FOLDER_NAME:
        return name
    digest = hashlib.sha256(scheme.encode()).hexdigest()[:12]
    return f"{name[: LONGEST_FOLDER_NAME - 13]}-{digest}"


def load_recipe(path: Path) -> Recipe:
    """Read and check a recipe.

    Raises:
        RecipeError: if the file is not YAML, or a key or value is impossible; it names the key, its value and
            what is allowed.
        FileNotFoundError: if there is no such file.
    """
    return read_strictly(path, Recipe)
