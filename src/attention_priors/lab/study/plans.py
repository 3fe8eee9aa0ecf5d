"""What a comparison's models are asked beyond pass keys and perplexity: the tasks of ``attention-priors evaluate``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from attention_priors._io import read_json, with_nulls, write_json
from attention_priors.lab.evaluate import (
    Accuracy,
    AtDepth,
    EvaluationPlan,
    EvaluationSettings,
    Observer,
    Subject,
    Summary,
    evaluate,
)
from attention_priors.lab.results_format import PLAN_SECTIONS
from attention_priors.lab.strict_yaml import RecipeError
from attention_priors.lab.study.environment import environment
from attention_priors.lab.study.folders import folder_name

Row = dict[str, Any]

_TIMES = ("length", "pass", "passes", "mean_ms", "std_ms", "median_ms", "peak_bytes")


def unfinished(evaluation: EvaluationSettings, folder: Path) -> dict[str, EvaluationPlan]:
    """The plans that have not been carried out as they stand.

    Args:
        evaluation: what is to be measured.
        folder: of the trained model.
    """
    return {name: plan for name, plan in evaluation.plans.items() if _found(folder, name, plan) is None}


def carry_out(
    subject: Subject, evaluation: EvaluationSettings, folder: Path, on_work: Callable[[float, float], None]
) -> None:
    """Carry out the plans that are left.

    Each has its lines in a folder ``plans/NAME``, as ``attention-priors evaluate`` writes them. What they come to is
    put into ``plans/NAME.json`` when all of them are there, beside the plan itself.

    Args:
        subject: the trained model.
        evaluation: holds the plans.
        folder: of the trained model.
        on_work: told how much is done, and how much there is.
    """
    left = unfinished(evaluation, folder)
    for index, (name, plan) in enumerate(left.items()):

        def on_plan(_: str, done: float, total: float, index: int = index) -> None:
            on_work(index + done / max(total, 1e-9), len(left))

        found = evaluate(
            subject,
            plan,
            folder / "plans" / folder_name(name),
            chunk=evaluation.chunk,
            observer=Observer(on_work=on_plan),
        )
        asked = {"plan": plan.model_dump(mode="json"), "texts": found.texts, **environment()}
        write_json(_file(folder, name), with_nulls(asked | _rows(found)))


def found_of_plans(evaluation: EvaluationSettings, folder: Path) -> dict[str, Row]:
    """What the plans have found of one model, by their names; of those that have been carried out as they stand.

    Args:
        evaluation: holds the plans.
        folder: of the trained model.
    """
    found = {name: _found(folder, name, plan) for name, plan in evaluation.plans.items()}
    return {name: one for name, one in found.items() if one is not None}


def plan_rows(plans: Mapping[str, Row]) -> dict[str, list[Row]]:
    """What plans have found of one model, in the lists of :data:`PLAN_SECTIONS`; every row names its ``plan``.

    Args:
        plans: as :func:`found_of_plans` gives them.
    """
    sections: dict[str, list[Row]] = {section: [] for section in PLAN_SECTIONS}
    for name, found in plans.items():
        for section, rows in sections.items():
            rows += [{"plan": name} | row for row in found.get(section, ())]
    return sections


def _file(folder: Path, name: str) -> Path:
    return folder / "plans" / f"{folder_name(name)}.json"


def _found(folder: Path, name: str, plan: EvaluationPlan) -> dict[str, Any] | None:
    """What a plan came to; None if it has not been carried out, or was another."""
    path = _file(folder, name)
    found = read_json(path) if path.exists() else None
    return found if found is not None and found["plan"] == plan.model_dump(mode="json") else None


def check_texts(models: Iterable[tuple[Path, Mapping[str, Row]]]) -> None:
    """Make sure that all models of a comparison read the same texts for each plan.

    They are the held-out part of the recipe's corpus, or what a plan names: a folder, or the files of a package, which
    may have changed since others were measured.

    Args:
        models: the folder of each, and what plans have found of it (:func:`found_of_plans`).

    Raises:
        RecipeError: two have read different ones.
    """
    first: dict[tuple[str, str], tuple[str, Path]] = {}
    for folder, plans in models:
        for name, found in plans.items():
            for task, texts in found.get("texts", {}).items():
                other, where = first.setdefault((name, task), (texts, folder))
                if texts != other:
                    raise RecipeError(
                        f"evaluation.plans.{name}: the texts of its task {task!r} have changed between "
                        f"{_file(where, name)} and {_file(folder, name)}; to measure anew what is not up to date, "
                        "remove those files of it"
                    )


def _rows(summary: Summary) -> dict[str, list[Row]]:
    return {
        "retrieval": [
            {"task": cell.task, "length": cell.length, "depth": depth, **at._asdict(), "stopped": cell.stopped}
            for cell in summary.accuracies
            for depth, at in (cell.by_depth or {None: _at_no_depth(cell)}).items()
        ],
        "losses": [
            {"task": loss.task, "length": loss.length, **place._asdict()}
            for loss in summary.losses
            for place in loss.by_position
        ],
        "completions": [
            {"length": one.length, "pieces": len(one.pieces), "continuations": len(one.pieces[0].found)}
            | {name: getattr(one, name) for name in ("identity", "chance", "gc_correlation")}
            for one in summary.completions
        ],
        "needle_weights": [
            {name: getattr(one, name) for name in ("length", "layer", "head", "texts", "weight")}
            for one in summary.weights
        ],
        "timing": [{key: one.record[key] for key in _TIMES} for one in summary.durations],
    }


def _at_no_depth(cell: Accuracy) -> AtDepth:
    return AtDepth(cell.mean, cell.trials, cell.token_accuracy, cell.tokens_right)
