"""One run: one scheme of a recipe with one seed, trained and tested, then extended in each way it names, tested again.

Every step is on disk when it is done.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import set_seed

from attention_priors.analysis import (
    logit_scale_rows,
    prior_mass_rows,
    prior_rows,
    prior_term_rows,
    sink_mass_rows,
)
from attention_priors.data import ANSWER_LENGTH
from attention_priors.evaluation import (
    EvaluationSettings,
    PasskeyRow,
    copying_rows,
    has_given_up,
    passkey_rows,
    perplexity_rows,
)
from attention_priors.experiments.folders import extended_folder, run_folder
from attention_priors.experiments.materials import Materials, Rows
from attention_priors.experiments.plans import carry_out, unfinished
from attention_priors.experiments.recipe import EvaluationChanges, Extension, MixtureSettings, Recipe
from attention_priors.experiments.study import Progress
from attention_priors.experiments.training_record import write_training
from attention_priors.files import append_json_line, read_json, synchronise, write_json
from attention_priors.hub.loading import load_model
from attention_priors.models.decoder import PriorDecoderForCausalLM
from attention_priors.models.repositioning import with_positions
from attention_priors.priors import Window
from attention_priors.training import PositionSettings, mean_loss, train
from attention_priors.wall_clock import WallClock

SOFTWARE = ("attention-priors", "torch", "transformers", "tokenizers", "accelerate")
"""The libraries that a run's numbers depend on, whose versions are recorded."""

STAGES = ("train", "passkey", "perplexity", "copying", "plans")
"""What a run goes through; with each extension of its context once more, as ``WAY: train`` and so on."""

MEASURED = (
    "passkey.jsonl", "perplexity.json", "copying.json", "sink_mass.json", "priors.json", "losses.json",
    "evaluate_seconds.json",
)  # fmt: skip
"""Files about a trained model, beside those of its plans."""


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
    own = {*PositionSettings.model_fields, "at_evaluation"}
    return {
        "corpus": recipe.corpus.model_dump(mode="json"),
        "tokenizer": recipe.tokenizer,
        "model": recipe.model_of(scheme).model_dump(mode="json"),
        "evaluation": recipe.evaluation_of(scheme).model_dump(mode="json", exclude={"plans"}),
        "threads_per_run": recipe.threads_per_run,
        "scheme": recipe.schemes[scheme].model_dump(mode="json", include=own),
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
    _test(materials, scheme, recipe.schemes[scheme], folder, progress)
    for way, extension in recipe.extensions_of(scheme).items():
        extended, tell = extended_folder(folder, way), _named(progress, f"{way}: ")
        if (extended / "done.json").exists():
            tell("train", 1, 1)
        else:
            _extend(materials, scheme, extension, seed, folder, extended, tell)
        _test(materials, scheme, extension.positions, extended, tell)


def _named(progress: Progress, prefix: str) -> Progress:
    return lambda stage, done, total: progress(prefix + stage, done, total)


def _test(materials: Materials, scheme: str, positions: PositionSettings, folder: Path, progress: Progress) -> None:
    """Measure what has not been measured yet of the model in ``folder``, into which positions come in a certain way."""
    evaluation, changes = materials.recipe.evaluation_of(scheme), materials.recipe.schemes[scheme].at_evaluation
    if not (folder / "done.json").exists():
        _test_first(materials, scheme, positions, folder, progress)
    for stage in STAGES[1:-1]:
        progress(stage, 1, 1)
    if unfinished(evaluation, folder):
        if not (folder / "model").exists():
            raise FileNotFoundError(
                f"{folder / 'model'} is gone, and has not been asked all that evaluation.plans ask; remove {folder} to "
                "train it again"
            )
        model = _on_device(_changed_for_evaluation(changes, positions, folder / "model"))
        _add_window(model, changes.window)
        carry_out(
            materials.subject(scheme, model),
            evaluation,
            folder,
            lambda done, total: progress("plans", round(100 * done), round(100 * total)),
        )
    progress("plans", 1, 1)


def _test_first(
    materials: Materials, scheme: str, positions: PositionSettings, folder: Path, progress: Progress
) -> None:
    with WallClock(folder / "evaluate_seconds.json") as clock:

        def tell(stage: str, done: int, total: int) -> None:
            clock.tick()
            progress(stage, done, total)

        stopped = _measure(materials, scheme, positions, folder, tell)
        write_json(folder / "done.json", {"evaluate_seconds": round(clock.seconds, 1), "stopped": stopped})
        clock.forget()


def _measure(
    materials: Materials, scheme: str, positions: PositionSettings, folder: Path, progress: Progress
) -> str | None:
    """Measure all but the plans; return why it stopped early, if it did."""
    recipe = materials.recipe
    model = _on_device(_changed_for_evaluation(recipe.schemes[scheme].at_evaluation, positions, folder / "model"))
    length = max(recipe.training_of(scheme).context_length, 3)
    layers: list[nn.Module] = [model.model] if positions.share_prior else list(model.model.layers)
    write_json(
        folder / "priors.json",
        {
            "priors": prior_rows(layers, length=recipe.longest_text),
            "logit_scales": logit_scale_rows(list(model.model.layers)),
            "prior_terms": prior_term_rows(layers, length=length),
            "prior_mass": prior_mass_rows(layers, length=length),
        },
    )
    _add_window(model, recipe.schemes[scheme].at_evaluation.window)
    evaluation = recipe.evaluation_of(scheme)
    stopped = _test_passkey(materials, evaluation, model, folder, progress)
    _test_perplexity(materials, evaluation, model, folder, progress)
    _test_copying(materials, evaluation, model, folder, progress)
    _test_sink_mass(materials, evaluation, model, folder)
    return stopped


def _on_device(model: PriorDecoderForCausalLM) -> PriorDecoderForCausalLM:
    model.eval()
    if torch.cuda.is_available():
        model.to(torch.device("cuda"))  # pyright: ignore[reportArgumentType]
    return model


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
    for name in MEASURED:
        # Of an earlier model, whose weights are gone: a new one's rows do not join its.
        (folder / name).unlink(missing_ok=True)
    shutil.rmtree(folder / "plans", ignore_errors=True)
    with WallClock(folder / "train_seconds.json") as clock:

        def on_step(step: int) -> None:
            clock.tick()
            progress("train", step, settings.total_steps)

        trained = train(model, rows, settings, folder / "checkpoints", seed=seed, on_step=on_step)
        seconds = clock.seconds
        write_training(folder, model, SOFTWARE, steps=settings.total_steps, seconds=seconds, history=trained.history)
        clock.forget()
    trained.save(folder / "model", materials.saved_tokenizer)
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
    write_training(folder, model, SOFTWARE, steps=0, seconds=0.0, history=[])
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
        model = _on_device(_load(folder / "model"))
        known |= {str(length): mean_loss(model, materials.held_out_rows(length)) for length in missing}
        write_json(path, known)


def _load(saved: Path) -> PriorDecoderForCausalLM:
    model = load_model(saved)
    assert isinstance(model, PriorDecoderForCausalLM)
    return model


def _changed_for_evaluation(
    changes: EvaluationChanges, positions: PositionSettings, saved: Path
) -> PriorDecoderForCausalLM:
    """A saved model, with another base of its rotary positions or another tolerance if that is to be changed."""
    options: dict[str, Any] = {}
    if changes.base_multiplier is not None:
        encoding = positions.encoding
        described = {"name": encoding} if isinstance(encoding, str) else dict(encoding or {})
        options["encoding"] = described | {"base_multiplier": changes.base_multiplier}
    if changes.tolerance is not None:
        options["tolerance"] = changes.tolerance
    return PriorDecoderForCausalLM.from_pretrained(saved, **options)


def _add_window(model: PriorDecoderForCausalLM, size: int | None) -> None:
    if size is None:
        return
    window = Window(model.config.num_attention_heads, size)
    if model.model.prior is not None:
        model.model.prior = model.model.prior + window
        return
    for layer in model.model.layers:
        attention: Any = layer.self_attn
        attention.prior = window if attention.prior is None else attention.prior + window


def _test_passkey(
    materials: Materials,
    evaluation: EvaluationSettings,
    model: PriorDecoderForCausalLM,
    folder: Path,
    progress: Progress,
) -> str | None:
    """Append a line per row to ``passkey.jsonl``; return why it stopped early, if it did."""
    settings = evaluation.passkey
    if settings is None:
        return None
    path = folder / "passkey.jsonl"
    rows = _read_rows(path)
    task = materials.passkey_task(settings)
    total = sum(_cost(length) for length in settings.lengths) * settings.depths
    spent = sum(_cost(row["length"]) for row in rows)
    progress("passkey", spent, total)
    # Every scheme and every seed reads the same texts, so that differences are the models'.
    remaining = passkey_rows(model, task, settings, chunk=evaluation.chunk, seed=0, done=len(rows))
    while len(rows) < settings.depths * len(settings.lengths):
        if len(rows) % settings.depths == 0 and (reason := has_given_up(rows, settings)):
            progress("passkey", total, total)
            return reason
        row = next(remaining)
        rows.append(row)
        append_json_line(path, row)
        spent += _cost(row["length"])
        progress("passkey", spent, total)
    return None


def _read_rows(path: Path) -> list[PasskeyRow]:
    """The rows of an evaluation that was interrupted; a last line that was cut off does not count."""
    if not path.exists():
        return []
    *lines, rest = path.read_text(encoding="utf-8").split("\n")
    if rest:
        path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return [json.loads(line) for line in lines]


def _cost(length: int) -> int:
    """How long a text takes to read, in arbitrary units: attention grows with its square."""
    return length * (4096 + length + ANSWER_LENGTH) // 4096


def _test_perplexity(
    materials: Materials,
    evaluation: EvaluationSettings,
    model: PriorDecoderForCausalLM,
    folder: Path,
    progress: Progress,
) -> None:
    path = folder / "perplexity.json"
    if evaluation.perplexity is None or path.exists():
        return
    texts = materials.texts(evaluation.perplexity.length, evaluation.perplexity.documents)
    progress("perplexity", 0, len(texts))
    rows = perplexity_rows(
        model,
        texts,
        chunk=evaluation.chunk,
        on_text=lambda count: progress("perplexity", count, len(texts)),
    )
    write_json(path, rows)


def _test_copying(
    materials: Materials,
    evaluation: EvaluationSettings,
    model: PriorDecoderForCausalLM,
    folder: Path,
    progress: Progress,
) -> None:
    """Write the losses of each length as soon as they are known."""
    settings = evaluation.copying
    if settings is None:
        return
    path = folder / "copying.json"
    rows: list[Any] = read_json(path) if path.exists() else []
    done = {row["length"] for row in rows}
    for count, length in enumerate(settings.lengths):
        progress("copying", count, len(settings.lengths))
        if length not in done:
            samples = materials.copying_samples(settings, length)
            rows += copying_rows(model, materials.copying_task(), samples, chunk=evaluation.chunk)
            write_json(path, rows)
    progress("copying", len(settings.lengths), len(settings.lengths))


def _test_sink_mass(
    materials: Materials, evaluation: EvaluationSettings, model: PriorDecoderForCausalLM, folder: Path
) -> None:
    settings, path = evaluation.sink_mass, folder / "sink_mass.json"
    if settings is not None and not path.exists():
        texts = materials.texts(settings.length, settings.texts)
        write_json(path, sink_mass_rows(model, texts, factors=settings.factors))
