"""Recipes: what a comparison trains and tests, checked before any work is done."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator

from attention_priors.encodings import LearnedTable
from attention_priors.lab.data import EMBEDDED
from attention_priors.lab.data.sources import TokenizerSpec
from attention_priors.lab.evaluate import EvaluationSettings
from attention_priors.lab.strict_yaml import Plugins, Strict, explain
from attention_priors.lab.study.runs import Seeds, check_folders
from attention_priors.lab.study.sweep import BEFORE, EXTENSION_AXIS, SCHEME_AXIS, Sweep, expand, overlaid
from attention_priors.lab.tasks import NEEDLE_TASKS, CopyMixture, EvaluationPlan
from attention_priors.lab.train import DecoderSettings, DecoderSizes, PositionSettings, TrainingSettings, continued
from attention_priors.models.decoder import PriorDecoderConfig

TOKENIZER_ENTRIES = 2048

EXTENSION_STEPS = 256
"""BAM, Appendix C."""


class CopyMixtureSettings(Strict):
    """:class:`~attention_priors.lab.data.CopyMixture`: which rows to draw, where there is no text."""

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
        for task in tasks or ():
            if task not in NEEDLE_TASKS:
                raise ValueError(f"unknown task {task!r}; there are {', '.join(NEEDLE_TASKS)}")
        if len(set(tasks or ())) < len(tasks or ()):
            raise ValueError(f"tasks must be distinct, got {list(tasks or ())}")
        return tasks

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


class ExtensionSettings(MixtureSettings, PositionSettings):
    """What one extension of a scheme may say."""


@dataclass(frozen=True)
class Extension:
    """One way to extend the context of a scheme's trained model."""

    name: str
    """What the extended model is called in the results."""
    context_length: int
    """In tokens."""
    positions: PositionSettings
    """How positions come into the extended model."""
    training: MixtureSettings | None
    """The training after that; None without one."""


class Recipe(Strict):
    """A comparison: every scheme is trained on the same rows and tested on the same texts, seed by seed."""

    plugins: Plugins = ()
    name: str = Field(min_length=1)
    description: str = ""
    corpus: CorpusSettings = CorpusSettings()
    tokenizer: TokenizerSpec = None
    """Entries of a byte-level BPE trained on the corpus, 2048 by default, or a tokenizer's path or Hugging Face name;
    none for a synthetic task."""
    model: DecoderSizes
    training: MixtureSettings
    evaluation: EvaluationSettings
    seeds: Seeds = (0,)
    threads_per_run: int = Field(default=1, gt=0)
    processes: int | None = Field(default=None, gt=0)
    """Runs at a time at most, however many cores there are: 1 where times are measured."""
    schemes: dict[Annotated[str, Field(min_length=1)], Scheme] = Field(min_length=1)
    sweep: Sweep | None = None
    """Multiplies schemes over axes; none in a recipe that has been read, whose schemes are those it has made."""
    panels: dict[str, Annotated[list[str], Field(min_length=1)]] = Field(default_factory=dict)
    """What the figures of all schemes show: a panel for each, with the schemes, extended ones too, whose names are like
    one of its patterns (``*``: anything). Without it all schemes share one panel."""

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

    @field_validator("evaluation")
    @classmethod
    def _of_the_corpus(cls, evaluation: EvaluationSettings, info: ValidationInfo) -> EvaluationSettings:
        corpus = info.data.get("corpus")  # missing if it is wrong itself
        return evaluation if corpus is None else _with_corpus(evaluation, corpus)

    @field_validator("schemes")
    @classmethod
    def _distinct_folders(cls, schemes: dict[str, Scheme]) -> dict[str, Scheme]:
        check_folders("schemes", schemes)
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
            ):
                try:
                    make(name)
                except ValidationError as error:
                    raise ValueError(f"{self._place(name)}.{section}: {explain(error, settings)}") from error
            try:
                check_folders("plans", self.evaluation_of(name).plans)
            except ValueError as error:
                raise ValueError(f"{self._place(name)}.evaluation: {error}") from error
            for extension in self.extensions_of(name).values():
                if extension.name in self.schemes:
                    raise ValueError(f"schemes.{extension.name}: {name!r} will be called so once it is extended")
        self._check_panels()
        for name, scheme in self.schemes.items():
            longest = self.longest_text_of(name)
            self._check_positions(name, "", scheme, longest)
            for way, extension in self.extensions_of(name).items():
                self._check_positions(name, f".extensions.{way}", extension.positions, longest)
        return self

    def _check_panels(self) -> None:
        names = [*self.schemes, *(one.name for name in self.schemes for one in self.extensions_of(name).values())]
        for title, patterns in self.panels.items():
            for pattern in patterns:
                if not fnmatch.filter(names, pattern):
                    raise ValueError(f"panels.{title}: no scheme is like {pattern!r}; there are {', '.join(names)}")

    def _check_positions(self, name: str, section: str, positions: PositionSettings, longest: int) -> None:
        """Make sure that a model can be made, and that it has all the positions that it will read."""
        place = f"{self._place(name)}{section}"
        try:
            config = self._config(name, positions, vocab_size=1)
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from error
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
        evaluation = self.evaluation_of(scheme)
        lengths = [self.training_of(scheme).context_length]
        lengths += [extension.context_length for extension in self.extensions_of(scheme).values()]
        if evaluation.sink_mass is not None:
            lengths.append(evaluation.sink_mass.length)
        return max([*lengths, *(plan.longest_text for _, plan in self.plans_of(scheme))])

    def model_of(self, scheme: str) -> DecoderSizes:
        """The sizes of one scheme's model."""
        own = self.schemes[scheme].model
        return DecoderSizes.model_validate(self.model.model_dump() | own) if own else self.model

    def training_of(self, scheme: str) -> MixtureSettings:
        """The training settings of one scheme."""
        own = self.schemes[scheme].training
        return MixtureSettings.model_validate(overlaid(self.training.model_dump(), own)) if own else self.training

    def plans_of(self, scheme: str) -> list[tuple[str | None, EvaluationPlan]]:
        """Return the plans of one scheme's models with their names; None for the presets."""
        own = {} if self.corpus.source is None else {"corpus": self.corpus.source}
        plans = self.evaluation_of(scheme).all_plans()
        return [(name, plan.model_copy(update=own) if name is None else plan) for name, plan in plans]

    def evaluation_of(self, scheme: str) -> EvaluationSettings:
        """What is measured of one scheme."""
        own = self.schemes[scheme].evaluation
        if not own:
            return self.evaluation
        together = EvaluationSettings.model_validate(overlaid(self.evaluation.model_dump(), own))
        return _with_corpus(together, self.corpus)

    def extensions_of(self, scheme: str) -> dict[str, Extension]:
        """The ways to extend one scheme's trained model, by what they are called."""
        return {
            way: self._extension(scheme, way, own)
            for way, own in self.schemes[scheme].extensions.items()
            if own is not None
        }

    def _extension(self, scheme: str, way: str, own: dict[str, Any]) -> Extension:
        place, before = f"{self._place(scheme)}.extensions.{way}", self.training_of(scheme)
        positions = self.schemes[scheme].model_dump(include=set(PositionSettings.model_fields))
        same = all(own.get(key, value) == value for key, value in positions.items())
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
        stated |= {key: own[key] for key in positions if key in own}
        try:
            checked = ExtensionSettings.model_validate(stated)
        except ValidationError as error:
            raise ValueError(f"{place}: {explain(error, ExtensionSettings)}") from error
        training = checked.model_dump(include=set(MixtureSettings.model_fields))
        return Extension(
            name=f"{scheme}, {'extended to' if length > before.context_length else 'changed at'} {length}: {way}",
            context_length=length,
            positions=PositionSettings(**checked.model_dump(include=set(PositionSettings.model_fields))),
            training=None if untrained else MixtureSettings(**training),
        )

    def config_of(self, scheme: str, *, vocab_size: int, eos_token_id: int | None = None) -> PriorDecoderConfig:
        """The model of one scheme."""
        return self._config(scheme, self.schemes[scheme], vocab_size=vocab_size, eos_token_id=eos_token_id)

    def _config(
        self, scheme: str, positions: PositionSettings, *, vocab_size: int, eos_token_id: int | None = None
    ) -> PriorDecoderConfig:
        described = positions.model_dump(include=set(PositionSettings.model_fields))
        return DecoderSettings(**self.model_of(scheme).model_dump(), **described).config(
            vocab_size=vocab_size, eos_token_id=eos_token_id
        )


def _with_corpus(evaluation: EvaluationSettings, corpus: CorpusSettings) -> EvaluationSettings:
    """Let plans that name no corpus read the held-out part of the one that is trained on."""
    if corpus.source is None:
        return evaluation
    plans = {
        name: plan if "corpus" in plan.model_fields_set else plan.model_copy(update={"corpus": corpus.source})
        for name, plan in evaluation.plans.items()
    }
    return evaluation.model_copy(update={"plans": plans})


def _is_synthetic(corpus: Any) -> bool:
    """Whether what stands under ``corpus`` says that there is no text; it need not be checked yet."""
    settings = corpus.model_dump() if isinstance(corpus, CorpusSettings) else corpus
    return isinstance(settings, dict) and settings.get("copy_mixture") is not None
