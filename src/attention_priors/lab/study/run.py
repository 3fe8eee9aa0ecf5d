"""One run: one scheme of a recipe with one seed, trained and tested, then extended in each way it names, tested again.

Every step is on disk when it is done.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from transformers import set_seed

from attention_priors._io import read_json, synchronise, with_nulls, write_json
from attention_priors.hf.loading import load_model
from attention_priors.lab.study.folders import extended_folder, run_folder
from attention_priors.lab.study.materials import Materials, Rows
from attention_priors.lab.study.measurements import FILES, KINDS, measure, on_device
from attention_priors.lab.study.plans import unfinished
from attention_priors.lab.study.recipe import Extension, MixtureSettings, Recipe
from attention_priors.lab.study.study import Progress
from attention_priors.lab.study.training_record import write_training
from attention_priors.lab.train import Observer, PositionSettings, mean_loss, train
from attention_priors.lab.wall_clock import WallClock
from attention_priors.models.decoder import PriorDecoderForCausalLM
from attention_priors.models.repositioning import with_positions

STAGES = ("train", *KINDS)
"""What a run goes through; with each extension of its context once more, as ``WAY: train`` and so on."""


_NOT_DETERMINING: Any = {"plans": True, "perplexity": {"minimum_documents": True}}
"""Settings of an evaluation that its results, or those of a run without plans, do not depend on."""


def is_finished(recipe: Recipe, output: Path, scheme: str, seed: int) -> bool:
    """Whether nothing of a run is left to do."""
    folder = run_folder(output, scheme, seed)
    parts = [folder, *(extended_folder(folder, way) for way in recipe.extensions_of(scheme))]
    evaluation = recipe.evaluation_of(scheme)
    return all((part / "done.json").exists() and not unfinished(evaluation, part) for part in parts)


def identity(materials: Materials, scheme: str, seed: int) -> dict[str, Any]:
    """Everything that determines a run's results before any extension, but for the versions of the libraries.

    Args:
        materials: the recipe, its corpus and tokenizer.
        scheme: name of the scheme.
        seed: the seed.
    """
    recipe = materials.recipe
    return {
        "corpus": recipe.corpus.model_dump(mode="json"),
        "tokenizer": recipe.tokenizer,
        "model": recipe.model_of(scheme).model_dump(mode="json"),
        "evaluation": recipe.evaluation_of(scheme).model_dump(mode="json", exclude=_NOT_DETERMINING),
        "threads_per_run": recipe.threads_per_run,
        "scheme": recipe.schemes[scheme].model_dump(mode="json", include=set(PositionSettings.model_fields)),
        "training": recipe.training_of(scheme).model_dump(mode="json"),
        "seed": seed,
        **materials.fingerprints,
    }


def identities(materials: Materials, output: Path, scheme: str, seed: int) -> dict[Path, dict[str, Any]]:
    """What the files ``identity.json`` of a run must hold: of the run, and of each extension of its context.

    They are apart so that a run that is finished can be extended later, in more ways.
    """
    folder = run_folder(output, scheme, seed)
    found = {folder / "identity.json": identity(materials, scheme, seed)}
    for way, extension in materials.recipe.extensions_of(scheme).items():
        found[extended_folder(folder, way) / "identity.json"] = {
            "context_length": extension.context_length,
            "positions": extension.positions.model_dump(mode="json"),
            "training": None if extension.training is None else extension.training.model_dump(mode="json"),
        }
    return found


def execute(materials: Materials, scheme: str, seed: int, folder: Path, progress: Progress) -> None:
    """Train and test, extend and test again, going on from whatever ``folder`` holds.

    Args:
        materials: the recipe's corpus and tokenizer.
        scheme: name of the scheme.
        seed: of the initial weights, the rows and the test texts' draws.
        folder: the run's own (:func:`run_folder`), checked before (:func:`check_same_recipe`).
        progress: told of every step.
    """
    recipe = materials.recipe
    _train_first(materials, scheme, seed, folder, progress)
    length = recipe.training_of(scheme).context_length
    measure(materials, scheme, recipe.schemes[scheme], length, folder, progress)
    for way, extension in recipe.extensions_of(scheme).items():
        extended, tell = extended_folder(folder, way), _named(progress, f"{way}: ")
        if (extended / "done.json").exists():
            tell("train", 1, 1)
        else:
            _extend(materials, scheme, extension, seed, folder, extended, tell)
        trained = length if extension.training is None else extension.training.context_length
        measure(materials, scheme, extension.positions, trained, extended, tell)


def _named(progress: Progress, prefix: str) -> Progress:
    return lambda stage, done, total: progress(prefix + stage, done, total)


def _train_first(materials: Materials, scheme: str, seed: int, folder: Path, progress: Progress) -> None:
    recipe = materials.recipe
    settings = recipe.training_of(scheme)
    if not (folder / "done.json").exists() and not (folder / "model").exists():
        progress("train", 0, settings.total_steps)
        set_seed(seed)
        model = PriorDecoderForCausalLM(recipe.config_of(scheme, **materials.vocabulary))
        _train(materials, model, settings, materials.training_rows(settings, seed), seed, folder, progress)
    progress("train", settings.total_steps, settings.total_steps)


def _train(
    materials: Materials,
    model: PriorDecoderForCausalLM,
    settings: MixtureSettings,
    rows: Rows,
    seed: int,
    folder: Path,
    progress: Progress,
) -> None:
    """Train a model and save it in ``folder``."""
    for name in FILES:
        # Of an earlier model, whose weights are gone: a new one's rows do not join its.
        (folder / name).unlink(missing_ok=True)
    shutil.rmtree(folder / "plans", ignore_errors=True)
    with WallClock(folder / "train_seconds.json") as clock:

        def on_step(step: int) -> None:
            clock.tick()
            progress("train", step, settings.total_steps)

        observer = Observer(on_step=on_step)
        trained = train(model, rows, settings, folder / "checkpoints", seed=seed, observer=observer)
        seconds = clock.seconds
        write_training(folder, model, steps=settings.total_steps, seconds=seconds, history=trained.history)
    trained.save(folder / "model", materials.saved_tokenizer)
    clock.forget()  # until the model is there, the next call writes the time anew
    shutil.rmtree(folder / "checkpoints")


def _extend(
    materials: Materials,
    scheme: str,
    extension: Extension,
    seed: int,
    folder: Path,
    extended: Path,
    progress: Progress,
) -> None:
    """Make the model of a finished run into one for a longer context, and measure its loss before and after.

    Args:
        materials: the recipe's corpus and tokenizer.
        scheme: name of the scheme.
        extension: the way.
        seed: of what is new in the model, and of the rows.
        folder: the finished run's.
        extended: where everything goes.
        progress: told of every step.
    """
    settings = extension.training
    total = 1 if settings is None else settings.total_steps
    progress("train", 0, total)
    lengths = sorted({materials.recipe.training_of(scheme).context_length, extension.context_length})
    _measure_losses(folder, materials, lengths)
    if not (extended / "model").exists():
        set_seed(seed)
        model = with_positions(_load(folder / "model"), extension.positions.model_dump())
        if settings is None:
            _save_untrained(model, materials, extended)
        else:
            # Other rows than those of any first training, whose seeds are smaller.
            rows = materials.training_rows(settings, seed + 2**32)
            _train(materials, model, settings, rows, seed, extended, progress)
    progress("train", total, total)
    _measure_losses(extended, materials, lengths)


def _save_untrained(model: PriorDecoderForCausalLM, materials: Materials, folder: Path) -> None:
    """Save a model that is not trained on, as one that is."""
    unfinished = folder / "model.unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    write_training(folder, model, steps=0, seconds=0.0, history=[])
    model.save_pretrained(unfinished)
    if materials.saved_tokenizer is not None:
        materials.saved_tokenizer.save_pretrained(unfinished)
    for path in unfinished.iterdir():
        synchronise(path)
    unfinished.rename(folder / "model")
    synchronise(folder)


def _measure_losses(folder: Path, materials: Materials, lengths: list[int]) -> None:
    """Add the mean losses of a folder's model on held-out rows of several lengths to its ``losses.json``."""
    path = folder / "losses.json"
    known: dict[str, float] = read_json(path) if path.exists() else {}
    missing = [length for length in lengths if str(length) not in known]
    if missing:
        model = on_device(_load(folder / "model"))
        known |= {str(length): mean_loss(model, materials.held_out_rows(length)) for length in missing}
        write_json(path, with_nulls(known))


def _load(saved: Path) -> PriorDecoderForCausalLM:
    model = load_model(saved)
    assert isinstance(model, PriorDecoderForCausalLM)
    return model
