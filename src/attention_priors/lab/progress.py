"""Progress bars of long-running commands."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


class Bars(Progress):
    """Progress bars with elapsed and remaining time.

    Args:
        console: Console that shows the bars.
        done: Columns that describe the finished work, in rich's format.
    """

    def __init__(self, console: Console, *done: str) -> None:
        shown = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), *map(TextColumn, done))
        super().__init__(*shown, TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(), console=console)
        self._shown: dict[str, TaskID] = {}

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
