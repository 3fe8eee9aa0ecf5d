"""Rows of a comparison's results, in the format of :mod:`attention_priors.lab.results`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from attention_priors._io import read_json
from attention_priors.hf.loading import load_config
from attention_priors.lab.machine import now
from attention_priors.lab.results import FIELDS, FORMAT, recipe_sha256
from attention_priors.lab.strict_yaml import RecipeError
from attention_priors.lab.study.recipe import ModelPlan, Recipe, Scheme
from attention_priors.lab.study.runs import run_folder, united
from attention_priors.lab.study.sweep import BEFORE, EXTENSION_AXIS, POSITION_FIELDS, SCHEME_AXIS

if TYPE_CHECKING:
    from attention_priors.lab.study.images.recipe import ImageRecipe

Row = dict[str, Any]


_KINDS = {
    "priors": "prior",
    "prior_terms": "prior_term",
    "prior_mass": "prior_mass",
    "prior_reach": "prior_reach",
    "logit_scales": "logit_scale",
    "sink_mass": "sink_mass",
}
"""Row kind of each list in ``priors.json``."""


def collect(
    recipe: Recipe,
    output: Path,
    runs: Sequence[tuple[str, int]],
    *,
    wall_seconds: float,
    corpus: dict[str, Any],
) -> list[Row]:
    """Return the rows of a recipe's finished runs.

    Args:
        recipe: recipe of the comparison.
        output: folder of the comparison.
        runs: scheme and seed of every finished run.
        wall_seconds: duration of the comparison over all sessions.
        corpus: name, fingerprint and sizes of the corpus.

    Raises:
        RecipeError: the texts of a plan differ between two runs.
    """
    models: list[tuple[ModelPlan, int, Path]] = []
    for scheme, seed in runs:
        planned = [(model, model.folder(run_folder(output, scheme, seed))) for model in recipe.models_of(scheme)]
        models += [(model, seed, folder) for model, folder in planned if (folder / "done.json").exists()]
    answers = [measured_plans(recipe, model.scheme, folder) for model, _, folder in models]
    check_texts((folder, plans) for (_, _, folder), plans in zip(models, answers, strict=True))
    start = None if recipe.pretrained is None else load_config(recipe.pretrained)
    pretrained_length = getattr(start, "max_position_embeddings", None)
    found: list[ModelResults] = []
    for (model, seed, folder), plans in zip(models, answers, strict=True):
        training, done = read_json(folder / "training.json"), read_json(folder / "done.json")
        measured = [row for entry in plans for row in entry["rows"]]
        stops = (row["stopped"] for row in measured if row["plan"] is None and row.get("stopped"))
        seconds = round(sum(entry["seconds"] for entry in plans), 1)
        rows = [run_row(training) | {"evaluate_seconds": seconds, "stopped": next(stops, None)}, *measured]
        for name, learned in read_json(folder / "priors.json").items():
            rows += [{"row": _KINDS[name]} | row for row in learned]
        if model.way is not None:
            run = run_folder(output, model.scheme, seed)
            lengths = {"from": recipe.training_of(model.scheme).context_length, "to": model.context_length}
            losses = {
                when: {str(length): read_json(of / "losses.json")[str(length)] for length in lengths.values()}
                for when, of in (("before", run), ("after", folder))
            }
            rows.append({"row": "extension"} | lengths | {"steps": training["steps"], "loss": losses})
        found.append(
            ModelResults(_scheme_row(recipe, model, training, pretrained_length), seed, [training, done, *plans], rows)
        )
    kinds = ["study", "scheme", *FIELDS]
    rows = study_rows(recipe, recipe.model_names, found, wall_seconds, corpus=corpus)
    return sorted(rows, key=lambda row: kinds.index(row["row"]))


class ModelResults(NamedTuple):
    """Results of one trained model."""

    scheme: Row
    """Row of the model's scheme, shared by all seeds."""
    seed: int
    records: list[Row]
    """Contents of the files that record the environments of training and measurement."""
    rows: list[Row]
    """All other rows, without scheme and seed."""


def study_rows(
    recipe: Recipe | ImageRecipe, names: Iterable[str], models: Sequence[ModelResults], wall_seconds: float, **read: Row
) -> list[Row]:
    """Return all rows of results; the first row describes the comparison and its environments.

    Args:
        recipe: recipe of the comparison.
        names: names of the schemes, in display order.
        models: results of finished runs.
        wall_seconds: duration of the comparison over all sessions.
        read: ``corpus`` or ``images``.
    """
    made = united([record for model in models for record in model.records])
    made["machine"]["threads_per_run"] = str(recipe.threads_per_run)
    dumped = recipe.model_dump(mode="json", exclude_defaults=True)
    first = {
        "row": "study",
        "format": FORMAT,
        "recipe": dumped,
        "recipe_sha256": recipe_sha256(dumped),
        **made,
        "seeds": sorted({model.seed for model in models}),
        "created": now(),
        "wall_seconds": round(wall_seconds, 1),
    }
    schemes = {model.scheme["scheme"]: model.scheme for model in reversed(models)}
    rows = [
        {"row": row["row"], "scheme": model.scheme["scheme"], "seed": model.seed} | row
        for model in models
        for row in model.rows
    ]
    return [first | read, *(schemes[name] for name in names if name in schemes), *rows]


def run_row(training: Row) -> Row:
    """Return the row of a training from its ``training.json``, without scheme and seed."""
    loss = training["history"][-1]["loss"] if training["history"] else None
    return {"row": "run"} | {key: training[key] for key in ("train_seconds", "steps", "history")} | {"final_loss": loss}


def read_measured(folder: Path) -> list[Row]:
    """Return the entries of a model's ``measured.json``, each with a plan and its results."""
    path = folder / "measured.json"
    return read_json(path) if path.exists() else []


def measured_plans(recipe: Recipe, scheme: str, folder: Path) -> list[dict[str, Any]]:
    """Return the entries of ``measured.json`` for the plans of the recipe, in the recipe's order."""
    asked = [(name, plan.question) for name, plan in recipe.plans_of(scheme)]
    entries = {
        asked.index(key): entry for entry in read_measured(folder) if (key := (entry["name"], entry["plan"])) in asked
    }
    return [entries[place] for place in sorted(entries)]


def check_texts(models: Iterable[tuple[Path, Iterable[Mapping[str, Any]]]]) -> None:
    """Check that all models of a comparison read the same texts for each plan.

    A plan may read a folder or the files of a package, which may change between measurements.

    Args:
        models: Folder and entries (:func:`measured_plans`) of each model.

    Raises:
        RecipeError: two models read different texts.
    """
    first: dict[tuple[str | None, str], tuple[str, Path]] = {}
    for folder, entries in models:
        for entry in entries:
            for task, texts in entry["texts"].items():
                other, where = first.setdefault((entry["name"], task), (texts, folder))
                if texts != other:
                    place = task if entry["name"] is None else f"plans.{entry['name']}"
                    raise RecipeError(
                        f"evaluation.{place}: the texts of the task {task!r} have changed between {where} and "
                        f"{folder}; remove measured.json from the older folder to measure again"
                    )


_LONGEST_VALUE = 60
"""Longest argument in a description, in characters."""


def _scheme_row(recipe: Recipe, model: ModelPlan, training: Row, pretrained_length: int | None) -> Row:
    own = recipe.schemes[model.scheme]
    positions = {field: getattr(model.positions, field) for field in POSITION_FIELDS}
    description = describe(own.model_copy(update=positions), recipe.pretrained is not None)
    if model.way is not None:
        length = f"{model.context_length} tokens"
        untrained = f"for {length} without more training"
        trained = untrained if model.training is None else f"{model.training.total_steps} more steps at {length}"
        description += f" · {trained}, from {model.scheme}"
    axes = own.axes
    if len(recipe.models_of(model.scheme)) > 1:
        axes = {SCHEME_AXIS: model.scheme} | axes | {EXTENSION_AXIS: model.way or BEFORE}
    entry: Row = {
        "row": "scheme",
        "scheme": model.name,
        "description": description,
        "context_length": model.trained_length,
        "parameters": training["parameters"],
        "prior_parameters": training["prior_parameters"],
    }
    if pretrained_length is not None:
        entry["pretrained_length"] = pretrained_length
    if axes:
        entry["axes"] = axes
    if model.way is not None:
        entry["extended_from"] = model.scheme
    return entry


def describe(scheme: Scheme, pretrained: bool = False) -> str:
    """Return a one-line description of a scheme in code style: ``generalized_gaussian(init='roles') · ssmax``.

    Args:
        scheme: Scheme of a recipe.
        pretrained: Whether the scheme starts from a pretrained model.
    """
    words = described([scheme.encoding, scheme.prior, scheme.logit_scale, scheme.null_logit, scheme.key_bias])
    if scheme.share_prior:
        words.append("one prior for all layers")
    if scheme.layer_pattern is not None:
        words.append(f"layers {', '.join(scheme.layer_pattern)}")
    for name, kind in (scheme.layer_kinds or {}).items():
        words.append(f"{name}: {' + '.join(described(list(kind.values()))) or 'nothing more'}")
    if (tolerance := scheme.evaluation.get("tolerance")) is not None:
        words.append(f"tolerance={tolerance} at evaluation")
    attached = {} if scheme.attach is None else scheme.attach.model_dump(exclude_defaults=True)
    words += described([attached.pop("prior", None), attached.pop("logit_scale", None)])
    own = {"attach": attached} | {key: getattr(scheme, key) for key in ("rope_parameters", "model", "training")}
    words += [_call({"name": key} | changes) for key, changes in own.items() if changes]
    return " · ".join(words) or ("nothing changed" if pretrained else "no position but the causal mask")


def described(descriptions: Sequence[Any]) -> list[str]:
    """Return each part of a model in the style of code; parts are descriptions, lists of descriptions, or None."""
    parts: list[Any] = []
    for part in descriptions:
        parts += part if isinstance(part, list) else [] if part is None else [part]
    return [_call(part) for part in parts]


def _call(part: dict[str, Any] | str) -> str:
    if isinstance(part, str):
        return part
    arguments = ", ".join(f"{key}={_shortened(repr(value))}" for key, value in part.items() if key != "name")
    return f"{part['name']}({arguments})" if arguments else part["name"]


def _shortened(value: str) -> str:
    """Shorten a value to fit on a line, such as the initial table of a prior."""
    return value if len(value) <= _LONGEST_VALUE else f"{value[: _LONGEST_VALUE // 2]}…"
