"""What a comparison's models are asked beyond pass keys and perplexity: the tasks of ``attention-priors evaluate``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from attention_priors._io import read_json, with_nulls, write_json
from attention_priors.lab.evaluate import EvaluationPlan, EvaluationSettings, Observer, Subject, evaluate
from attention_priors.lab.strict_yaml import RecipeError
from attention_priors.lab.study.environment import environment
from attention_priors.lab.study.folders import folder_name

Row = dict[str, Any]


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

    Each has its lines in a folder ``plans/NAME``, as ``attention-priors evaluate`` writes them. Its rows of results are
    put into ``plans/NAME.json`` when all lines are there, beside the plan itself.

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
        asked = {"plan": _question(plan), "texts": found.texts, **environment()}
        write_json(_file(folder, name), with_nulls(asked | {"rows": [*found.rows()]}))


def found_of_plans(evaluation: EvaluationSettings, folder: Path) -> dict[str, Row]:
    """What the plans have found of one model, by their names; of those that have been carried out as they stand.

    Args:
        evaluation: holds the plans.
        folder: of the trained model.
    """
    found = {name: _found(folder, name, plan) for name, plan in evaluation.plans.items()}
    return {name: one for name, one in found.items() if one is not None}


def plan_rows(plans: Mapping[str, Row]) -> list[Row]:
    """Return the rows that plans have found of one model; each names its ``plan``.

    Args:
        plans: as :func:`found_of_plans` gives them.
    """
    return [{"row": row["row"], "plan": name} | row for name, found in plans.items() for row in found["rows"]]


def _file(folder: Path, name: str) -> Path:
    return folder / "plans" / f"{folder_name(name)}.json"


def _found(folder: Path, name: str, plan: EvaluationPlan) -> dict[str, Any] | None:
    """What a plan came to; None if it has not been carried out, or was another."""
    path = _file(folder, name)
    found = read_json(path) if path.exists() else None
    return found if found is not None and found["plan"] == _question(plan) else None


def _question(plan: EvaluationPlan) -> dict[str, Any]:
    """Return the part of a plan that determines its results, as plain JSON."""
    return plan.model_dump(mode="json", exclude={"minimum_documents"})


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
