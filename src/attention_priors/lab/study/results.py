"""Rows of everything that a comparison has found, as :mod:`attention_priors.lab.results` describes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attention_priors._io import read_json
from attention_priors.lab.machine import now
from attention_priors.lab.results import FIELDS, FORMAT, recipe_sha256
from attention_priors.lab.study.measure import check_texts, measured_plans
from attention_priors.lab.study.recipe import MixtureSettings, Recipe, Scheme
from attention_priors.lab.study.runs import environment_of, extended_folder, run_folder, united
from attention_priors.lab.study.sweep import BEFORE, EXTENSION_AXIS, SCHEME_AXIS

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
"""Kind of the rows in each list of ``priors.json``."""


def collect(
    recipe: Recipe,
    output: Path,
    runs: Sequence[tuple[str, int]],
    *,
    wall_seconds: float,
    corpus: dict[str, Any],
) -> list[Row]:
    """Return the rows of the finished runs of a recipe.

    Args:
        recipe: the recipe.
        output: the comparison's folder.
        runs: scheme and seed of every finished run.
        wall_seconds: how long the comparison has taken, all sessions together.
        corpus: what the runs read: name, fingerprint, sizes.

    Raises:
        RecipeError: the texts of a plan have changed between two of the runs.
    """
    schemes: dict[str, Row] = {}
    rows: list[Row] = []
    environments: list[dict[str, Any]] = []
    models = [model for scheme, seed in runs for model in _models(recipe, output, scheme, seed)]
    answers = [measured_plans(recipe, model.scheme, model.folder) for model in models]
    check_texts((model.folder, plans) for model, plans in zip(models, answers, strict=True))
    for model, plans in zip(models, answers, strict=True):
        training, done = read_json(model.folder / "training.json"), read_json(model.folder / "done.json")
        environments += [environment_of(one) for one in (training, done, *plans)]
        schemes.setdefault(model.name, _scheme_row(model, training))
        measured = [row for entry in plans for row in entry["rows"]]
        stops = (row["stopped"] for row in measured if row["plan"] is None and row.get("stopped"))
        seconds = round(sum(entry["seconds"] for entry in plans), 1)
        found = [run_row(training) | {"evaluate_seconds": seconds, "stopped": next(stops, None)}, *measured]
        for name, learned in read_json(model.folder / "priors.json").items():
            found += [{"row": _KINDS[name]} | row for row in learned]
        if model.extended_from is not None:
            lengths = {"from": model.extended_from.context_length, "to": model.context_length}
            losses = {
                when: {str(length): read_json(one.folder / "losses.json")[str(length)] for length in lengths.values()}
                for when, one in (("before", model.extended_from), ("after", model))
            }
            found.append({"row": "extension"} | lengths | {"steps": training["steps"], "loss": losses})
        rows += [{"row": row["row"], "scheme": model.name, "seed": model.seed} | row for row in found]
    names = [
        name
        for scheme in recipe.schemes
        for name in (scheme, *(extension.name for extension in recipe.extensions_of(scheme).values()))
    ]
    first = study_row(recipe, rows, environments, wall_seconds) | {"corpus": corpus}
    kinds = [*FIELDS]
    rows.sort(key=lambda row: kinds.index(row["row"]))
    return [first, *(schemes[name] for name in names if name in schemes), *rows]


def study_row(
    recipe: Recipe | ImageRecipe, rows: Sequence[Row], environments: Sequence[Row], wall_seconds: float
) -> Row:
    """Return the first row of results: the recipe, and on what, when and how long its runs were made.

    Args:
        recipe: the recipe.
        rows: rows of each finished run.
        environments: those in which they were trained, and in which they were measured.
        wall_seconds: how long the comparison has taken, all sessions together.
    """
    made = united(environments)
    made["machine"]["threads_per_run"] = str(recipe.threads_per_run)
    dumped = recipe.model_dump(mode="json", exclude_defaults=True)
    return {
        "row": "study",
        "format": FORMAT,
        "recipe": dumped,
        "recipe_sha256": recipe_sha256(dumped),
        **made,
        "seeds": sorted({row["seed"] for row in rows}),
        "created": now(),
        "wall_seconds": round(wall_seconds, 1),
    }


def run_row(training: Row) -> Row:
    """Return the row of a training that a run's ``training.json`` describes, without scheme and seed."""
    loss = training["history"][-1]["loss"] if training["history"] else None
    return {"row": "run"} | {key: training[key] for key in ("train_seconds", "steps", "history")} | {"final_loss": loss}


_LONGEST_VALUE = 60
"""Characters of an argument in a description."""


@dataclass(frozen=True)
class _Model:
    """A trained and tested model: a scheme's, or the same after one extension of its context."""

    name: str
    seed: int
    folder: Path
    description: str
    context_length: int
    """That it is for."""
    trained_length: int
    """That it was last trained at: an extension may go without training."""
    axes: dict[str, str | int | float]
    extended_from: _Model | None = None

    @property
    def scheme(self) -> str:
        """The recipe's scheme that it comes from."""
        return self.name if self.extended_from is None else self.extended_from.name


def _models(recipe: Recipe, output: Path, scheme: str, seed: int) -> Iterator[_Model]:
    """What a run has made so far."""
    folder = run_folder(output, scheme, seed)
    own, length = recipe.schemes[scheme], recipe.training_of(scheme).context_length
    extensions = recipe.extensions_of(scheme)
    if not extensions:
        yield _Model(scheme, seed, folder, describe(own), length, length, own.axes)
        return
    axes = {SCHEME_AXIS: scheme} | own.axes
    first = _Model(scheme, seed, folder, describe(own), length, length, axes | {EXTENSION_AXIS: BEFORE})
    yield first
    for way, extension in extensions.items():
        extended = extended_folder(folder, way)
        if (extended / "done.json").exists():
            words = describe(own.model_copy(update=extension.positions.model_dump()))
            words += f" · {_trained_on(extension.training, extension.context_length)}, from {scheme}"
            stands = axes | {EXTENSION_AXIS: way}
            trained = length if extension.training is None else extension.training.context_length
            yield _Model(
                extension.name, seed, extended, words, extension.context_length, trained, stands, extended_from=first
            )


def _trained_on(training: MixtureSettings | None, context_length: int) -> str:
    if training is None:
        return f"for {context_length} tokens without more training"
    return f"{training.total_steps} more steps at {context_length} tokens"


def _scheme_row(model: _Model, training: Row) -> Row:
    entry: Row = {
        "row": "scheme",
        "scheme": model.name,
        "description": model.description,
        "context_length": model.trained_length,
        "parameters": training["parameters"],
        "prior_parameters": training["prior_parameters"],
    }
    if model.axes:
        entry["axes"] = model.axes
    if model.extended_from is not None:
        entry["extended_from"] = model.extended_from.name
    return entry


def describe(scheme: Scheme) -> str:
    """A scheme in one line, as code would make it: ``generalized_gaussian(init='roles') · ssmax``."""
    words = described([scheme.encoding, scheme.prior, scheme.logit_scale])
    if scheme.share_prior:
        words.append("one prior for all layers")
    if (tolerance := scheme.evaluation.get("tolerance")) is not None:
        words.append(f"tolerance={tolerance} at evaluation")
    words += [_call({"name": key} | own) for key in ("model", "training") if (own := getattr(scheme, key))]
    return " · ".join(words) or "no position but the causal mask"


def described(descriptions: Sequence[Any]) -> list[str]:
    """Parts of a model, each as code would make it: of each a description, a list of them, or None."""
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
    """A value that a line has room for; the recipe has the whole, such as the table that a prior starts from."""
    return value if len(value) <= _LONGEST_VALUE else f"{value[: _LONGEST_VALUE // 2]}…"
