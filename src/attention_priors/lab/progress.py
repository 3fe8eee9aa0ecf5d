"""Progress bars of long-running commands."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

FIRST_LINE, LATER_LINES = 15.0, 0.05
"""Time between two lines about a bar without a terminal: at least these seconds, and this share of the elapsed time."""

KNOWN_SHARE, KNOWN_AFTER = 5.0, 60.0
"""Percentage of the work, or time in seconds, after which a bar shows the remaining time."""


class RemainingTime(TimeRemainingColumn):
    """Remaining time of a bar, unknown at first, because workers start one by one and first steps are slow."""

    def render(self, task: Task) -> Text:
        """Return the remaining time."""
        if task.percentage >= KNOWN_SHARE or (task.elapsed or 0.0) >= KNOWN_AFTER:
            return super().render(task)
        return Text("-:--:--", style="progress.remaining")


class Bars(Progress):
    """Progress bars with elapsed and remaining time. Without a terminal, each bar prints a line now and then.

    Args:
        console: Console that shows the bars.
        done: Columns that describe the finished work, in rich's format.
    """

    def __init__(self, console: Console, *done: str) -> None:
        shown = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), *map(TextColumn, done))
        super().__init__(*shown, TimeElapsedColumn(), TextColumn("left"), RemainingTime(), console=console)
        self._shown: dict[str, TaskID] = {}
        self._printed: dict[TaskID, float] = {}
        """Time of the last line about each bar."""

    def update(self, task_id: TaskID, **changes: Any) -> None:
        """Update a bar, as rich does; without a terminal, print its share if the last line is old."""
        super().update(task_id, **changes)
        if self.console.is_terminal:
            return
        task = next(task for task in self.tasks if task.id == task_id)
        # Short work needs no line, so the first one waits as well.
        passed = time.monotonic() - self._printed.setdefault(task_id, time.monotonic())
        if passed >= max(FIRST_LINE, LATER_LINES * (task.elapsed or 0.0)):
            self._printed[task_id] = time.monotonic()
            share = "" if task.total is None else f": {task.percentage:.0f} %"
            details = " ".join(str(task.fields[name]) for name in ("stage", "done") if task.fields.get(name))
            self.console.print(f"{task.description}{share} {details}".rstrip(), highlight=False, soft_wrap=True)

    def show(self, key: str, description: str, completed: float, total: float | None, done: str = "") -> None:
        """Update the bar of a key; the first call for the key makes the bar.

        Args:
            key: Key of the bar.
            description: Label of the bar.
            completed: Finished work.
            total: Total work; None if unknown.
            done: Text for ``{task.fields[done]}``.
        """
        if key not in self._shown:
            self._shown[key] = self.add_task(escape(description), done="")
        self.update(self._shown[key], completed=completed, total=total, done=done)
