"""The site builds without a warning, from the pages and the code as they are. Tutorials are not executed here."""

import importlib
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest

from attention_priors.priors import families
from written_pages import ROOT

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "--quiet", "--fail-on-warning", "--keep-going", "--define"]
    command += ["nb_execution_mode=off", "--doctree-dir", str(folder / "doctrees"), "docs", str(folder / "html")]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return folder / "html"


def test_no_page_loads_anything_from_another_host(site: Path) -> None:
    loads = re.compile(r"""<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=["']((?:https?:)?//[^"']*)""")
    loaded = {page.name: found for page in site.rglob("*.html") if (found := loads.findall(page.read_text()))}
    assert not loaded
    for sheet in site.rglob("*.css"):
        assert not re.search(r"""url\(["']?(?:https?:)?//|@import""", sheet.read_text()), sheet


def test_every_link_within_the_site_has_its_file(site: Path) -> None:
    missing = []
    for page in site.rglob("*.html"):
        for link in re.findall(r'(?:href|src)="([^"#?]+)', page.read_text()):
            if not re.match(r"[a-z]+:", link) and not (page.parent / unquote(link)).exists():
                missing.append((page.name, link))
    assert not missing


def test_pages_show_the_code_as_it_is(site: Path) -> None:
    gallery = (site / "gallery.html").read_text()
    for name in families.__all__:
        assert f"<h2>{name}<" in gallery
    for package in ("attention", "priors", "encodings", "models", "hf"):
        reference = (site / "api" / f"{package}.html").read_text()
        module = importlib.import_module(f"attention_priors.{package}")
        documented = {name for name in module.__all__ if f'id="{module.__name__}.{name}"' in reference}
        assert documented == {name for name in module.__all__ if callable(getattr(module, name))}, package
    for page in ("gallery", "support", "recipes", "api/package"):
        assert "generated:" not in (site / f"{page}.html").read_text(), page


def test_llms_txt_has_every_page(site: Path) -> None:
    listed = re.findall(r"^- \[.+\]\((.+?)\): .+$", (site / "llms.txt").read_text(), re.MULTILINE)
    made = {page.relative_to(site).as_posix() for page in site.rglob("*.html")}
    assert sorted(listed) == sorted(made - {"index.html", "genindex.html", "py-modindex.html", "search.html"})
