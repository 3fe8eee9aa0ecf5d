"""Sphinx extension that fits pages written for the repository into the site.

The pages themselves stay as the repository's own viewer needs them.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util.nodes import make_refnode

PAGES = {
    "../CONTRIBUTING.md": "contributing.md",
    "../recipes": "recipes.md",
    "../recipes/results": "recipes.md",
    "benchmarks": "performance.md",
}
"""Targets of links that are not pages of this folder, and the pages that stand for them."""

BELOW = {"results/README": "*/README\n/results/RAW", "performance": "benchmarks/*/table", "recipes": "recipe-keys/*"}
"""Pages with pages below them in the table of contents."""

INTERVAL = re.compile(r"(\[\S+, \S+\]|\S+× \(\S+\))")
"""Interval of a number, ``[46, 69]``, or a factor with its interval, ``1.12× (1.10–1.13)``."""

LINK = re.compile(r"(?<=\]\()([^)#\s:]+)(?=[)#])")


def adapt(_: Sphinx, page: str, source: list[str]) -> None:
    """Change links to files outside the site, and add what a page needs only there."""
    folder = posixpath.dirname(page)

    def in_site(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, link[1]))
        return posixpath.relpath(PAGES[target], folder or ".") if target in PAGES else link[1]

    text = LINK.sub(in_site, source[0])
    if page.startswith("benchmarks/"):
        text = f"# Benchmark {Path(page).parent.name}\n\n{text}"
    if page in BELOW:
        text += f"\n```{{toctree}}\n:hidden:\n:glob:\n\n{BELOW[page]}\n```\n"
    source[0] = text


def mark_intervals(_: Sphinx, doctree: nodes.document) -> None:
    """Give the intervals in tables a class, whose style keeps them on one line."""
    for entry in doctree.findall(nodes.entry):
        for text in [*entry.findall(nodes.Text)]:
            parts = [nodes.Text(part) for part in INTERVAL.split(text)]
            parts[1::2] = [nodes.inline("", "", part, classes=["interval"]) for part in parts[1::2]]
            text.parent.replace(text, parts)


def separate_lists(_: Sphinx, kind: str, name: str, documented: Any, options: Any, lines: list[str]) -> None:
    """Put the blank line before each list of a docstring that reStructuredText needs."""
    for number in range(len(lines) - 1, 0, -1):
        before, line = lines[number - 1 : number + 1]
        if line.lstrip().startswith("- ") and before.strip() and _indent(before) < _indent(line):
            lines.insert(number, "")


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def find_name(app: Sphinx, env: BuildEnvironment, node: nodes.Element, text: nodes.TextElement) -> nodes.Node | None:
    """Link a name of another package, such as ``attend`` in a prior's docstring, if only one object has the name."""
    if node.get("refdomain") != "py":
        return None
    domain = env.domains["py"]
    objects = domain.find_obj(env, None, None, node["reftarget"].split(".")[-1], None, 1)
    found = [(name, entry) for name, entry in objects if not entry.aliased]
    if len(found) != 1:
        return None
    name, entry = found[0]
    return make_refnode(app.builder, node["refdoc"], entry.docname, entry.node_id, text, name)


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the changes of pages and docstrings."""
    app.connect("source-read", adapt)
    app.connect("doctree-read", mark_intervals)
    app.connect("missing-reference", find_name)
    app.connect("autodoc-process-docstring", separate_lists, priority=400)  # before napoleon
    return {"parallel_read_safe": True, "parallel_write_safe": True}
