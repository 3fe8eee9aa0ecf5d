"""Write the tables of priors in priors.md from the classes and their docstrings: ``python docs/catalogue.py``."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from attention_priors.priors import Prior, families

PAGE = Path(__file__).with_name("priors.md")
CLASSES: list[type[Prior]] = [getattr(families, name) for name in families.__all__]


def arguments(prior: type[Prior]) -> str:
    """Return the constructor's arguments with their defaults, and the first sentence of the docstring on each."""
    (section,) = re.findall(r"^Args:\n((?:    .*\n?)*)", inspect.getdoc(prior) or "", re.MULTILINE)
    words = {
        name: " ".join(text.split()) for name, text in re.findall(r"^    (\w+): (.*(?:\n {5,}.*)*)", section, re.M)
    }
    parameters = [each for each in inspect.signature(prior).parameters.values() if each.name != "num_heads"]
    defaults = ["" if each.default is each.empty else f"={each.default!r}".replace("'", '"') for each in parameters]
    return "<br>".join(
        f"`{each.name}{default}`: {words[each.name].split('. ')[0].rstrip('.')}"
        for each, default in zip(parameters, defaults, strict=True)
    )


def row(prior: type[Prior]) -> str:
    """Return the table row of one prior: names, formula, source, arguments and learned parameters."""
    text = inspect.getdoc(prior) or ""
    # A docstring starts with "Words: ``K(i, j) = ...``, in nats."
    (formula,) = re.findall(r"\A.*?: (``K\(i, j\).*)\.$", text, re.MULTILINE)
    (source,) = re.findall(r"^Source: ((?:.+\n)+)", text, re.MULTILINE)
    cells = (
        f"`{prior.__name__}`, `{prior.name}`",
        formula.removesuffix(", in nats"),
        " ".join(source.split()).rstrip("."),
        arguments(prior),
        ", ".join(f"`{name}`" for name in prior.learnable),
    )
    plain = (re.sub(r":class:`(\w+)`", r"`\1`", cell).replace("``", "`").replace("|", r"\|") for cell in cells)
    return f"| {' | '.join(plain)} |"


def table(over_grid: bool) -> str:
    """Return the table of the priors over a line, or of the priors on grids."""
    head = "| class, name | log-prior in nats | source | arguments beside `num_heads` | learns |\n|---|---|---|---|---|"
    return "\n".join([head, *(row(prior) for prior in CLASSES if bool(prior.over_grid) is over_grid)])


def page(text: str) -> str:
    """Return the page with new tables, made from the classes."""
    for name, over_grid in (("line", False), ("grids", True)):
        opening, closing = f"<!-- table: {name} -->\n", "\n<!-- end of table -->"
        before, rest = text.split(opening)
        text = f"{before}{opening}\n{table(over_grid)}\n{closing}{rest.split(closing, 1)[1]}"
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
