"""Every table, figure and recipe of docs/results follows from the committed rows."""

import re
from functools import cache
from pathlib import Path

import pytest

from attention_priors.lab.report.figures import illustrations
from attention_priors.lab.report.tables import tables
from attention_priors.lab.results import Results, recipe_sha256
from attention_priors.lab.study import load_recipe

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "docs" / "results"
STUDIES = sorted(path.parent for path in RESULTS.glob("*/README.md"))
assert STUDIES
TABLE = re.compile(r"<!-- table: ([\w-]+) -->\n\n(.*?)\n<!-- end of table -->", re.DOTALL)
FIGURE = re.compile(r"\(figures/([^)]+)\.png\)")

each_study = pytest.mark.parametrize("folder", STUDIES, ids=lambda folder: folder.name)


@cache
def read(folder: Path) -> Results:
    return Results.read(folder)


@each_study
def test_every_table_follows_from_the_rows(folder: Path):
    shown = TABLE.findall((folder / "README.md").read_text(encoding="utf-8"))
    made = tables(read(folder), [name for name, _ in shown])
    assert shown
    for name, text in shown:
        assert text == made[name].markdown(), name
    for table in made.values():
        if "seeds" in table.header:  # always a count
            assert all(str(line[table.header.index("seeds")]).isdecimal() for line in table.lines), table.name


@each_study
def test_shown_figures_exist_and_are_small(folder: Path):
    shown = set(FIGURE.findall((folder / "README.md").read_text(encoding="utf-8")))
    assert {path.stem for path in folder.glob("figures/*")} == shown
    assert shown <= {one.stem for one in illustrations(read(folder))}
    assert all(path.stat().st_size <= 100_000 for path in folder.glob("figures/*"))


@each_study
def test_results_match_the_recipe_of_their_name(folder: Path):
    files = [ROOT / "recipes" / place / f"{folder.name}.yaml" for place in ("results", "")]
    (file,) = (path for path in files if path.exists())
    recipe = load_recipe(file)
    dumped = recipe.model_dump(mode="json", exclude_defaults=True)
    study = read(folder).study
    assert study["recipe"] == dumped
    assert study["recipe_sha256"] == recipe_sha256(dumped)
    assert {*read(folder)["run"].seed} == {*recipe.seeds} == {*study["seeds"]}


@pytest.mark.parametrize("page", sorted(RESULTS.rglob("*.md")), ids=lambda page: f"{page.parent.name}/{page.name}")
def test_links_have_targets(page: Path):
    links = re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8"))
    assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []


def test_the_folder_is_small():
    files = [path for path in RESULTS.rglob("*") if path.is_file()]
    assert len(files) <= 200
    assert sum(path.stat().st_size for path in files) <= 12_000_000
    raw = (RESULTS / "RAW.md").read_text(encoding="utf-8")
    listed = dict(re.findall(r"\| `docs/results/([\w-]+)` \| \d+ \| `([0-9a-f]{64})` \|", raw))
    newer = {"checkpoint", "demo", "farther", "farthest", "lookup", "referee-copying", "referee-copying-tuning"}
    newer |= {"referee-tuning", "referee-more", "referee-layers", "referee-second", "referee", "referee-wide", "timing"}
    assert {folder.name for folder in STUDIES} - {*listed} == newer


@pytest.mark.parametrize("picture", sorted((ROOT / "docs").rglob("*.png")), ids=lambda path: path.name)
def test_pictures_of_other_pages_are_small(picture: Path):
    assert picture.stat().st_size <= 100_000
