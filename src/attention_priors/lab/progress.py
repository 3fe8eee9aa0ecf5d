"""Progress bars of commands that take long."""

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
    """Bars that say how much is done, how long it took and how long it will take.

    Args:
        console: where they are shown.
        done: one text or several that say how much is done, in rich's format.
    """

    def __init__(self, console: Console, *done: str) -> None:
        shown = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), *map(TextColumn, done))
        super().__init__(*shown, TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(), console=console)
        self._shown: dict[str, TaskID] = {}

    def show(self, key: str, description: str, completed: float, total: float | None, done: str = "") -> None:
        """Update the bar of a key, which is made when it is shown for the first time.

        Args:
            key: identifies the bar.
            description: what it is about.
            completed: finished work.
            total: all of the work; None if it is not known.
            done: text for ``{task.fields[done]}``.
        """
        if key not in self._shown:
            self._shown[key] = self.add_task(escape(description), done="")
        self.update(self._shown[key], completed=completed, total=total, done=done)
