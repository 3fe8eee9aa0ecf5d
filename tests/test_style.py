"""Docstrings, pages and comments are plain: short sentences, no docstring without a subject, no riddles."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = [ROOT / name for name in ("src", "tests", "docs", "benchmarks", "recipes")]
LONGEST = 35
"""Largest number of words in a sentence. Code counts as one word."""
OPENINGS = re.compile(r"(Of|Those|Its|As|The same|Likewise|None:|What|Whom?|So many|In place of)\b")
RIDDLES = re.compile(
    r"what was (measured|found|read|written)\b|those that (are|is)\b|\b(are|is) told\b|\b(is|are|be) had\b|\bheeded\b|"
    r"\bstands? there\b|\bwhoever\b|what becomes of|how far it is|\bmade anew\b|of one'?s own\b|\bnobody may\b",
    re.IGNORECASE,
)
SKIPPED = re.compile(
    r"^ *```.*?^ *```|^=[= ]+$.*?^=[= ]+$|::\n\n(?: {4,}.*\n+)+|^ *[|<#!].*?$", re.DOTALL | re.MULTILINE
)
"""Code, tables, HTML, headings and images."""
ENDS = re.compile(r"\n\s*\n|\n\s*(?=[-*] |\d+\. |[\w*]+: )|(?<=[.!?])\)?\s+(?=[A-Z`*\[(Α-ω])")
"""Ends of paragraphs, list items, described arguments and sentences."""


def long_sentences(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and a description of each long sentence."""
    text, start = SKIPPED.sub(lambda match: "\n" * match[0].count("\n"), text), 0
    for end in [*(match.end() for match in ENDS.finditer(text)), len(text)]:
        sentence = " ".join(text[start:end].split())
        words = re.findall(r"[^\W\d_][\w'’-]*", re.sub(r"`+[^`]*`+|\]\([^)]*\)", "X ", sentence))
        if len(words) > LONGEST:
            yield text.count("\n", 0, start) + 1, f"{len(words)} words, at most {LONGEST}: {sentence[:90]}"
        start = end


def docstrings(code: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each docstring, including those of attributes."""
    for node in ast.walk(ast.parse(code)):
        body = getattr(node, "body", None)
        for each in body if isinstance(body, list) else []:
            if (
                isinstance(each, ast.Expr)
                and isinstance(each.value, ast.Constant)
                and isinstance(each.value.value, str)
            ):
                yield each.lineno, each.value.value


def complaints(name: str, text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the reason of all that is not plain in a file."""
    for number, line in enumerate(text.splitlines(), 1):
        if match := RIDDLES.search(line):
            yield number, f"riddle '{match[0]}': name the thing"
    for first, prose in docstrings(text) if name.endswith(".py") else [(1, text)] if name.endswith(".md") else []:
        yield from ((first + line - 1, reason) for line, reason in long_sentences(prose))
        if name.endswith(".py") and (match := OPENINGS.match(prose)):
            yield first, f"opens with '{match[0]}': open with a verb or a noun"


def test_texts_are_plain() -> None:
    files = [path for folder in FOLDERS for kind in ("py", "md", "yaml", "html") for path in folder.rglob(f"*.{kind}")]
    files = sorted({*files, *ROOT.glob("*.md"), *ROOT.glob("Makefile")} - {Path(__file__)})
    assert len(files) > 400
    found = [(path, *each) for path in files for each in complaints(path.name, path.read_text(encoding="utf-8"))]
    assert not found, "\n" + "\n".join(f"{path.relative_to(ROOT)}:{line}: {reason}" for path, line, reason in found)


def test_other_texts_are_found() -> None:
    long, quoted = "word " * 36, '"""'
    for name, text, line in [
        ("page.md", f"# A title\n\n```\n{long}\n```\n\n{long}", 7),
        ("page.md", "- Short.\n- Also short.\n- It is heeded.", 3),
        ("code.py", f"def f():\n    {quoted}Of the queries.{quoted}", 2),
        ("code.py", f"X = 1\n{quoted}Short.\n\n{long}{quoted}", 4),
        ("code.py", "x = 1\n# Whoever reads this.", 2),
    ]:
        assert [found for found, _ in complaints(name, text)] == [line], text
