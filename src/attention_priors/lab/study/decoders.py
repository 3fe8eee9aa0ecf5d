"""Comparisons of decoders: all schemes train on the same rows and are tested on the same texts.

A run is one scheme with one seed. It is trained and measured, then extended in each way of the recipe and measured
again. Every finished step is on disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel, set_seed

from attention_priors._io import read_json, remove_temporaries, replacing, with_nulls, write_json
from attention_priors.hf import attached_priors
from attention_priors.hf.loading import load_model
from attention_priors.lab.evaluate import Observer, evaluate
from attention_priors.lab.inspect import (
    logit_scale_rows,
    prior_mass_rows,
    prior_reach_rows,
    prior_rows,
    prior_term_rows,
    sink_mass_rows,
)
from attention_priors.lab.machine import WallClock
from attention_priors.lab.study.materials import Materials
from attention_priors.lab.study.recipe import ModelPlan, Recipe
from attention_priors.lab.study.results import collect, read_measured
from attention_priors.lab.study.runs import Progress, environment, run_folder, train_and_save, write_training
from attention_priors.lab.study.sweep import POSITION_FIELDS, START_FIELDS
from attention_priors.lab.tasks import EvaluationPlan
from attention_priors.lab.tasks.subject import DTYPES
from attention_priors.lab.train.extend import for_evaluation, mean_loss
from attention_priors.lab.train.recipe import make_model
from attention_priors.models.decoder import PriorDecoderForCausalLM
from attention_priors.models.repositioning import with_positions

STAGES = {"train": 0.7, "evaluate": 0.3}
EXTENSION_STAGES = {"train": 0.25, "evaluate": 0.3}

_NOT_DETERMINING: Any = {"plans": True, "perplexity": {"minimum_documents": True}}
"""Evaluation settings that determine neither the training nor the results of the presets."""


class DecoderStudy:
    """:class:`Recipe` with its corpus and tokenizer.

    Args:
        recipe: Recipe of the comparison.
        cache: Folder of trained tokenizers.

    Attributes:
        left_out: Message about unused files of the corpus. None if all files are used.
    """

    def __init__(self, recipe: Recipe, cache: Path) -> None:
        self.recipe = recipe
        self.materials = Materials.load(recipe, cache)
        self.left_out = self.materials.left_out

    def check(self) -> None:
        """Check that all texts, rows and models can be made, by making one of each kind.

        Raises:
            RecipeError: a part of the recipe cannot be made.
        """
        self.materials.check()

    def identities(self, output: Path, scheme: str, seed: int) -> dict[Path, dict[str, Any]]:
        """Return the content of each ``identity.json``: everything that determines the run, except library versions.

        Extensions have files of their own, so that a finished run can be extended later.
        """
        recipe, run = self.recipe, run_folder(output, scheme, seed)
        own, *extensions = recipe.models_of(scheme)
        whole = {
            "corpus": recipe.corpus.model_dump(mode="json"),
            "tokenizer": recipe.tokenizer,
            "model": None if recipe.pretrained else recipe.model_of(scheme).model_dump(mode="json"),
            "evaluation": recipe.evaluation_of(scheme).model_dump(mode="json", exclude=_NOT_DETERMINING),
            "threads_per_run": recipe.threads_per_run,
            "scheme": recipe.schemes[scheme].model_dump(mode="json", include=START_FIELDS)
            if recipe.pretrained
            else own.positions.model_dump(mode="json", include=POSITION_FIELDS),
            "training": None if own.training is None else own.training.model_dump(mode="json"),
            "seed": seed,
            **self.materials.fingerprints,
        }
        found = {run / "identity.json": whole}
        for model in extensions:
            found[model.folder(run) / "identity.json"] = {
                "context_length": model.context_length,
                "positions": model.positions.model_dump(mode="json"),
                "training": None if model.training is None else model.training.model_dump(mode="json"),
            }
        return found

    def is_finished(self, output: Path, scheme: str, seed: int) -> bool:
        """Return whether a run and all its extensions are trained and measured."""
        run = run_folder(output, scheme, seed)
        folders = [model.folder(run) for model in self.recipe.models_of(scheme)]
        return all((one / "done.json").exists() and not self._unmeasured(scheme, one) for one in folders)

    def stages(self, scheme: str) -> dict[str, float]:
        """Return the stages of the run and of each extension, with their approximate shares of the time."""
        shares = dict(STAGES)
        for way in self.recipe.extensions_of(scheme):
            shares |= {f"{way}: {stage}": share for stage, share in EXTENSION_STAGES.items()}
        return shares

    def execute(self, output: Path, scheme: str, seed: int, progress: Progress) -> None:
        """Train and measure a run, then extend it and measure again.

        Args:
            output: Folder of the comparison.
            scheme: Name of the scheme.
            seed: Seed of the initial weights and the training rows.
            progress: Callback for every step.
        """
        run = run_folder(output, scheme, seed)
        for model in self.recipe.models_of(scheme):
            self._make(model, seed, run, progress if model.way is None else _stages_of(model.way, progress))

    def _make(self, plan: ModelPlan, seed: int, run: Path, progress: Progress) -> None:
        """Make one model of a run and measure it; an extension starts from the run's finished model."""
        folder, settings = plan.folder(run), plan.training
        total = 1 if settings is None else settings.total_steps
        lengths: list[int] = []
        if plan.way is not None:
            lengths = sorted({self.recipe.training_of(plan.scheme).context_length, plan.context_length})
        if not (folder / "done.json").exists():
            self._measure_losses(run, lengths)
            if not (folder / "model").exists():
                progress("train", 0, total)
                set_seed(seed)
                # A first training has a smaller seed, so an extension reads different rows.
                rows_seed = seed if plan.way is None else seed + 2**32
                model = self._untrained(plan, run)
                if settings is None:
                    self._save_untrained(model, folder)
                else:
                    train_and_save(
                        model,
                        self.materials.training_rows(settings, rows_seed),
                        settings,
                        folder,
                        seed=seed,
                        progress=progress,
                        preprocessor=self.materials.saved_tokenizer,
                        run_name=", ".join(filter(None, [self.recipe.name, plan.scheme, plan.way])),
                    )
            self._measure_losses(folder, lengths)
        progress("train", total, total)
        self.measure(plan, folder, progress)

    def _untrained(self, plan: ModelPlan, run: Path) -> PreTrainedModel:
        if self.recipe.pretrained is not None:
            assert self.materials.saved_tokenizer is not None
            return make_model(self.recipe.start_of(plan.scheme), self.materials.saved_tokenizer)
        if plan.way is None:
            return PriorDecoderForCausalLM(self.recipe.config_of(plan.scheme, **self.materials.vocabulary))
        return with_positions(
            _load(run / "model"), {field: getattr(plan.positions, field) for field in POSITION_FIELDS}
        )

    def _save_untrained(self, model: PreTrainedModel, folder: Path) -> None:
        """Save a model without training, in the same files as a trained model."""
        remove_temporaries(folder)
        write_training(folder, model)
        with replacing(folder / "model") as unfinished:
            for part in (model, self.materials.saved_tokenizer):
                if part is not None:
                    part.save_pretrained(unfinished)

    def _measure_losses(self, folder: Path, lengths: list[int]) -> None:
        """Add the model's mean losses on held-out rows of several lengths to ``losses.json``."""
        path = folder / "losses.json"
        known: dict[str, float] = read_json(path) if path.exists() else {}
        missing = [length for length in lengths if str(length) not in known]
        if missing:
            model = for_evaluation(_load(folder / "model"))
            known |= {str(length): mean_loss(model, self.materials.held_out_rows(length)) for length in missing}
            write_json(path, with_nulls(known))

    def measure(self, plan: ModelPlan, folder: Path, progress: Progress) -> None:
        """Measure a trained model where measurements are missing.

        Records of the plans go to ``results.jsonl``, in the format of ``attention-priors evaluate``. Results of each
        finished plan go to ``measured.json``, together with the plan.

        Args:
            plan: Model to measure.
            folder: Folder of the run, with the model in its subfolder ``model``.
            progress: Callback for every step.

        Raises:
            FileNotFoundError: the model is gone before all measurements are finished.
        """
        left = self._unmeasured(plan.scheme, folder)
        if left or not (folder / "done.json").exists():
            if not (folder / "model").exists():
                raise FileNotFoundError(
                    f"{folder / 'model'} is missing, and measurements of the recipe are not finished; remove {folder} "
                    "to train the model again"
                )
            evaluation = self.recipe.evaluation_of(plan.scheme)
            dtype, tolerance = DTYPES[evaluation.dtype], evaluation.tolerance
            if tolerance is None:
                model = load_model(folder / "model", dtype)
            else:
                model = PriorDecoderForCausalLM.from_pretrained(folder / "model", dtype=dtype, tolerance=tolerance)
            for_evaluation(model)
            if not (folder / "priors.json").exists():
                write_json(folder / "priors.json", self._learned_rows(model, plan))
            subject = self.materials.subject(plan.scheme, model)
            for index, (name, asked) in enumerate(left):
                with WallClock(folder / "evaluate_seconds.json") as clock:

                    def on_work(
                        task: str, done: float, total: float, index: int = index, asked: EvaluationPlan = asked
                    ) -> None:
                        clock.tick()
                        share = (asked.tasks.index(task) + done / max(total, 1e-9)) / len(asked.tasks)
                        progress("evaluate", round(100 * (index + share)), 100 * len(left))

                    found = evaluate(subject, asked, folder, chunk=evaluation.chunk, observer=Observer(on_work=on_work))
                    rows = [{"row": row["row"], "plan": name} | row for row in found.rows]
                    entry = {"name": name, "plan": asked.question, "texts": found.texts, "rows": rows}
                    entry |= {"seconds": round(clock.seconds, 1)} | environment()
                    write_json(folder / "measured.json", with_nulls([*read_measured(folder), entry]))
                    clock.forget()
            if not (folder / "done.json").exists():
                write_json(folder / "done.json", environment())
        progress("evaluate", 1, 1)

    def _unmeasured(self, scheme: str, folder: Path) -> list[tuple[str | None, EvaluationPlan]]:
        """Return the plans of a scheme without finished measurements."""
        known = [(entry["name"], entry["plan"]) for entry in read_measured(folder)]
        return [(name, plan) for name, plan in self.recipe.plans_of(scheme) if (name, plan.question) not in known]

    def _learned_rows(self, model: PreTrainedModel, plan: ModelPlan) -> dict[str, Any]:
        """Return rows about the trained priors, for texts up to the recipe's longest length."""
        length, longest = max(plan.trained_length, 3), self.recipe.longest_text
        lengths = [length]
        while 2 * lengths[-1] <= longest:
            lengths.append(2 * lengths[-1])
        if isinstance(model, PriorDecoderForCausalLM):
            every: list[nn.Module] = list(model.model.layers)
            layers: list[nn.Module] = [model.model] if plan.positions.share_prior else every
        else:
            attached = attached_priors(model)
            layers = every = [attached.get(layer, nn.Identity()) for layer in range(max(attached, default=-1) + 1)]
        rows: dict[str, Any] = {
            "priors": prior_rows(layers, length=longest),
            "logit_scales": logit_scale_rows(every),
            "prior_terms": prior_term_rows(layers, length=length),
            "prior_mass": prior_mass_rows(layers, length=length),
            "prior_reach": prior_reach_rows(layers, lengths=lengths),
        }
        settings = self.recipe.evaluation_of(plan.scheme).sink_mass
        if settings is not None:
            texts = self.materials.texts(settings.length, settings.texts)
            rows["sink_mass"] = with_nulls(sink_mass_rows(model, texts, factors=settings.factors))
        return rows

    def collect(self, output: Path, runs: Sequence[tuple[str, int]], wall_seconds: float) -> list[dict[str, Any]]:
        """Return the rows described in :mod:`attention_priors.lab.results`."""
        return collect(self.recipe, output, runs, wall_seconds=wall_seconds, corpus=dict(self.materials.description))


def _stages_of(way: str, progress: Progress) -> Progress:
    """Return a progress callback for the stages of an extension."""
    return lambda stage, done, total: progress(f"{way}: {stage}", done, total)


def _load(saved: Path) -> PriorDecoderForCausalLM:
    model = load_model(saved)
    assert isinstance(model, PriorDecoderForCausalLM)
    return model
