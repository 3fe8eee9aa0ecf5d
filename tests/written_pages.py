"""Python examples of the documentation."""

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def python_of(page: str) -> list[str]:
    """Return the blocks of Python of a page, in order, by its path from the repository's root."""
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)


def run_page(page: str, blocks: list[str] | None = None) -> dict[str, Any]:
    """Run all or some blocks of a page as one program, and return its names."""
    names: dict[str, Any] = {"__name__": "page"}
    blocks = python_of(page) if blocks is None else blocks
    assert blocks, page
    for block in blocks:
        exec(compile(block, page, "exec"), names)
    return names
