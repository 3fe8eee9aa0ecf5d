"""The prior explorer: its formulas against the library, and its page in a browser."""

import math
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from attention_priors.attention import NullKey, SSMax
from attention_priors.attention.attend import attend_with_weights
from attention_priors.lab.cli import app
from attention_priors.lab.inspect import attention_logits, effective_reach
from attention_priors.lab.inspect.priors import REACH_LENGTHS
from attention_priors.lab.report.pages import write_explorer
from attention_priors.priors import CATALOGUE, Prior
from browsing import Opened, in_a_browser
from html_pages import Page

QUERIES = torch.ones(1, 1, 3, 4)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("explorer") / "explorer.html"
    write_explorer(path)
    return path


@pytest.fixture
def wide(browser: Any, path: Path) -> Iterator[Opened]:
    opened = Opened(browser, path, 1440)
    opened.settle(0)
    yield opened
    opened.context.close()


def test_the_page_is_self_contained(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    assert len(source.encode()) < 6_000_000
    own = re.sub(r"<script>.*?</script>", "", source, flags=re.S)
    assert not re.search(r"(?:src|href)\s*=", own)
    assert "url(" not in own
    page = Page(own.replace("<input", "<meta"))  # neither element has an end tag
    assert page.open == []
    labelled = {label["for"] for label in page.all("label")}
    assert {"length", "scaled", "family-a", "family-b"} <= labelled


def test_the_command_writes_the_page(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["explore", "--output", str(tmp_path / "here" / "page.html")])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "here" / "page.html").stat().st_size > 1_000_000


def made_by(code: str) -> Prior:
    """Build the prior from the page's Python."""
    namespace: dict[str, Any] = {"q": QUERIES, "k": QUERIES, "v": QUERIES}
    exec(code, namespace)
    assert namespace["out"].shape == QUERIES.shape
    return namespace["prior"]


@in_a_browser
def test_the_pages_priors_match_the_library(wide: Opened) -> None:
    families = wide.page.evaluate("Object.keys(explorer.FAMILIES)")
    assert {*families} <= {name for name, prior in CATALOGUE.items() if not prior.over_grid}
    assert {"laplace", "generalized_gaussian", "window"} <= {*families}
    generator = torch.Generator().manual_seed(0)
    for family in families:
        sliders = wide.page.evaluate(f"explorer.FAMILIES.{family}.sliders")
        for _ in range(6):
            positions = {}
            for slider in sliders:
                steps = round((slider["most"] - slider["least"]) / slider["step"])
                chosen = int(torch.randint(steps + 1, (), generator=generator))
                positions[slider["name"]] = slider["least"] + chosen * slider["step"]
            if family == "relative_buckets" and 2 ** positions["distance"] <= positions["buckets"] / 2:
                continue  # the library refuses it
            found = wide.page.evaluate(
                """([family, positions]) => {
                    const given = explorer.values(family, positions);
                    return {
                        code: explorer.python(family, given, null),
                        curve: [...explorer.logPriors(family, given, 700)].map((x) => x === -Infinity ? null : x),
                        map: explorer.map(family, given, 0.7, 24),
                        reach: explorer.reach(family, given, null).slice(0, 2),
                    };
                }""",
                [family, positions],
            )
            prior = made_by(found["code"])
            last = torch.tensor([699])
            expected = prior.log_prior(last, torch.arange(700), torch.float64)[0, 0].flip(-1).detach()
            curve = torch.tensor(
                [-torch.inf if value is None else value for value in found["curve"]], dtype=torch.float64
            )
            # The library's parameters are float32, and the page shows four digits. Within ε of the peak of a
            # Generalized Gaussian, this difference matters.
            far = (torch.arange(700) + positions.get("mu", 1000.0)).abs() > 0.1
            curve, expected = (values.clamp(min=-60.0)[far] for values in (curve, expected))
            torch.testing.assert_close(curve, expected, rtol=2e-3, atol=2e-3, msg=f"{family} {positions}")
            query = torch.zeros(1, 1, 24, 4, dtype=torch.float64)
            weights = attention_logits(query, query, prior, logit_scale=SSMax(1, init=0.7)).total[0, 0].softmax(-1)
            page = torch.tensor([[value or 0.0 for value in row] for row in found["map"]], dtype=torch.float64)
            torch.testing.assert_close(
                page[1:], weights[1:].detach(), rtol=2e-2, atol=2e-3, msg=f"{family} {positions}"
            )
            for place, length in enumerate(REACH_LENGTHS[:2]):
                reach = effective_reach(prior, length)[:, 0].tolist()
                assert found["reach"][place] == pytest.approx(reach, rel=0.02, abs=1), (family, positions)


@in_a_browser
def test_a_null_key_takes_the_share_of_attend(wide: Opened) -> None:
    given = {"theta_alpha": 0.5, "beta": 0.5, "mu": 0.0}
    share, code = wide.page.evaluate(
        """(given) => {
            const curve = explorer.logPriors("generalized_gaussian", given, 3);
            const share = explorer.nothing(curve, explorer.scale(0.7, 3), -1.5);
            return [share, explorer.python("generalized_gaussian", given, 0.7, -1.5)];
        }""",
        given,
    )
    prior = made_by(code)
    assert "NullKey(1, init=-1.5)" in code
    query = torch.zeros(1, 1, 3, 4)
    _, weights = attend_with_weights(
        query, query, query, prior, logit_scale=SSMax(1, init=0.7), null_logit=NullKey(1, init=-1.5)
    )
    assert share == pytest.approx(1 - float(weights[0, 0, -1].sum()), abs=1e-5)
    assert wide.page.locator("#null-value").inner_text() == "off"
    count = wide.settled()
    wide.page.locator("#nulled").check()
    wide.settle(count)
    assert re.fullmatch(r"0: A [\d.e-]+ %, B [\d.e-]+ % of the weight", wide.page.locator("#null-value").inner_text())
    assert "null_logit=nowhere" in wide.page.locator("#python-a").inner_text()


@in_a_browser
def test_dragging_a_slider_changes_the_curve_and_the_code(wide: Opened) -> None:
    slider = wide.page.locator("#a-beta")
    slider.scroll_into_view_if_needed()
    box = slider.bounding_box()
    assert box is not None
    before, count = wide.curve("log-prior", 0), wide.settled()
    middle = box["y"] + box["height"] / 2
    wide.page.mouse.move(box["x"] + box["width"] * (2.5 / 6), middle)  # place of β = -0.5
    wide.page.mouse.down()
    wide.page.mouse.move(box["x"] + box["width"] * 0.6, middle, steps=4)
    wide.page.mouse.move(box["x"] + box["width"] * (4 / 6), middle, steps=4)
    wide.page.mouse.up()
    wide.settle(count)
    after = wide.curve("log-prior", 0)
    beta = float(slider.input_value())
    assert 0.5 < beta < 1.5
    assert before != after
    assert wide.curve("log-prior", 1) == wide.page.evaluate("[...document.getElementById('log-prior').data[1].y]")
    prior = made_by(wide.page.locator("#python-a").inner_text())
    distances = wide.page.evaluate("[...document.getElementById('log-prior').data[0].x]")
    expected = prior.log_prior_at(torch.tensor([0 if x == 0.5 else x for x in distances]).long(), torch.float64)[0]
    expected = (expected.detach() - expected.detach().max()).clamp(min=-30.0)
    torch.testing.assert_close(torch.tensor(after, dtype=torch.float64), expected, rtol=1e-3, atol=1e-3)
    reach = wide.page.locator("#reach-a-1024").inner_text()
    assert [int(part) for part in reach.split(" · ")] == effective_reach(prior, 1024)[:, 0].tolist()


@in_a_browser
def test_every_control_works_by_keyboard(wide: Opened) -> None:
    wide.page.keyboard.press("Tab")
    reached = []
    for _ in range(20):
        reached.append(wide.page.evaluate("document.activeElement.id"))
        wide.page.keyboard.press("Tab")
    for control in ("length", "scaled", "family-a", "a-beta", "copy-a", "family-b", "b-slope", "copy-b"):
        assert control in reached
    before, count = wide.curve("mass-linear", 1), wide.settled()
    wide.page.locator("#b-slope").focus()
    for _ in range(4):
        wide.page.keyboard.press("ArrowRight")
    wide.settle(count)
    assert "prior = Laplace(1, slopes=[0.125])" in wide.page.locator("#python-b").inner_text().splitlines()
    assert wide.curve("mass-linear", 1) != before


@in_a_browser
def test_ssmax_sharpens_the_prior_and_families_can_be_changed(wide: Opened) -> None:
    before, count = wide.curve("mass-log", 1), wide.settled()
    wide.page.get_by_text("SSMax: logits").click()
    assert wide.page.locator("#scaled").is_checked()
    wide.settle(count)
    after = wide.curve("mass-log", 1)
    assert after[1] > before[1]  # 0.4 ln 4096 exceeds 1
    assert "logit_scale=scale" in wide.page.locator("#python-b").inner_text()
    count = wide.settled()
    wide.page.locator("#family-a").select_option("key_sink")
    wide.settle(count)
    assert wide.page.locator("#sliders-a input").count() == 2
    assert made_by(wide.page.locator("#python-a").inner_text()).name == "key_sink"
    assert not wide.complaints


@in_a_browser
def test_goats_prior_has_goats_period(wide: Opened) -> None:
    count = wide.settled()
    wide.page.locator("#family-a").select_option("spectral")
    wide.settle(count)
    assert wide.page.locator("output[for=a-shortest]").inner_text() == "6.28"
    code = wide.page.locator("#python-a").inner_text()
    assert made_by(code).to_config()["shortest_period"] == 2 * math.pi
    wide.page.locator("#a-shortest").focus()
    wide.page.keyboard.press("ArrowLeft")
    wide.settle(count + 1)
    code = wide.page.locator("#python-a").inner_text()
    assert made_by(code).to_config()["shortest_period"] == pytest.approx(6.2)


@in_a_browser
def test_fast_oscillations_are_sampled_by_extremes(wide: Opened) -> None:
    count = wide.settled()
    wide.page.locator("#family-a").select_option("spectral")
    wide.settle(count)
    prior = made_by(wide.page.locator("#python-a").inner_text())
    weights = prior.log_prior_at(torch.arange(4096), torch.float64)[0].detach().softmax(0)
    shown = torch.tensor(wide.curve("mass-linear", 0), dtype=torch.float64)
    assert len(shown) < 2048
    # The curve shows the minimum and the maximum of each seventh of the axis.
    distances = torch.tensor(wide.page.evaluate("[...document.getElementById('mass-linear').data[0].x]"))
    edges = [-(-4096 * k // 7) for k in range(8)]
    for start, stop in pairwise(edges):
        here = shown[(distances >= start) & (distances < stop)]
        expected = torch.stack(weights[start:stop].aminmax())
        torch.testing.assert_close(torch.stack(here.aminmax()), expected, rtol=1e-6, atol=0)


@in_a_browser
def test_touching_a_plot_scrolls_the_page(browser: Any, path: Path) -> None:
    opened = Opened(browser, path, 390)
    opened.settle(0)
    session = opened.context.new_cdp_session(opened.page)

    def touch(kind: str, *at: dict[str, float]) -> None:
        session.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": [*at]})

    for element in ("h1", "#log-prior", "#map-a"):
        opened.page.evaluate(
            "(one) => scrollTo(0, document.querySelector(one).getBoundingClientRect().top + scrollY - 300)", element
        )
        box, before = opened.page.locator(element).bounding_box(), opened.page.evaluate("scrollY")
        assert box is not None
        x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        touch("touchStart", {"x": x, "y": y})
        for step in range(1, 11):
            touch("touchMove", {"x": x, "y": y - 20 * step})
            opened.page.wait_for_timeout(16)
        touch("touchEnd")
        opened.page.wait_for_function(f"scrollY > {before + 100}", timeout=5000)
    opened.context.close()


@in_a_browser
@pytest.mark.parametrize("width", [1440, 390])
def test_the_page_fits_and_makes_no_request(browser: Any, path: Path, width: int) -> None:
    opened = Opened(browser, path, width)
    opened.settle(0)
    opened.check()
    heights = opened.each("input[type=range]", "e.getBoundingClientRect().height")
    assert min(heights) >= 24  # the size of a finger
    assert min(opened.each(".plot text", "parseFloat(getComputedStyle(e).fontSize)")) >= 12
    opened.context.close()
