"""Formats of tables and numbers, and the texts of captions."""

import math
import re
from functools import partial
from pathlib import Path

import pytest
from jinja2 import UndefinedError
from rich.console import Console

from attention_priors.lab.report.estimates import ROLES, role
from attention_priors.lab.report.table import Cell, Table
from attention_priors.lab.report.tables import tables, write_tables
from attention_priors.lab.report.wording import (
    counted,
    decimals,
    duration,
    listing,
    moment,
    multiple,
    percent,
    quantity,
    rough,
    wording,
)  # fmt: skip

SMALL = Table(
    "small", "50 % of $x$", ["a_b", "c\nd"], [["x|y", Cell("1", "[0, 2]")], ["[z]", Cell("–")], ["[z]", Cell("3")]]
)


def terminal(table: Table, **options) -> str:
    console = Console(width=140, force_terminal=True, color_system="standard", legacy_windows=False)
    with console.capture() as capture:
        console.print(table.terminal(**options))
    return capture.get()


def test_markdown_is_escaped():
    lines = ["| a\\_b | c d |", "| --- | ---: |", "| x\\|y | 1 [0, 2] |", "| [z] | – |", "|  | 3 |"]
    assert SMALL.markdown() == "50 % of \\$x\\$\n\n" + "".join(f"{line}\n" for line in lines)


def test_the_best_numbers_are_bold():
    table = Table("t", "", ["a", "n"], [["x", Cell("1_", "[0, 2]", best=True)], ["y", Cell("0")]])
    assert table.markdown().splitlines()[-2:] == ["| x | **1\\_ [0, 2]** |", "| y | 0 |"]
    assert "x & \\shortstack[r]{\\textbf{1\\_}\\\\{\\tiny {[}0, 2{]}}}" in table.latex()


def test_repeated_words_are_omitted():
    table = Table(
        "t", "", ["a", "b", "c"], [["x", "y", "1"], ["x", "y", "2"], ["x", "z", "3"], ["w", "z", "4"]], words=2
    )
    assert table.merged == [["x", "y", "1"], ["", "", "2"], ["", "z", "3"], ["w", "z", "4"]]
    without = table.without("b")
    assert (without.header, without.words) == (["a", "c"], 1)
    assert without.merged == [["x", "1"], ["", "2"], ["", "3"], ["w", "4"]]


def test_latex_is_escaped():
    text = SMALL.latex()
    assert r"\caption{50 \% of \$x\$}" in text
    assert r"a\_b & \shortstack[r]{c\\d} \\" in text
    assert r"x\ensuremath{|}y & \shortstack[r]{1\\{\tiny {[}0, 2{]}}} \\" in text
    assert "\n{[}z{]} & {\\textendash} \\\\" in text
    assert r"\begin{tabular}{lr}" in text
    assert "booktabs" in text


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("BAM · θβ", r"BAM {\textperiodcentered} \ensuremath{\theta}\ensuremath{\beta}"),
        (r"\input{x}", r"{\textbackslash}input\{x\}"),
        ("a^b~c#d&e", r"a{\textasciicircum}b{\textasciitilde}c\#d\&e"),
        ("café 中", r"caf\'e U+4E2D"),
        ("a * b", "a {*} b"),
    ],
)
def test_latex_shows_any_name_literally(name, written):
    assert f"\n{written} & 1 \\\\" in Table("t", "", ["a", "b"], [[name, "1"]]).latex()


def test_latex_is_balanced_and_plain(swept, tmp_path):
    evil = "a_b & {c} % \\end{tabular} [*] θ"
    for row in swept:
        row |= {"scheme": evil} if row.get("scheme") == "ALiBi" else {}
    paths = write_tables(tables(swept.results()), tmp_path)
    assert {path.suffix for path in paths} == {".md", ".tex"}
    for path in tmp_path.glob("*.tex"):
        text = path.read_text(encoding="utf-8")
        assert text.isascii()
        bare = re.sub(r"\\[{}%&#_$\\]", "", re.sub(r"\\\\\n", "\n", text))
        assert bare.count("{") == bare.count("}")
        assert "$" not in bare
        assert text.count("\\begin{tabular}") == text.count("\\end{tabular}") == 1
        body = bare[bare.index("\\midrule") : bare.index("\\bottomrule")]
        (columns,) = re.findall(r"begin\{tabular\}\{([lr]+)\}", re.sub(r"p\{[^}]*\}", "l", text))
        assert {line.count("&") + 1 for line in body.splitlines() if "&" in line} == {len(columns)}
        assert "%" not in body


def test_tables_without_data_are_removed(swept, tmp_path):
    names = ["passkey", "passkey_by_seed", "perplexity", "best", "differences"]
    names += ["axes", "extension", "heads", "training", "runs"]
    first = write_tables(tables(swept.results()), tmp_path)
    assert [path.name for path in first] == [f"{name}.{ending}" for name in names for ending in ("md", "tex")]
    for name in ("README.md", "main.tex", "heads.txt"):
        (tmp_path / name).write_text("someone's own")
    for kind in ("perplexity", "prior", "logit_scale"):
        swept.put(kind, [])
    written = write_tables(tables(swept.results()), tmp_path)
    assert {path.stem for path in written} == {*names} - {"perplexity", "heads"}
    others = {path.name for path in tmp_path.iterdir()} - {path.name for path in written}
    assert others == {"README.md", "main.tex", "heads.txt"}


def test_terminals_show_names_literally():
    text = terminal(Table("t", "[b]", ["[i]", "n"], [["[red]x[/red]", Cell("1", "[0, 2]", best=True)]]))
    assert "[b]" in text
    assert "[i]" in text
    assert "[red]x[/red]" in text
    assert "\x1b[1m1 [0, 2]\x1b[0m" in text
    assert "[0, 2]" not in terminal(SMALL, intervals=False)


def test_missing_numbers_are_dashes():
    assert Cell.of((math.nan, math.nan, math.nan), str) == Cell.of((math.inf, 1.0, 2.0), str) == Cell("–")
    assert Cell.of((1.0, math.nan, math.nan), str) == Cell("1.0")
    assert Cell.of_share((0.5, -0.2, 1.3), "†") == Cell("50†", "[0, 100]")


@pytest.mark.parametrize(
    ("write", "value", "expected"),
    [
        (percent, 0.0, "0"), (percent, 0.004, "<1"), (percent, 0.5, "50"), (percent, 0.999, ">99"),
        (percent, 1.0, "100"),
        (multiple, 0.4, "0.4"), (multiple, 51.2, "51"), (multiple, 819.2, "819"),
        (quantity, None, "–"), (quantity, math.nan, "–"), (quantity, math.inf, "∞"), (quantity, -0.12345, "−0.123"),
        (quantity, -1.7e-16, "0"), (quantity, 1e-9, "1e−09"),
        (partial(decimals, digits=2), -0.126, "−0.13"), (partial(decimals, digits=2), -0.004, "0.00"),
        (partial(decimals, digits=0), 12.3, "12"), (rough, 123456.0, "120,000"), (rough, 1.26e9, "1e+09"),
        (duration, None, "–"), (duration, math.nan, "–"), (duration, 41.4, "41 s"), (duration, 59.7, "1 min 0 s"),
        (duration, 7500.0, "2 h 5 min"),
        (listing, ["a"], "a"), (listing, ["a", "b", "c"], "a, b and c"), (listing, [1, 2], "1 and 2"),
        (listing, [], ""),
        (partial(counted, noun="seed"), 1, "1 seed"), (partial(counted, noun="seed"), 3, "3 seeds"),
        (moment, "2026-11-20T14:00:00+00:00", "20 November 2026, 14:00 UTC"),
        (moment, "2026-01-02T03:04:05", "2 January 2026, 03:04"),
    ],
)  # fmt: skip
def test_numbers_are_written_for_people(write, value, expected):
    assert write(value) == expected


def test_captions_with_missing_values_are_refused():
    assert wording("passkey_by_length", schemes="x") == "Share of pass keys retrieved against context length: x."
    with pytest.raises(UndefinedError, match="schemes"):
        wording("passkey_by_length")


@pytest.mark.parametrize(
    ("beta", "expected"),
    [(-5.6, "retrieval"), (-0.01, "retrieval"), (0.0, "uniform"), (-0.004, "uniform"), (2.6, "local"), (None, None),
     (math.nan, None)],
)  # fmt: skip
def test_roles_follow_the_sign_of_beta(beta, expected):
    assert role("generalized_gaussian", {"beta": beta}) == expected
    assert expected in (*ROLES, None)
    assert role("spectral", {"beta": 1.0}) is None


def test_every_text_is_used():
    folder = Path(__file__).parents[3] / "src" / "attention_priors" / "lab" / "report"
    code = "".join(path.read_text(encoding="utf-8") for path in folder.rglob("*.py"))
    texts = (folder / "wording.yaml").read_text(encoding="utf-8")
    names = re.findall(r"^(\w+):", texts, re.MULTILINE)
    assert len(names) > 40
    used = [name for name in names if f'"{name}"' in code or f'include "{name}"' in texts or name.endswith("_measure")]
    assert names == used
