"""The site builds from the pages and the code without a warning. Tutorials are not executed here."""

import importlib
import re
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import typer
from sphinx.cmd import build

from attention_priors.lab.bench.run import BenchRecipe
from attention_priors.lab.cli import app
from attention_priors.lab.cli.recipes import NamedRecipe, recipe_paths
from attention_priors.lab.study.images.recipe import ImageRecipe
from attention_priors.lab.study.recipe import Recipe
from attention_priors.lab.train.recipe import TrainRecipe
from attention_priors.priors import families
from written_pages import ROOT

pytestmark = pytest.mark.slow
KEYS = {"compare": Recipe, "compare-images": ImageRecipe, "train": TrainRecipe, "bench": BenchRecipe}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    # In this process, most of what the pages import is there already.
    command = ["--quiet", "--fail-on-warning", "--keep-going", "--define", "nb_execution_mode=off"]
    command += ["--doctree-dir", str(folder / "doctrees"), str(ROOT / "docs"), str(folder / "html")]
    assert build.main(command) == 0, "the warnings are in the captured output"
    return folder / "html"


def test_no_page_loads_anything_from_another_host(site: Path) -> None:
    loads = re.compile(r"""<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=["']((?:https?:)?//[^"']*)""")
    loaded = {page.name: found for page in site.rglob("*.html") if (found := loads.findall(page.read_text()))}
    assert not loaded
    for sheet in site.rglob("*.css"):
        assert not re.search(r"""url\(["']?(?:https?:)?//|@import""", sheet.read_text()), sheet


def test_internal_links_have_targets(site: Path) -> None:
    missing = []
    for page in site.rglob("*.html"):
        for link in re.findall(r'(?:href|src)="([^"#?]+)', page.read_text()):
            if not re.match(r"[a-z]+:", link) and not (page.parent / unquote(link)).exists():
                missing.append((page.name, link))
    assert not missing


def test_generated_parts_match_the_code(site: Path) -> None:
    gallery = (site / "gallery.html").read_text()
    for name in families.__all__:
        assert f"<h2>{name}<" in gallery
    for package in ("attention", "priors", "encodings", "models", "hf"):
        reference = (site / "api" / f"{package}.html").read_text()
        module = importlib.import_module(f"attention_priors.{package}")
        documented = {name for name in module.__all__ if f'id="{module.__name__}.{name}"' in reference}
        assert documented == {name for name in module.__all__ if callable(getattr(module, name))}, package
    for page in ("gallery", "support", "commands", "recipes", *(f"recipe-keys/{name}" for name in KEYS), "api/package"):
        assert "generated:" not in (site / f"{page}.html").read_text(), page


def commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    yield name, command
    for inner, below in getattr(command, "commands", {}).items():
        yield from commands(below, f"{name} {inner}")


def words(page: Path) -> str:
    """Return the text of a page without its tags."""
    return unescape(re.sub(r"<[^>]+>", "", page.read_text()))


def test_the_page_of_commands_has_every_command_with_its_options(site: Path) -> None:
    _, *sections = re.split(r"^(All commands|attention-priors [a-z ]+)¶\n", words(site / "commands.html"), flags=re.M)
    found = dict(zip(sections[::2], sections[1::2], strict=True))
    expected = dict(commands(typer.main.get_command(app), "attention-priors"))
    expected["All commands"] = expected.pop("attention-priors")
    assert found.keys() == expected.keys()
    for name, command in expected.items():
        for parameter in command.params:
            written = parameter.opts[0] if parameter.opts else parameter.name
            assert f"\n{written}" in found[name], (name, written)
            assert " ".join(parameter.help.split()) in found[name].replace("’", "'"), (name, written)


def test_the_page_of_recipes_has_every_recipe(site: Path) -> None:
    page = " ".join(words(site / "recipes.html").replace("’", "'").split())
    for path in recipe_paths().values():
        recipe = NamedRecipe.read(path)
        assert f"{path.stem} {' '.join(recipe.description.replace('`', '').split())}" in page, path


@pytest.mark.parametrize("name", KEYS)
def test_the_pages_of_recipe_keys_have_every_key_with_its_default_and_meaning(site: Path, name: str) -> None:
    page = (site / "recipe-keys" / f"{name}.html").read_text()
    rows = re.findall(r"<tr[^>]*>((?:<td>.*?</td>\s*){4})</tr>", page.replace("\n", " "))
    cells = [[unescape(re.sub(r"<[^>]+>", "", cell)).strip() for cell in row.split("</td>")[:4]] for row in rows]
    assert all(all(row) for row in cells)
    schema = KEYS[name].model_json_schema()
    sections = [schema, *schema["$defs"].values()]
    assert sorted(row[0] for row in cells) == sorted(key for section in sections for key in section["properties"])
    required = sorted(key for section in sections for key in section.get("required", ()))
    assert sorted(row[0] for row in cells if row[2] == "required") == required


def test_llms_txt_lists_every_page(site: Path) -> None:
    listed = re.findall(r"^- \[.+\]\((.+?)\): .+$", (site / "llms.txt").read_text(), re.MULTILINE)
    made = {page.relative_to(site).as_posix() for page in site.rglob("*.html")}
    assert sorted(listed) == sorted(made - {"index.html", "genindex.html", "py-modindex.html", "search.html"})
