"""Comparisons of decoders: schemes are trained on the same rows and tested on the same texts.

A run is one scheme with one seed: trained and measured, then extended in each way that the recipe names, and measured
again. Every finished step is on disk.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import set_seed

from attention_priors._io import read_json, synchronise, with_nulls, write_json
from attention_priors.hf.loading import load_model
from attention_priors.lab.machine import WallClock
from attention_priors.lab.study.materials import Materials
from attention_priors.lab.study.measure import FILES, is_measured, measure, on_device
from attention_priors.lab.study.recipe import Extension, MixtureSettings, Recipe
from attention_priors.lab.study.results import collect
from attention_priors.lab.study.runs import Progress, Study, extended_folder, run_folder, write_training
from attention_priors.lab.train import Observer, PositionSettings, mean_loss, train
from attention_priors.models.decoder import PriorDecoderForCausalLM
from attention_priors.models.repositioning import with_positions

STAGES = {"train": 0.7, "evaluate": 0.3}
EXTENSION_STAGES = {"train": 0.25, "evaluate": 0.3}

_NOT_DETERMINING: Any = {"plans": True, "perplexity": {"minimum_documents": True}}
"""Settings of an evaluation that its results, or those of a run without plans, do not depend on."""


class DecoderStudy(Study[Recipe]):
    """A :class:`Recipe` with its corpus and tokenizer.

    Args:
        recipe: Recipe of the comparison.
        cache: Folder of trained tokenizers.
    """

    def __init__(self, recipe: Recipe, cache: Path) -> None:
        self.recipe = recipe
        self.materials = Materials.load(recipe, cache)
        self.left_out = self.materials.left_out

    def check(self) -> None:
        """Make a text, a row and a model without weights of each kind."""
        self.materials.check()

    def identities(self, output: Path, scheme: str, seed: int) -> dict[Path, dict[str, Any]]:
        """Return what determines the run, and each extension of its context, but for the versions of the libraries.

        They are apart so that a finished run can be extended later, in more ways.
        """
        recipe, folder = self.recipe, run_folder(output, scheme, seed)
        whole = {
            "corpus": recipe.corpus.model_dump(mode="json"),
            "tokenizer": recipe.tokenizer,
            "model": recipe.model_of(scheme).model_dump(mode="json"),
            "evaluation": recipe.evaluation_of(scheme).model_dump(mode="json", exclude=_NOT_DETERMINING),
            "threads_per_run": recipe.threads_per_run,
            "scheme": recipe.schemes[scheme].model_dump(mode="json", include=set(PositionSettings.model_fields)),
            "training": recipe.training_of(scheme).model_dump(mode="json"),
            "seed": seed,
            **self.materials.fingerprints,
        }
        found = {folder / "identity.json": whole}
        for way, extension in recipe.extensions_of(scheme).items():
            found[extended_folder(folder, way) / "identity.json"] = {
                "context_length": extension.context_length,
                "positions": extension.positions.model_dump(mode="json"),
                "training": None if extension.training is None else extension.training.model_dump(mode="json"),
            }
        return found

    def is_finished(self, output: Path, scheme: str, seed: int) -> bool:
        """Return whether a run is trained, measured, extended and measured again."""
        folder = run_folder(output, scheme, seed)
        parts = [folder, *(extended_folder(folder, way) for way in self.recipe.extensions_of(scheme))]
        return all(is_measured(self.recipe, scheme, part) for part in parts)

    def stages(self, scheme: str) -> dict[str, float]:
        """Return the stages of the run, and those of each extension."""
        shares = dict(STAGES)
        for way in self.recipe.extensions_of(scheme):
            shares |= {f"{way}: {stage}": share for stage, share in EXTENSION_STAGES.items()}
        return shares

    def execute(self, output: Path, scheme: str, seed: int, progress: Progress) -> None:
        """Train and measure, extend and measure again.

        Args:
            output: Folder of the comparison.
            scheme: Name of the scheme.
            seed: Seed of the initial weights and the training rows.
            progress: Called with every step.
        """
        _Run(self.materials, scheme, seed, run_folder(output, scheme, seed), progress).execute()

    def collect(self, output: Path, runs: Sequence[tuple[str, int]], wall_seconds: float) -> list[dict[str, Any]]:
        """Return the rows that :mod:`attention_priors.lab.results` describes."""
        return collect(self.recipe, output, runs, wall_seconds=wall_seconds, corpus=dict(self.materials.description))


@dataclass(frozen=True)
class _Run:
    materials: Materials
    scheme: str
    seed: int
    folder: Path
    progress: Progress

    def execute(self) -> None:
        recipe = self.materials.recipe
        settings = recipe.training_of(self.scheme)
        if not (self.folder / "done.json").exists() and not (self.folder / "model").exists():
            self.progress("train", 0, settings.total_steps)
            set_seed(self.seed)
            model = PriorDecoderForCausalLM(recipe.config_of(self.scheme, **self.materials.vocabulary))
            self._train(model, settings, self.seed, self.folder, self.progress)
        self.progress("train", settings.total_steps, settings.total_steps)
        self._measure(recipe.schemes[self.scheme], settings, self.folder, self.progress)
        for way, extension in recipe.extensions_of(self.scheme).items():
            self._extend(way, extension)

    def _measure(self, positions: PositionSettings, training: MixtureSettings, folder: Path, tell: Progress) -> None:
        measure(self.materials, self.scheme, positions, training.context_length, folder, tell)

    def _train(
        self, model: PriorDecoderForCausalLM, settings: MixtureSettings, seed: int, folder: Path, tell: Progress
    ) -> None:
        """Train a model on the rows of a seed, and save it in ``folder``."""
        for name in FILES:
            # Of an earlier model, whose weights are gone: a new one's rows do not join its.
            (folder / name).unlink(missing_ok=True)
        rows = self.materials.training_rows(settings, seed)
        with WallClock(folder / "train_seconds.json") as clock:

            def on_step(step: int) -> None:
                clock.tick()
                tell("train", step, settings.total_steps)

            observer = Observer(on_step=on_step)
            trained = train(model, rows, settings, folder / "checkpoints", seed=self.seed, observer=observer)
            seconds = clock.seconds
            write_training(folder, model, steps=settings.total_steps, seconds=seconds, history=trained.history)
        trained.save(folder / "model", self.materials.saved_tokenizer)
        clock.forget()  # until the model is there, the next call writes the time anew
        shutil.rmtree(folder / "checkpoints")

    def _extend(self, way: str, extension: Extension) -> None:
        """Make the model of the finished run into one for a longer context, and measure both."""
        before = self.materials.recipe.training_of(self.scheme)
        folder, settings = extended_folder(self.folder, way), extension.training
        total = 1 if settings is None else settings.total_steps

        def tell(stage: str, done: int, total: int) -> None:
            self.progress(f"{way}: {stage}", done, total)

        if not (folder / "done.json").exists():
            tell("train", 0, total)
            lengths = sorted({before.context_length, extension.context_length})
            self._measure_losses(self.folder, lengths)
            if not (folder / "model").exists():
                set_seed(self.seed)
                model = with_positions(_load(self.folder / "model"), extension.positions.model_dump())
                if settings is None:
                    self._save_untrained(model, folder)
                else:
                    # Other rows than those of any first training, whose seeds are smaller.
                    self._train(model, settings, self.seed + 2**32, folder, tell)
            tell("train", total, total)
            self._measure_losses(folder, lengths)
        tell("train", total, total)
        self._measure(extension.positions, settings or before, folder, tell)

    def _save_untrained(self, model: PriorDecoderForCausalLM, folder: Path) -> None:
        """Save a model that is not trained on, as one that is."""
        unfinished = folder / "model.unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        write_training(folder, model, steps=0, seconds=0.0, history=[])
        model.save_pretrained(unfinished)
        if self.materials.saved_tokenizer is not None:
            self.materials.saved_tokenizer.save_pretrained(unfinished)
        for path in unfinished.iterdir():
            synchronise(path)
        unfinished.rename(folder / "model")
        synchronise(folder)

    def _measure_losses(self, folder: Path, lengths: list[int]) -> None:
        """Add the mean losses of a folder's model on held-out rows of several lengths to its ``losses.json``."""
        path = folder / "losses.json"
        known: dict[str, float] = read_json(path) if path.exists() else {}
        missing = [length for length in lengths if str(length) not in known]
        if missing:
            model = on_device(_load(folder / "model"))
            known |= {str(length): mean_loss(model, self.materials.held_out_rows(length)) for length in missing}
            write_json(path, with_nulls(known))


def _load(saved: Path) -> PriorDecoderForCausalLM:
    model = load_model(saved)
    assert isinstance(model, PriorDecoderForCausalLM)
    return model
