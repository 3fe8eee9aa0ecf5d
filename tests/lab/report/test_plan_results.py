"""What plans have found, in the figures and tables that pass keys have."""

import pytest
from artists import by_gid

from attention_priors.lab.report import write_figures
from attention_priors.lab.report.figures import comparison, gallery
from attention_priors.lab.report.figures.gallery import illustrations
from attention_priors.lab.report.selections.plans import retrieval_views, token_views
from attention_priors.lab.report.tables.comparison import result_grids
from attention_priors.lab.report.tables.grid import Cell, markdown
from attention_priors.lab.results_format import SECTIONS

REASON = "nothing right at 2 lengths running (240, 512 tokens)"


@pytest.fixture
def asked(results):
    """One task of eight digits; the first scheme gets parts of them, and stops; and one without one right answer."""
    first, second = (scheme["name"] for scheme in results["schemes"][:2])
    results["retrieval"] = [
        {
            "scheme": scheme, "seed": seed, "plan": "digits", "task": "passkey_8", "length": length, "depth": depth,
            "mean": float(right == 8), "trials": 2, "token_accuracy": right / 8,
            "tokens_right": [2 * (place < right) for place in range(8)],
            "stopped": REASON if scheme == first and length == 512 else None,
        }
        for scheme, rights in ((first, {240: 4, 512: 2}), (second, {240: 8, 512: 8, 1024: 6}))
        for seed in (0, 1)
        for length, right in rights.items()
        for depth in (0.0, 1.0)
    ] + [
        {
            "scheme": second, "seed": 0, "plan": "digits", "task": "niah_multivalue", "length": 240, "depth": None,
            "mean": 0.25, "trials": 4, "token_accuracy": None, "tokens_right": None, "stopped": None,
        }
    ]  # fmt: skip
    return results


def test_a_plan_shows_who_stopped_and_where(asked):
    first, second = (scheme["name"] for scheme in asked["schemes"][:2])
    (digits, _) = retrieval_views(asked)
    figure = comparison.passkey_by_length(digits.results, digits.title, digits.measure)
    assert figure.axes[0].get_ylabel().startswith("score, %")
    for seed in (0, 1):
        (cross,) = by_gid(figure, f"stopped:{first}:{seed}")
        assert cross.get_xdata()[0] == pytest.approx(512, rel=0.2)
        assert not by_gid(figure, f"stopped:{second}:{seed}")


def test_results_of_before_stops_were_kept_are_read(asked):
    for row in asked["retrieval"]:
        del row["stopped"], row["tokens_right"]
    (digits, _) = retrieval_views(asked)
    figure = comparison.passkey_by_length(digits.results, digits.title, digits.measure)
    assert not [line for line in figure.axes[0].lines if str(line.get_gid()).startswith("stopped:")]
    grid = next(grid for grid in result_grids(asked) if grid.stem == "answer_tokens")
    assert list(grid.header) == ["plan and task", "scheme", "length", "all"]


def test_answers_are_also_shown_by_their_tokens(asked):
    second = asked["schemes"][1]["name"]
    (view,) = token_views(asked)
    axes = comparison.passkey_by_length(view.results, view.title, view.measure).axes[0]
    assert axes.get_ylabel().startswith("answer's tokens right, %")
    assert view.title == "digits: passkey_8, answer's tokens"
    grid = next(grid for grid in result_grids(asked) if grid.stem == "answer_tokens")
    assert list(grid.header) == ["plan and task", "scheme", "length", "all", *map(str, range(1, 9))]
    (group,) = grid.groups
    assert [line[2] for line in group] == ["240", "512", "240", "512", "1024"]
    assert group[2][1] == second
    cells = [cell for cell in group[-1][3:] if isinstance(cell, Cell)]
    assert [cell.text for cell in cells] == ["75", *["100"] * 6, *["0"] * 2]
    assert cells[1].interval == "[68, 100]"  # Wilson's of 8 of 8
    assert second.replace("<", r"\<").replace(">", r"\>") in markdown(grid)


def test_depths_that_a_task_draws_are_put_together_by_tenths(asked):
    first, second = (scheme["name"] for scheme in asked["schemes"][:2])
    # Read at each length: two texts of the fourth tenth, of which one is right, and one that is alone in its tenth.
    drawn = {240: (0.3, 0.37, 0.02), 512: (0.31, 0.36, 0.6), 1024: (0.32, 0.39, 0.7)}
    asked["retrieval"] = [
        {
            "scheme": scheme, "seed": 0, "plan": "needles", "task": "niah_single_1", "length": length, "depth": depth,
            "mean": float(place == 0), "trials": 1, "token_accuracy": None, "tokens_right": None, "stopped": None,
        }
        for scheme in (first, second)
        for length, depths in drawn.items()
        for place, depth in enumerate(depths)
    ]  # fmt: skip
    (view,) = retrieval_views(asked)
    (axes,) = comparison.passkey_heatmap(view.results, first).axes
    names = [tick.get_text() for tick in axes.get_yticklabels()]
    assert names == [f"{start}–{start + 10}" for start in range(0, 100, 10)] + ["mean"]
    shown = {(round(x - 0.5), round(y - 0.5)): t.get_text() for t in axes.texts for x, y in [t.get_position()]}
    cells = {place: text for place, text in shown.items() if place[0] < 3 and place[1] < 10}
    assert cells == {**dict.fromkeys([(0, 3), (1, 3), (2, 3)], "50"), (0, 0): "0", (1, 6): "0", (2, 7): "0"}
    assert shown[3, 3] == "50"
    assert {shown[column, 10] for column in range(3)} == {"33"}
    assert len(by_gid(axes, "not evaluated")) == 3 * 10 - 6


def test_plans_whose_names_look_alike_in_files_have_files_of_their_own(asked, tmp_path):
    rows = [row for row in asked["retrieval"] if row["task"] == "passkey_8"]
    asked["retrieval"] = [row | {"plan": plan} for plan in ("n_1", "n-1") for row in rows]
    asked["passkey"] = asked["priors"] = asked["perplexity"] = asked["logit_scales"] = []
    stems = [one.stem for one in illustrations(asked)]
    assert stems[:4] == [
        "retrieval-n-1-passkey-8",
        "retrieval-n-1-passkey-8-2",
        "retrieval-n-1-passkey-8-answer-s-tokens",
        "retrieval-n-1-passkey-8-answer-s-tokens-2",
    ]
    assert stems[4] == "retrieval_heatmap_n-1-passkey-8_01_NoPE"
    assert len(stems) == len({*stems}) == 8
    assert len(write_figures(asked, tmp_path)) == len([*tmp_path.iterdir()]) == 8


def test_braces_in_names_are_shown_as_they_are(asked):
    first = asked["schemes"][0]["name"]
    for section in SECTIONS:
        asked[section] = [row | {"scheme": "{s}"} for row in asked[section] if row["scheme"] == first]
    asked["schemes"] = [asked["schemes"][0] | {"name": "{s}"}]
    asked["retrieval"] = [row | {"plan": "{plan}"} for row in asked["retrieval"]]
    words = {one.kind: one.alt for one in illustrations(asked)}
    assert words["passkey_heatmap"] == "Share of pass keys retrieved at each depth and context length: {s}."
    assert words["retrieval_heatmap"] == "Score at each depth and context length, {plan}: passkey_8: {s}."


def test_a_heatmap_for_each_task_whose_texts_have_a_depth(asked, monkeypatch):
    drawn = []

    def noted(figure):
        drawn.append(figure)
        return str(len(drawn) - 1).encode()

    monkeypatch.setattr(gallery, "png", noted)
    shown = [one for one in illustrations(asked) if one.kind == "retrieval_heatmap"]
    assert [one.scheme for one in shown] == [scheme["name"] for scheme in asked["schemes"][:2]]
    assert len({one.stem for one in shown}) == 2
    for one in shown:
        assert "passkey-8" in one.stem
        assert "score in digits: passkey_8" in " ".join(drawn[int(one.png)].axes[0].get_title(loc="left").split())
