import pytest
from rich.console import Console
from synthetic_results import LENGTHS, SEEDS

from attention_priors.lab.intervals import wilson_interval
from attention_priors.lab.report import render_text_table
from attention_priors.lab.report.selections.passkeys import best_shares, passkey_table


def rendered(results) -> str:
    console = Console(width=140, force_terminal=True, color_system="standard", legacy_windows=False)
    with console.capture() as capture:
        console.print(render_text_table(results))
    return capture.get()


def test_wilson_interval_is_that_of_the_formula():
    z, k, n = 1.959963984540054, 7, 40
    share = k / n
    centre = (share + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z / (1 + z**2 / n) * (share * (1 - share) / n + z**2 / (4 * n**2)) ** 0.5
    assert wilson_interval(k, n) == pytest.approx((centre - half, centre + half))


def test_wilson_interval_at_the_ends_stays_within_0_and_1():
    assert wilson_interval(0, 20)[0] == 0
    assert wilson_interval(20, 20)[1] == 1
    assert wilson_interval(0, 20)[1] == pytest.approx(1 - wilson_interval(20, 20)[0])


@pytest.mark.parametrize(("correct", "trials", "named"), [(0, 0, "trials"), (5, 4, "correct"), (-1, 4, "correct")])
def test_wilson_interval_refuses_impossible_counts(correct, trials, named):
    with pytest.raises(ValueError, match=named):
        wilson_interval(correct, trials)


def test_cells_pool_depths_and_seeds(results):
    for cell in passkey_table(results):
        mine = [row for row in results["passkey"] if (row["scheme"], row["length"]) == (cell.scheme, cell.length)]
        assert cell.trials == len(mine)
        assert cell.correct == sum(row["correct"] for row in mine)
        assert cell.share == cell.correct / cell.trials
        assert (cell.low, cell.high) == wilson_interval(cell.correct, cell.trials)
        assert cell.complete == ({row["seed"] for row in mine} == set(SEEDS))


def test_cells_stand_in_display_order_and_stopped_lengths_are_absent(results):
    cells = passkey_table(results)
    order = [scheme["name"] for scheme in results["schemes"]]
    assert cells == sorted(cells, key=lambda cell: (order.index(cell.scheme), cell.length))
    assert [cell.length for cell in cells if cell.scheme == "BAM"] == list(LENGTHS)
    assert max(cell.length for cell in cells if cell.scheme == "NoPE") < LENGTHS[-1]
    assert any(not cell.complete for cell in cells)


def test_best_leaves_out_incomplete_cells_and_zeros(results):
    results["passkey"] = [
        {"scheme": "BAM", "seed": 0, "length": 64, "depth": 0.0, "trials": 4, "correct": 2},
        {"scheme": "BAM", "seed": 1, "length": 64, "depth": 0.0, "trials": 4, "correct": 2},
        {"scheme": "RoPE", "seed": 0, "length": 64, "depth": 0.0, "trials": 4, "correct": 4},
        {"scheme": "RoPE", "seed": 1, "length": 128, "depth": 0.0, "trials": 4, "correct": 0},
        {"scheme": "BAM", "seed": 0, "length": 256, "depth": 0.0, "trials": 4, "correct": 0},
        {"scheme": "BAM", "seed": 1, "length": 256, "depth": 0.0, "trials": 4, "correct": 0},
    ]
    assert best_shares(passkey_table(results)) == {64: 0.5}


def test_text_table_marks_best_missing_and_incomplete(results):
    text = rendered(results)
    line = {name: next(line for line in text.splitlines() if f" {name} " in line) for name in ("NoPE", "BAM <SSMax>")}
    assert "–" in line["NoPE"]
    assert "†" in line["NoPE"]
    assert line["BAM <SSMax>"].count("\x1b[1m 100\x1b[0m") == 4
    assert "\x1b[1m  92" not in line["BAM <SSMax>"]
    assert "–" not in line["BAM <SSMax>"]
    assert "†: without the seeds that had stopped" in str(render_text_table(results).caption)
    assert "51×" in text


def test_text_table_shows_names_as_they_are(results):
    results["schemes"] = [{"name": "[red]x[/red]"}]
    for section in ("runs", "perplexity", "priors", "logit_scales"):
        results[section] = []
    results["passkey"] = [
        {"scheme": "[red]x[/red]", "seed": 0, "length": 64, "depth": 0.5, "trials": 1000, "correct": 999}
    ]
    text = rendered(results)
    assert "[red]x[/red]" in text
    assert ">99" in text


def test_text_table_without_passkeys_says_so(results):
    results["passkey"] = []
    assert render_text_table(results).caption == "no pass keys were asked for"
