"""What the plans of a recipe measured, shown by the figures and tables that pass keys and perplexity have.

A task of a plan is a view of the results: its rows stand where a figure or table looks for those of pass keys, or of
perplexity, and nothing else is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from attention_priors.lab.report.selections.losses import loss_measure
from attention_priors.lab.report.selections.results import Results, Row, rows

_COMMON = ("format", "recipe", "schemes")


@dataclass(frozen=True)
class View:
    """One task of one plan.

    Attributes:
        title: The plan's name and the task's: ``"needles: niah_single_1"``.
        results: A results dictionary in which its rows are those of pass keys or of perplexity.
        measure: What its numbers are: ``"score"``.
    """

    title: str
    results: Results
    measure: str


def retrieval_views(results: Results) -> Iterator[View]:
    """Every retrieval task of every plan; its scores are in the place of pass keys."""
    for plan, task in _distinct(results, "retrieval", "plan", "task"):
        yield _view(results, "retrieval", "passkey", f"{plan}: {task}", "score", _scored, plan=plan, task=task)


def token_views(results: Results) -> Iterator[View]:
    """Every retrieval task that has one right answer; the share of its tokens that are right is in the place of scores.

    A text counts with that share: such numbers vary no more than zeros and ones of the same mean.
    """
    told = {(row["plan"], row["task"]) for row in rows(results, "retrieval") if row["token_accuracy"] is not None}
    for plan, task in _distinct(results, "retrieval", "plan", "task"):
        if (plan, task) in told:
            title, measure = f"{plan}: {task}, answer's tokens", "answer's tokens right"
            yield _view(results, "retrieval", "passkey", title, measure, _by_token, plan=plan, task=task)


def loss_views(results: Results) -> Iterator[View]:
    """Every perplexity of every plan at every length; its losses are in the place of perplexity."""
    measure = loss_measure(results).name
    for plan, task, length in _distinct(results, "losses", "plan", "task", "length"):
        title = f"{plan}: {task}, texts of {'up to ' if task == 'perplexity_short' else ''}{length} tokens"
        yield _view(results, "losses", "perplexity", title, measure, dict, plan=plan, task=task, length=length)


def _distinct(results: Results, section: str, *keys: str) -> list[tuple[Any, ...]]:
    """The different values of some fields, in the order in which they come."""
    return list(dict.fromkeys(tuple(row[key] for key in keys) for row in rows(results, section)))


def _view(
    results: Results, section: str, place: str, title: str, measure: str, changed: Callable[[Row], Row], **values: Any
) -> View:
    chosen = [changed(row) for row in rows(results, section) if values.items() <= row.items()]
    # Who stopped early says so in the row of the last length; older results do not have it.
    reasons = {(row["scheme"], row["seed"]): None for row in chosen}
    reasons |= {(row["scheme"], row["seed"]): row["stopped"] for row in chosen if row.get("stopped") is not None}
    runs = [{"scheme": scheme, "seed": seed, "stopped": why} for (scheme, seed), why in reasons.items()]
    return View(title, {key: results[key] for key in _COMMON} | {place: chosen, "runs": runs}, measure)


def _scored(row: Row) -> Row:
    # Some tasks give a part of the score for a part of the answers.
    return dict(row) | {"correct": row["mean"] * row["trials"]}


def _by_token(row: Row) -> Row:
    return dict(row) | {"correct": row["token_accuracy"] * row["trials"]}
