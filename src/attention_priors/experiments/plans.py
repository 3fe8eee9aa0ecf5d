"""What a comparison's models are asked beyond pass keys and perplexity: the tasks of ``attention-priors evaluate``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from attention_priors.evaluation import (
    AtDepth,
    EvaluationPlan,
    EvaluationSettings,
    Observer,
    Subject,
    Summary,
    evaluate,
)
from attention_priors.experiments.folders import folder_name
from attention_priors.files import read_json, write_json
from attention_priors.results_format import PLAN_SECTIONS

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
        write_json(_file(folder, name), {"plan": plan.model_dump(mode="json")} | _rows(found))


def plan_rows(evaluation: EvaluationSettings, folder: Path) -> dict[str, list[Row]]:
    """What the plans have found of one model, in the lists of :data:`PLAN_SECTIONS`; every row names its ``plan``.

    Args:
        evaluation: holds the plans.
        folder: of the trained model.
    """
    sections: dict[str, list[Row]] = {section: [] for section in PLAN_SECTIONS}
    for name, plan in evaluation.plans.items():
        found = _found(folder, name, plan) or {}
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


def _rows(summary: Summary) -> dict[str, list[Row]]:
    return {
        "retrieval": [
            {"task": cell.task, "length": cell.length, "depth": depth, **found._asdict()}
            for cell in summary.accuracies
            for depth, found in (cell.by_depth or {None: AtDepth(cell.mean, cell.trials, cell.token_accuracy)}).items()
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
