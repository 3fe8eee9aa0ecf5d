"""Measurements of a trained model of a comparison: its priors, and the plans of the recipe."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from attention_priors._io import read_json, with_nulls, write_json
from attention_priors.lab.evaluate import Observer, Summary, evaluate
from attention_priors.lab.inspect import (
    logit_scale_rows,
    prior_mass_rows,
    prior_reach_rows,
    prior_rows,
    prior_term_rows,
    sink_mass_rows,
)
from attention_priors.lab.machine import WallClock
from attention_priors.lab.strict_yaml import RecipeError
from attention_priors.lab.study.materials import Materials
from attention_priors.lab.study.recipe import Recipe
from attention_priors.lab.study.runs import Progress, environment
from attention_priors.lab.tasks import EvaluationPlan
from attention_priors.lab.train import PositionSettings
from attention_priors.models.decoder import PriorDecoderForCausalLM

Row = dict[str, Any]

FILES = ("results.jsonl", "log.jsonl", "measured.json", "priors.json", "losses.json", "evaluate_seconds.json")
"""Files about a trained model, beside it in its folder."""


def is_measured(recipe: Recipe, scheme: str, folder: Path) -> bool:
    """Return whether nothing is left to measure of the model in a folder."""
    return (folder / "done.json").exists() and not _unfinished(recipe, scheme, folder)


def measure(
    materials: Materials,
    scheme: str,
    positions: PositionSettings,
    trained_length: int,
    folder: Path,
    progress: Progress,
) -> None:
    """Measure what has not been measured yet of a trained model.

    Records of the plans are in ``results.jsonl``, as ``attention-priors evaluate`` writes them. The results of each
    finished plan are put into ``measured.json``, beside the plan.

    Args:
        materials: The recipe's corpus and tokenizer.
        scheme: Name of the scheme.
        positions: Positions of the model: the scheme's, or those of an extension.
        trained_length: Tokens of a row of the last training.
        folder: Folder of the model, which is in ``model``.
        progress: Called with every step.

    Raises:
        FileNotFoundError: Something is left to measure, and the model is gone.
    """
    recipe = materials.recipe
    left = _unfinished(recipe, scheme, folder)
    if left or not (folder / "done.json").exists():
        if not (folder / "model").exists():
            raise FileNotFoundError(
                f"{folder / 'model'} is gone, and not everything that the recipe asks is measured; remove {folder} to "
                "train the model again"
            )
        evaluation = recipe.evaluation_of(scheme)
        own: dict[str, Any] = {} if evaluation.tolerance is None else {"tolerance": evaluation.tolerance}
        model = on_device(PriorDecoderForCausalLM.from_pretrained(folder / "model", **own))
        if not (folder / "priors.json").exists():
            _write_priors(model, materials, scheme, positions, trained_length, folder)
        subject = materials.subject(scheme, model)
        for index, (name, plan) in enumerate(left):
            with WallClock(folder / "evaluate_seconds.json") as clock:

                def on_work(
                    task: str, done: float, total: float, index: int = index, plan: EvaluationPlan = plan
                ) -> None:
                    clock.tick()
                    share = (plan.tasks.index(task) + done / max(total, 1e-9)) / len(plan.tasks)
                    progress("evaluate", round(100 * (index + share)), 100 * len(left))

                found = evaluate(subject, plan, folder, chunk=evaluation.chunk, observer=Observer(on_work=on_work))
                entry = {"name": name, "plan": plan.question, "texts": found.texts, "rows": [*_rows(name, found)]}
                entry |= {"seconds": round(clock.seconds, 1)} | environment()
                write_json(folder / "measured.json", with_nulls([*_measured(folder), entry]))
                clock.forget()
        if not (folder / "done.json").exists():
            write_json(folder / "done.json", environment())
    progress("evaluate", 1, 1)


def _measured(folder: Path) -> list[dict[str, Any]]:
    path = folder / "measured.json"
    return read_json(path) if path.exists() else []


def _unfinished(recipe: Recipe, scheme: str, folder: Path) -> list[tuple[str | None, EvaluationPlan]]:
    """Return the plans that are not measured as they stand."""
    there = [(entry["name"], entry["plan"]) for entry in _measured(folder)]
    return [(name, plan) for name, plan in recipe.plans_of(scheme) if (name, plan.question) not in there]


def measured_plans(recipe: Recipe, scheme: str, folder: Path) -> list[dict[str, Any]]:
    """Return the entries of ``measured.json`` that the recipe asks for, in its order."""
    asked = [(name, plan.question) for name, plan in recipe.plans_of(scheme)]
    entries = {
        asked.index(key): entry for entry in _measured(folder) if (key := (entry["name"], entry["plan"])) in asked
    }
    return [entries[place] for place in sorted(entries)]


def check_texts(models: Iterable[tuple[Path, Iterable[Mapping[str, Any]]]]) -> None:
    """Check that all models of a comparison read the same texts for each plan.

    A plan may name a folder, or the files of a package, which may have changed since other models were measured.

    Args:
        models: Folder and entries (:func:`measured_plans`) of each.

    Raises:
        RecipeError: Two models have read different texts.
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
                        f"{folder}; to measure again, remove measured.json from the older folder"
                    )


def on_device(model: PriorDecoderForCausalLM) -> PriorDecoderForCausalLM:
    """Return the model in evaluation mode, on the accelerator if there is one."""
    model.eval()
    if torch.cuda.is_available():
        model.to(torch.device("cuda"))  # pyright: ignore[reportArgumentType]
    return model


def _write_priors(
    model: PriorDecoderForCausalLM,
    materials: Materials,
    scheme: str,
    positions: PositionSettings,
    trained_length: int,
    folder: Path,
) -> None:
    """Write the priors as they were trained, in texts of up to the recipe's longest length."""
    recipe = materials.recipe
    length, longest = max(trained_length, 3), recipe.longest_text
    layers: list[nn.Module] = [model.model] if positions.share_prior else list(model.model.layers)
    rows: dict[str, Any] = {
        "priors": prior_rows(layers, length=longest),
        "logit_scales": logit_scale_rows(list(model.model.layers)),
        "prior_terms": prior_term_rows(layers, length=length),
        "prior_mass": prior_mass_rows(layers, length=length),
        "prior_reach": prior_reach_rows(layers, lengths=_doubled(length, longest)),
    }
    settings = recipe.evaluation_of(scheme).sink_mass
    if settings is not None:
        texts = materials.texts(settings.length, settings.texts)
        rows["sink_mass"] = with_nulls(sink_mass_rows(model, texts, factors=settings.factors))
    write_json(folder / "priors.json", rows)


def _doubled(length: int, longest: int) -> list[int]:
    """Return a length and its doubles up to the longest text."""
    lengths = [length]
    while 2 * lengths[-1] <= longest:
        lengths.append(2 * lengths[-1])
    return lengths


def _rows(plan: str | None, summary: Summary) -> Iterable[Row]:
    return ({"row": row["row"], "plan": plan} | row for row in summary.rows())
