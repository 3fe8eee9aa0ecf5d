"""Recipes: what a comparison trains and tests, checked before any work is done."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from attention_priors.encodings import LearnedTable
from attention_priors.lab.data import EMBEDDED
from attention_priors.lab.data.sources import TokenizerSpec
from attention_priors.lab.evaluate import EvaluationSettings
from attention_priors.lab.strict_yaml import Plugins, Strict, errors_at, validated
from attention_priors.lab.study.runs import OwnFolders, Seeds, check_folders, extended_folder
from attention_priors.lab.study.sweep import BEFORE, EXTENSION_AXIS, SCHEME_AXIS, Sweep, expand, overlaid, varied
from attention_priors.lab.tasks import NEEDLE_TASKS, CopyMixture, EvaluationPlan
from attention_priors.lab.tasks.plan import known_tasks
from attention_priors.lab.train import DecoderSettings, DecoderSizes, PositionSettings, TrainingSettings, continued
from attention_priors.models.decoder import PriorDecoderConfig

TOKENIZER_ENTRIES = 2048

EXTENSION_STEPS = 256
"""BAM, Appendix C."""


class CorpusSettings(Strict):
    """What to train and test on: a text, or a synthetic task."""

    source: str | None = None
    """``embedded``, the default where there is no task, or the path of a text file or of a folder of text files."""
    max_characters: int | None = Field(default=None, gt=0)
    """Train on so much of the text at most; the held-out part is always whole."""
    copy_mixture: CopyMixture | None = None
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
    passkey_digits: int | None = Field(default=None, ge=1, le=9)
    """Digits of a pass key, 5 by default."""
    passkey_wording: Literal["short", "long"] | None = None
    """``long`` is that of ``evaluate``'s tasks ``passkey`` and ``passkey_8``; short by default."""
    passkey_minimum_length: int | None = Field(default=None, gt=0)
    """Shortest passkey text, its answer included; the shortest there is by default."""
    passkey_decoys: int = Field(default=0, ge=0)
    """Up to so many other numbers are strewn into the filler of each passkey text."""
    passkey_decoy_overlap: float | None = Field(default=None, gt=0, le=1)
    """Share of these numbers that begin with digits of the pass key, and go on with others; none by default."""
    passkey_answer_weight: float = Field(default=1.0, gt=0)
    """Weight of an answer token's loss; every other token has weight 1."""
    needle_ratio: float | None = Field(default=None, gt=0, le=1)
    """Share of rows that begin with a needle text, in equal parts of each of ``needle_tasks``."""
    needle_tasks: tuple[str, ...] | None = Field(default=None, min_length=1)
    """RULER's names of them."""
    needle_minimum_length: int | None = Field(default=None, gt=0)
    """Least length that is drawn for a needle text, its answer included; each task's shortest where that is longer, and
    by default."""
    needle_answer_weight: float | None = Field(default=None, gt=0)
    """As ``passkey_answer_weight``, which it is by default."""

    @field_validator("needle_tasks")
    @classmethod
    def _known_tasks(cls, tasks: tuple[str, ...] | None) -> tuple[str, ...] | None:
        return None if tasks is None else known_tasks(tasks, NEEDLE_TASKS)

    @model_validator(mode="after")
    def _possible_mixture(self) -> MixtureSettings:
        if (self.needle_ratio is None) != (self.needle_tasks is None):
            raise ValueError(
                f"needle_ratio and needle_tasks need each other, got {self.needle_ratio} and {self.needle_tasks}"
            )
        if self.needle_ratio is None and (self.needle_minimum_length or self.needle_answer_weight):
            raise ValueError("needle_minimum_length and needle_answer_weight need needle_ratio, got none")
        if self.passkey_decoy_overlap is not None and not self.passkey_decoys:
            raise ValueError(
                f"passkey_decoy_overlap={self.passkey_decoy_overlap} is a share of passkey_decoys, and there are none"
            )
        if self.passkey_ratio + (self.needle_ratio or 0) > 1:
            raise ValueError(
                f"passkey_ratio and needle_ratio must sum to 1 at most, got {self.passkey_ratio} and "
                f"{self.needle_ratio}"
            )
        return self


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
    extensions: dict[Annotated[str, Field(min_length=1)], dict[str, Any] | None] = Field(default_factory=dict)
    """Ways to extend the context of the trained model, each by itself, and followed by another evaluation: for each its
    ``context_length``, ``steps``, and whatever else differs from the first training or in how positions come in."""
    axes: dict[str, str | int | float] = Field(default_factory=dict)
    """Where it stands on each axis that schemes are compared along; a sweep says it of those it makes."""

    @field_validator("axes")
    @classmethod
    def _not_reserved(cls, axes: dict[str, str | int | float]) -> dict[str, str | int | float]:
        if EXTENSION_AXIS in axes:
            raise ValueError(f"an axis cannot be called {EXTENSION_AXIS!r}")
        return axes

    @field_validator("extensions")
    @classmethod
    def _distinct_ways(cls, extensions: dict[str, Any]) -> dict[str, Any]:
        if BEFORE in extensions:
            raise ValueError(f"an extension cannot be called {BEFORE!r}")
        check_folders("extensions", extensions)
        return extensions


POSITION_FIELDS = set(PositionSettings.model_fields)


class ExtensionSettings(MixtureSettings, PositionSettings):
    """What one extension of a scheme may say."""


@dataclass(frozen=True)
class ModelPlan:
    """A model that a run makes: its scheme's, or the same after one extension of its context."""

    scheme: str
    """Name of the scheme."""
    name: str
    """What the model is called in the results."""
    way: str | None
    """Name of the extension; None for the scheme's own model."""
    context_length: int
    """Tokens that the model is for."""
    trained_length: int
    """Tokens of a row of the last training: an extension may go without one."""
    positions: PositionSettings
    """How positions come into the model."""
    training: MixtureSettings | None
    """Training, of an extension after the scheme's own; None without one."""

    @property
    def section(self) -> str:
        """Place of the model in its scheme's settings."""
        return "" if self.way is None else f".extensions.{self.way}"

    def folder(self, run: Path) -> Path:
        """Return the folder of the model, in that of its run."""
        return run if self.way is None else extended_folder(run, self.way)


class Recipe(Strict):
    """A comparison: every scheme is trained on the same rows and tested on the same texts, seed by seed."""

    plugins: Plugins = ()
    name: str = Field(min_length=1)
    description: str = ""
    corpus: CorpusSettings = CorpusSettings()
    tokenizer: TokenizerSpec = Field(default=None, validate_default=True)
    """Entries of a byte-level BPE trained on the corpus, 2048 by default, or a tokenizer's path or Hugging Face name;
    none for a synthetic task."""
    model: DecoderSizes
    training: MixtureSettings
    evaluation: EvaluationSettings
    seeds: Seeds = (0,)
    threads_per_run: int = Field(default=1, gt=0)
    processes: int | None = Field(default=None, gt=0)
    """Runs at a time at most, however many cores there are: 1 where times are measured."""
    schemes: Annotated[dict[Annotated[str, Field(min_length=1)], Scheme], OwnFolders] = Field(min_length=1)
    sweep: Sweep | None = None
    """Multiplies schemes over axes; none in a recipe that has been read, whose schemes are those it has made."""
    panels: dict[str, Annotated[list[str], Field(min_length=1)]] = Field(default_factory=dict)
    """What the figures of all schemes show: a panel for each, with the schemes, extended ones too, whose names are like
    one of its patterns (``*``: anything). Without it all schemes share one panel."""

    @model_validator(mode="before")
    @classmethod
    def _expanded(cls, content: Any) -> Any:
        return expand(content) if isinstance(content, dict) else content

    @field_validator("tokenizer")
    @classmethod
    def _of_text(cls, tokenizer: TokenizerSpec, info: ValidationInfo) -> TokenizerSpec:
        corpus = info.data.get("corpus")  # missing if it is wrong itself
        if corpus is None or corpus.copy_mixture is None:
            return TOKENIZER_ENTRIES if tokenizer is None else tokenizer
        if tokenizer is not None:
            raise ValueError(f"corpus.copy_mixture has tokens of its own, got {tokenizer!r}")
        return None

    @field_validator("evaluation")
    @classmethod
    def _of_the_corpus(cls, evaluation: EvaluationSettings, info: ValidationInfo) -> EvaluationSettings:
        corpus = info.data.get("corpus")
        return evaluation if corpus is None else _with_corpus(evaluation, corpus)

    @model_validator(mode="after")
    def _possible(self) -> Recipe:
        for name in self.schemes:
            for settings_of in (self.model_of, self.training_of, self.evaluation_of):
                settings_of(name)
            with errors_at(f"{self._place(name)}.evaluation"):
                check_folders("plans", self.evaluation_of(name).plans)
            for model in self.extensions_of(name).values():
                if model.name in self.schemes:
                    raise ValueError(f"schemes.{model.name}: {name!r} will be called so once it is extended")
        self._check_panels()
        for name in self.schemes:
            longest = self.longest_text_of(name)
            for model in self.models_of(name):
                self._check_positions(model, longest)
        return self

    def _check_panels(self) -> None:
        names = self.model_names
        for title, patterns in self.panels.items():
            for pattern in patterns:
                if not fnmatch.filter(names, pattern):
                    raise ValueError(f"panels.{title}: no scheme is like {pattern!r}; there are {', '.join(names)}")

    def _check_positions(self, model: ModelPlan, longest: int) -> None:
        """Make sure that a model can be made, and that it has all the positions that it will read."""
        place = f"{self._place(model.scheme)}{model.section}"
        with errors_at(place):
            config = self.config_of(model.scheme, vocab_size=1, positions=model.positions)
        encoding = config.make_encoding()
        if isinstance(encoding, LearnedTable) and encoding.max_length < longest:
            raise ValueError(
                f"{place}.encoding: the learned table has max_length={encoding.max_length} positions, "
                f"but it reads texts of {longest} tokens"
            )

    def _place(self, name: str) -> str:
        """Where a scheme stands in the recipe, and on the axes if its name does not say it."""
        stands = [f"{axis}={value}" for axis, value in self.schemes[name].axes.items() if axis != SCHEME_AXIS]
        told = all(words in name for words in stands)
        return f"schemes.{name}" if told else f"schemes.{name} ({', '.join(stands)})"

    @property
    def longest_text(self) -> int:
        """Tokens of the longest text that any scheme reads."""
        return max(self.longest_text_of(name) for name in self.schemes)

    def longest_text_of(self, scheme: str) -> int:
        """Tokens of the longest text that a scheme reads."""
        sinks = self.evaluation_of(scheme).sink_mass
        lengths = [model.context_length for model in self.models_of(scheme)]
        lengths += [plan.longest_text for _, plan in self.plans_of(scheme)]
        return max(lengths if sinks is None else [*lengths, sinks.length])

    @property
    def model_names(self) -> list[str]:
        """Names of all models, each scheme's own before its extended ones."""
        return [model.name for name in self.schemes for model in self.models_of(name)]

    def model_of(self, scheme: str) -> DecoderSizes:
        """The sizes of one scheme's model."""
        return varied(self.model, self.schemes[scheme].model, f"{self._place(scheme)}.model")

    def training_of(self, scheme: str) -> MixtureSettings:
        """The training settings of one scheme."""
        return varied(self.training, self.schemes[scheme].training, f"{self._place(scheme)}.training")

    def plans_of(self, scheme: str) -> list[tuple[str | None, EvaluationPlan]]:
        """Return the plans of one scheme's models with their names; None for the presets."""
        own = {} if self.corpus.source is None else {"corpus": self.corpus.source}
        plans = self.evaluation_of(scheme).all_plans()
        return [(name, plan.model_copy(update=own) if name is None else plan) for name, plan in plans]

    def evaluation_of(self, scheme: str) -> EvaluationSettings:
        """What is measured of one scheme."""
        own = self.schemes[scheme].evaluation
        return _with_corpus(varied(self.evaluation, own, f"{self._place(scheme)}.evaluation"), self.corpus)

    def extensions_of(self, scheme: str) -> dict[str, ModelPlan]:
        """The models after each extension of one scheme's context, by what the extensions are called."""
        ways = self.schemes[scheme].extensions.items()
        return {way: self._extension(scheme, way, own) for way, own in ways if own is not None}

    def models_of(self, scheme: str) -> list[ModelPlan]:
        """The models of one scheme: its own, and that after each extension of the context."""
        training = self.training_of(scheme)
        length = training.context_length
        own = ModelPlan(scheme, scheme, None, length, length, self.schemes[scheme], training)
        return [own, *self.extensions_of(scheme).values()]

    def _extension(self, scheme: str, way: str, own: dict[str, Any]) -> ModelPlan:
        place, before = f"{self._place(scheme)}.extensions.{way}", self.training_of(scheme)
        positions = self.schemes[scheme].model_dump(include=POSITION_FIELDS)
        same = all(own.get(key, positions.get(key)) == positions.get(key) for key in POSITION_FIELDS)
        length = own.get("context_length")
        if type(length) is not int or length < before.context_length or (same and length == before.context_length):
            raise ValueError(
                f"{place}.context_length must be above the {before.context_length} tokens of the first training, or "
                f"equal to them if positions change; got {length!r}"
            )
        untrained = type(own.get("steps")) is int and own["steps"] == 0
        if untrained and same:
            raise ValueError(f"{place}: with 0 steps and the positions of the first training, nothing would be done")
        settings = continued(
            before.model_dump(),
            context_length=length,
            steps=EXTENSION_STEPS,
            tokens_per_step=length if untrained else before.step_tokens,
            learning_rate=before.final_learning_rate,
        )
        # Without a training, what is said of one is checked all the same: a sweep may go through numbers of steps.
        stated = overlaid(positions | settings, own | ({"steps": 1} if untrained else {}))
        stated |= {key: own[key] for key in POSITION_FIELDS if key in own}
        checked = validated(stated, ExtensionSettings, place)
        training = MixtureSettings(**checked.model_dump(include=set(MixtureSettings.model_fields)))
        return ModelPlan(
            scheme,
            f"{scheme}, {'extended to' if length > before.context_length else 'changed at'} {length}: {way}",
            way,
            length,
            before.context_length if untrained else training.context_length,
            PositionSettings(**checked.model_dump(include=POSITION_FIELDS)),
            None if untrained else training,
        )

    def config_of(
        self,
        scheme: str,
        *,
        vocab_size: int,
        eos_token_id: int | None = None,
        positions: PositionSettings | None = None,
    ) -> PriorDecoderConfig:
        """The model of one scheme; ``positions`` are its own by default."""
        described = (positions or self.schemes[scheme]).model_dump(include=POSITION_FIELDS)
        decoder = DecoderSettings(**self.model_of(scheme).model_dump(), **described)
        return decoder.config(vocab_size=vocab_size, eos_token_id=eos_token_id)


def _with_corpus(evaluation: EvaluationSettings, corpus: CorpusSettings) -> EvaluationSettings:
    """Let plans that name no corpus read the held-out part of the one that is trained on."""
    if corpus.source is None:
        return evaluation
    plans = {
        name: plan if "corpus" in plan.model_fields_set else plan.model_copy(update={"corpus": corpus.source})
        for name, plan in evaluation.plans.items()
    }
    return evaluation.model_copy(update={"plans": plans})
