"""What the plans of a recipe measured, shown by the figures and tables that pass keys and perplexity have.

A task of a plan is a view of the results: its rows stand where a figure or table looks for those of pass keys, or of
perplexity, and nothing else is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from attention_priors.report.selections.results import Results, Row, rows

_COMMON = ("format", "recipe", "schemes")


@dataclass(frozen=True)
class View:
    """One task of one plan.

    Attributes:
        title: The plan's name and the task's: ``"needles: niah_single_1"``.
        results: A results dictionary in which its rows are those of pass keys or of perplexity.
    """

    title: str
    results: Results


def retrieval_views(results: Results) -> Iterator[View]:
    """Every retrieval task of every plan; its scores are in the place of pass keys."""
    for plan, task in _distinct(results, "retrieval", "plan", "task"):
        yield _view(results, "retrieval", "passkey", f"{plan}: {task}", _as_passkey, plan=plan, task=task)


def loss_views(results: Results) -> Iterator[View]:
    """Every perplexity of every plan at every length; its losses are in the place of perplexity."""
    for plan, task, length in _distinct(results, "losses", "plan", "task", "length"):
        title = f"{plan}: {task}, texts of {'up to ' if task == 'perplexity_short' else ''}{length} tokens"
        yield _view(results, "losses", "perplexity", title, dict, plan=plan, task=task, length=length)


def _distinct(results: Results, section: str, *keys: str) -> list[tuple[Any, ...]]:
    """The different values of some fields, in the order in which they come."""
    return list(dict.fromkeys(tuple(row[key] for key in keys) for row in rows(results, section)))


def _view(results: Results, section: str, place: str, title: str, changed: Callable[[Row], Row], **values: Any) -> View:
    chosen = [changed(row) for row in rows(results, section) if values.items() <= row.items()]
    return View(title, {key: results[key] for key in _COMMON} | {place: chosen})


def _as_passkey(row: Row) -> Row:
    # Some tasks give a part of the score for a part of the answers.
    return dict(row) | {"correct": row["mean"] * row["trials"]}
