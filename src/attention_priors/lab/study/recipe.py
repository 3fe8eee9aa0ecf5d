"""Recipe of a comparison of decoders, validated before any work."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from attention_priors.encodings import LearnedTable
from attention_priors.lab.data import EMBEDDED
from attention_priors.lab.data.sources import TokenizerSpec
from attention_priors.lab.evaluate.settings import EvaluationSettings
from attention_priors.lab.strict_yaml import Plugins, Strict, check_one_of, errors_at, validated
from attention_priors.lab.study.runs import OwnFolders, Seeds, check_folders, extended_folder
from attention_priors.lab.study.sweep import (
    BEFORE,
    EXTENSION_AXIS,
    POSITION_FIELDS,
    SCHEME_AXIS,
    START_FIELDS,
    Sweep,
    expand,
    overlaid,
    varied,
)
from attention_priors.lab.tasks import CopyMixture, EvaluationPlan
from attention_priors.lab.tasks.plan import known_tasks
from attention_priors.lab.tasks.ruler import RULER_TASKS
from attention_priors.lab.tasks.ruler.needles import NEEDLE_TASKS
from attention_priors.lab.train.extend import continued
from attention_priors.lab.train.recipe import (
    AttachSettings,
    DecoderSettings,
    DecoderSizes,
    ModelSettings,
    PositionSettings,
    TrainingSettings,
)
from attention_priors.models.decoder import PriorDecoderConfig

TOKENIZER_ENTRIES = 2048

EXTENSION_STEPS = 256
"""Default number of steps of an extension (BAM, Appendix C)."""


class CorpusSettings(Strict):
    """Training and test data: a text corpus or a synthetic task."""

    source: str | None = None
    """``embedded`` (the Python standard library), a text file, a folder of text files, or ``package:NAME`` (the files
    of an installed Python package). ``embedded`` by default unless there is a task."""
    max_characters: int | None = Field(default=None, gt=0)
    """Largest number of characters to train on; the held-out part is always complete."""
    copy_mixture: CopyMixture | None = None

    @model_validator(mode="before")
    @classmethod
    def _embedded(cls, content: Any) -> Any:
        if isinstance(content, dict) and content.get("source") is None and content.get("copy_mixture") is None:
            return content | {"source": EMBEDDED}
        return content

    @model_validator(mode="after")
    def _one_kind(self) -> CorpusSettings:
        if self.copy_mixture is not None and (self.source is not None or self.max_characters is not None):
            raise ValueError("set either a text (source, max_characters) or copy_mixture, got both")
        return self


class MixtureSettings(TrainingSettings):
    """Training settings and the mixture of training rows. Lengths are in tokens."""

    passkey_ratio: float = Field(default=0.0, ge=0, le=1)
    """Share of rows that begin with a passkey text."""
    passkey_filler: Literal["corpus", "sentence"] = "corpus"
    """Text around the pass key: windows of the corpus' training part, or one paragraph that repeats."""
    passkey_digits: int | None = Field(default=None, ge=1, le=9)
    """Digits of a pass key, 5 by default."""
    passkey_wording: Literal["short", "long"] | None = None
    """Instruction and question of the texts, short by default. ``short`` matches the task ``passkey_corpus`` of
    ``evaluate``, ``long`` the tasks ``passkey`` and ``passkey_8``."""
    passkey_minimum_length: int | None = Field(default=None, gt=0)
    """Length of the shortest passkey text, including its answer; by default the shortest possible."""
    passkey_decoys: int = Field(default=0, ge=0)
    """Largest number of decoys, which are other numbers of 1 to 8 digits in the filler of a passkey text. The number is
    drawn uniformly from 0 up."""
    passkey_decoy_overlap: float | None = Field(default=None, gt=0, le=1)
    """Share of decoys that begin with digits of the pass key and then differ; none by default."""
    passkey_answer_weight: float = Field(default=1.0, gt=0)
    """Weight of an answer token's loss; every other token has weight 1."""
    needle_ratio: float | None = Field(default=None, gt=0, le=1)
    """Share of rows that begin with a RULER text, split equally among ``needle_tasks``."""
    needle_tasks: tuple[str, ...] | None = Field(default=None, min_length=1)
    """RULER's tasks of ``evaluate``, any of the needle tasks (``niah_...``) and of variable tracking
    (``variable_tracking...``)."""
    needle_questions: int = Field(default=1, ge=1)
    """Questions of a needle text, one after another, or fewer if the shortest text would not fit into a row. Each asks
    for keys drawn anew, and its answer follows."""
    needle_restatements: int = Field(default=0, ge=0)
    """Needles that a needle text states again after its questions, each drawn anew. Their values count as answers."""
    needle_minimum_length: int | None = Field(default=None, gt=0)
    """Smallest drawn length of a RULER text, including its answer. Each task's shortest length is the default and a
    lower limit."""
    needle_answer_weight: float | None = Field(default=None, gt=0)
    """Weight of an answer token's loss in RULER texts; ``passkey_answer_weight`` by default."""

    @field_validator("needle_tasks")
    @classmethod
    def _known_tasks(cls, tasks: tuple[str, ...] | None) -> tuple[str, ...] | None:
        return None if tasks is None else known_tasks(tasks, RULER_TASKS)

    @model_validator(mode="after")
    def _possible_mixture(self) -> MixtureSettings:
        if (self.needle_ratio is None) != (self.needle_tasks is None):
            raise ValueError(
                f"needle_ratio and needle_tasks must be set together, got {self.needle_ratio} and {self.needle_tasks}"
            )
        extra = self.needle_questions > 1 or self.needle_restatements
        if self.needle_ratio is None and (self.needle_minimum_length or self.needle_answer_weight or extra):
            raise ValueError(
                "needle_minimum_length, needle_answer_weight, needle_questions and needle_restatements need "
                "needle_ratio, which is not set"
            )
        without = [task for task in self.needle_tasks or () if task not in NEEDLE_TASKS]
        if extra and without:
            raise ValueError(f"needle_questions and needle_restatements need needle tasks (niah_...), got {without}")
        if self.passkey_decoy_overlap is not None and not self.passkey_decoys:
            raise ValueError(
                f"passkey_decoy_overlap={self.passkey_decoy_overlap} is a share of passkey_decoys, which is 0"
            )
        if self.passkey_ratio + (self.needle_ratio or 0) > 1:
            raise ValueError(
                f"passkey_ratio and needle_ratio must sum to at most 1, got {self.passkey_ratio} and "
                f"{self.needle_ratio}"
            )
        return self


class Scheme(PositionSettings):
    """Positional scheme of a model. All other settings are those of the recipe."""

    extends: str | None = None
    """Name of a scheme whose settings this scheme inherits; None once a recipe is read."""
    attach: AttachSettings | None = None
    """Priors to attach to the model of ``pretrained``."""
    rope_parameters: dict[str, Any] | None = None
    """Changes of the rotary settings of ``pretrained``, by transformers' names, such as ``{rope_type: yarn, factor:
    4.0, original_max_position_embeddings: 8192}``."""
    model: dict[str, Any] = Field(default_factory=dict)
    """Model sizes that differ for this scheme."""
    training: dict[str, Any] = Field(default_factory=dict)
    """Training settings that differ for this scheme. With ``pretrained``, ``steps: 0`` tests it without training."""
    evaluation: dict[str, Any] = Field(default_factory=dict)
    """Evaluation settings that differ for this scheme."""
    extensions: dict[Annotated[str, Field(min_length=1)], dict[str, Any] | None] = Field(default_factory=dict)
    """Context extensions of the trained model. Each extension starts from this model and ends with another evaluation.
    It sets ``context_length``, ``steps``, and all settings of training or positions that differ."""
    axes: dict[str, str | int | float] = Field(default_factory=dict)
    """Value of the scheme on each axis of comparison; a sweep sets the values of its schemes."""

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
    """Settings of one extension of a scheme."""


@dataclass(frozen=True)
class ModelPlan:
    """Model of a run: the scheme's own model, or the model after one context extension."""

    scheme: str
    """Name of the scheme."""
    name: str
    """Name of the model in the results."""
    way: str | None
    """Name of the extension; None for the scheme's own model."""
    context_length: int
    """Target context length of the model, in tokens."""
    trained_length: int
    """Row length of the last training, in tokens; shorter than ``context_length`` after an extension without
    training."""
    positions: PositionSettings
    """Positional settings of the model."""
    training: MixtureSettings | None
    """Training settings; for an extension, of the training after the scheme's own. None without training."""

    @property
    def section(self) -> str:
        """Path of the model in its scheme's settings."""
        return "" if self.way is None else f".extensions.{self.way}"

    def folder(self, run: Path) -> Path:
        """Return the folder of the model inside its run's folder."""
        return run if self.way is None else extended_folder(run, self.way)


class Recipe(Strict):
    """Comparison of schemes: for each seed, all schemes train on the same rows and are tested on the same texts."""

    plugins: Plugins = ()
    """Modules that register priors of your own; every process imports them before the other keys are read."""
    name: str = Field(min_length=1)
    """Title of the report."""
    description: str = ""
    """Description in the report."""
    corpus: CorpusSettings = CorpusSettings()
    pretrained: str | None = None
    """Folder or name of a causal language model from which all schemes start, in place of ``model``."""
    tokenizer: TokenizerSpec = Field(default=None, validate_default=True)
    """Number of entries of a byte-level BPE trained on the corpus, 2048 by default; ``nucleotides``; or a tokenizer's
    path or Hugging Face name. None for a synthetic task, and for the tokenizer of ``pretrained``."""
    model: DecoderSizes | None = None
    """Sizes of new decoders."""
    training: MixtureSettings
    evaluation: EvaluationSettings
    seeds: Seeds = (0,)
    """Seeds of initial weights and training rows. Test texts are equal for all seeds."""
    threads_per_run: int = Field(default=1, gt=0)
    """Number of CPU threads of one run."""
    processes: int | None = Field(default=None, gt=0)
    """Largest number of runs at a time, regardless of the number of cores; 1 for recipes that measure times."""
    schemes: Annotated[dict[Annotated[str, Field(min_length=1)], Scheme], OwnFolders] = Field(min_length=1)
    """Schemes by name. Each scheme is trained with every seed."""
    sweep: Sweep | None = None
    """Sweep that multiplies schemes over axes; None once a recipe is read, because ``schemes`` then holds the
    result."""
    panels: dict[str, Annotated[list[str], Field(min_length=1)]] = Field(default_factory=dict)
    """Panels of figures that show several schemes. Each panel lists patterns of scheme names, including extended ones
    (``*`` matches anything). By default, all schemes share one panel."""

    @model_validator(mode="before")
    @classmethod
    def _expanded(cls, content: Any) -> Any:
        return expand(content) if isinstance(content, dict) else content

    @field_validator("tokenizer")
    @classmethod
    def _of_text(cls, tokenizer: TokenizerSpec, info: ValidationInfo) -> TokenizerSpec:
        corpus = info.data.get("corpus")  # missing if the corpus is invalid
        if corpus is None or corpus.copy_mixture is None:
            return info.data.get("pretrained") or TOKENIZER_ENTRIES if tokenizer is None else tokenizer
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
        check_one_of(self, "model", "pretrained")
        for name in self.schemes:
            self._check_start(name)
            self.training_of(name)
            self.evaluation_of(name)
            with errors_at(f"{self._place(name)}.evaluation"):
                check_folders("plans", self.evaluation_of(name).plans)
            for model in self.extensions_of(name).values():
                if model.name in self.schemes:
                    raise ValueError(f"schemes.{model.name}: the extended model of {name!r} has this name too")
        self._check_panels()
        for name in self.schemes:
            longest = self.longest_text_of(name)
            for model in self.models_of(name) if self.pretrained is None else ():
                self._check_positions(model, longest)
        return self

    def _check_start(self, name: str) -> None:
        """Check that a scheme has no settings of the other kind of model."""
        scheme, place = self.schemes[name], self._place(name)
        changed = set(scheme.model_dump(exclude_defaults=True))
        if self.pretrained is None:
            self.model_of(name)
            wrong, cure = changed & START_FIELDS, "pretrained is not set"
            if scheme.training.get("steps") == 0:
                raise ValueError(f"{place}.training.steps: 0 steps need pretrained, which is not set")
        else:
            self.start_of(name)
            wrong = changed & {*POSITION_FIELDS, "model", "extensions"}
            cure = "pretrained is set; use attach and rope_parameters"
            if self.evaluation_of(name).tolerance is not None or self.evaluation_of(name).sink_mass is not None:
                raise ValueError(
                    f"{place}.evaluation: tolerance and sink_mass need new decoders, but pretrained is set"
                )
        if wrong:
            raise ValueError(f"{place}: {', '.join(sorted(wrong))} cannot be set, because {cure}")

    def _check_panels(self) -> None:
        names = self.model_names
        for title, patterns in self.panels.items():
            for pattern in patterns:
                if not fnmatch.filter(names, pattern):
                    raise ValueError(
                        f"panels.{title}: no scheme matches {pattern!r}; the schemes are {', '.join(names)}"
                    )

    def _check_positions(self, model: ModelPlan, longest: int) -> None:
        """Check that a model can be created, and that it has positions for its longest text."""
        place = f"{self._place(model.scheme)}{model.section}"
        with errors_at(place):
            config = self.config_of(model.scheme, vocab_size=1, positions=model.positions)
        encoding = config.make_encoding()
        if isinstance(encoding, LearnedTable) and encoding.max_length < longest:
            raise ValueError(
                f"{place}.encoding: the learned table has max_length={encoding.max_length} positions, "
                f"but the model reads texts of {longest} tokens"
            )

    def _place(self, name: str) -> str:
        """Return the path of a scheme in the recipe, with its axis values unless its name states them."""
        stands = [f"{axis}={value}" for axis, value in self.schemes[name].axes.items() if axis != SCHEME_AXIS]
        told = all(words in name for words in stands)
        return f"schemes.{name}" if told else f"schemes.{name} ({', '.join(stands)})"

    @property
    def longest_text(self) -> int:
        """Length of the longest text of any scheme, in tokens."""
        return max(self.longest_text_of(name) for name in self.schemes)

    def longest_text_of(self, scheme: str) -> int:
        """Return the length of a scheme's longest text, in tokens."""
        sinks = self.evaluation_of(scheme).sink_mass
        lengths = [model.context_length for model in self.models_of(scheme)]
        lengths += [plan.longest_text for _, plan in self.plans_of(scheme)]
        return max(lengths if sinks is None else [*lengths, sinks.length])

    @property
    def model_names(self) -> list[str]:
        """Names of all models, each scheme's own model before its extended models."""
        return [model.name for name in self.schemes for model in self.models_of(name)]

    def model_of(self, scheme: str) -> DecoderSizes:
        """Return the model sizes of one scheme of new decoders."""
        assert self.model is not None
        return varied(self.model, self.schemes[scheme].model, f"{self._place(scheme)}.model")

    def start_of(self, scheme: str) -> ModelSettings:
        """Return the pretrained model of one scheme, with its attached priors and rotary settings."""
        own = self.schemes[scheme].model_dump(include=START_FIELDS)
        return validated(own | {"pretrained": self.pretrained}, ModelSettings, self._place(scheme))

    def training_of(self, scheme: str) -> MixtureSettings:
        """Return the training settings of one scheme. A scheme with 0 steps keeps the other settings."""
        own = self.schemes[scheme].training
        own = {key: value for key, value in own.items() if (key, value) != ("steps", 0)}
        return varied(self.training, own, f"{self._place(scheme)}.training")

    def plans_of(self, scheme: str) -> list[tuple[str | None, EvaluationPlan]]:
        """Return the evaluation plans of one scheme with their names, which are None for the presets."""
        own = {} if self.corpus.source is None else {"corpus": self.corpus.source}
        plans = self.evaluation_of(scheme).all_plans()
        return [(name, plan.model_copy(update=own) if name is None else plan) for name, plan in plans]

    def evaluation_of(self, scheme: str) -> EvaluationSettings:
        """Return the evaluation settings of one scheme."""
        own = self.schemes[scheme].evaluation
        return _with_corpus(varied(self.evaluation, own, f"{self._place(scheme)}.evaluation"), self.corpus)

    def extensions_of(self, scheme: str) -> dict[str, ModelPlan]:
        """Return the extended models of one scheme, by the name of the extension."""
        ways = self.schemes[scheme].extensions.items()
        return {way: self._extension(scheme, way, own) for way, own in ways if own is not None}

    def models_of(self, scheme: str) -> list[ModelPlan]:
        """Return the models of one scheme: its own model, then one per context extension."""
        training = self.training_of(scheme)
        length, untrained = training.context_length, self.schemes[scheme].training.get("steps") == 0
        own = ModelPlan(scheme, scheme, None, length, length, self.schemes[scheme], None if untrained else training)
        return [own, *self.extensions_of(scheme).values()]

    def _extension(self, scheme: str, way: str, own: dict[str, Any]) -> ModelPlan:
        place, before = f"{self._place(scheme)}.extensions.{way}", self.training_of(scheme)
        positions = self.schemes[scheme].model_dump(include=POSITION_FIELDS)
        same = all(own.get(key, positions.get(key)) == positions.get(key) for key in POSITION_FIELDS)
        length = own.get("context_length")
        if type(length) is not int or length < before.context_length or (same and length == before.context_length):
            raise ValueError(
                f"{place}.context_length must be above the {before.context_length} tokens of the first training, or "
                f"equal if positions change; got {length!r}"
            )
        untrained = type(own.get("steps")) is int and own["steps"] == 0
        if untrained and same:
            raise ValueError(f"{place}: 0 steps with the positions of the first training change nothing")
        settings = continued(
            before.model_dump(),
            context_length=length,
            steps=EXTENSION_STEPS,
            tokens_per_step=length if untrained else before.step_tokens,
            learning_rate=before.final_learning_rate,
        )
        # Validate training settings even without training, because a sweep may vary the number of steps from 0.
        stated = overlaid(positions | settings, own | ({"steps": 1} if untrained else {}))
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
        """Return the model config of one scheme; ``positions`` defaults to the scheme's own."""
        described = (positions or self.schemes[scheme]).model_dump(include=POSITION_FIELDS)
        decoder = DecoderSettings(**self.model_of(scheme).model_dump(), **described)
        return decoder.config(vocab_size=vocab_size, eos_token_id=eos_token_id)


def _with_corpus(evaluation: EvaluationSettings, corpus: CorpusSettings) -> EvaluationSettings:
    """Set the corpus of plans that name none to the training corpus, whose held-out part they then read."""
    if corpus.source is None:
        return evaluation
    plans = {
        name: plan if "corpus" in plan.model_fields_set else plan.model_copy(update={"corpus": corpus.source})
        for name, plan in evaluation.plans.items()
    }
    return evaluation.model_copy(update={"plans": plans})
