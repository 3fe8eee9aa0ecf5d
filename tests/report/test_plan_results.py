"""What plans have found, in the figures and tables that pass keys have."""

import pytest
from artists import by_gid

from attention_priors.report.figures import comparison
from attention_priors.report.figures.gallery import illustrations
from attention_priors.report.selections.plans import retrieval_views, token_views
from attention_priors.report.tables.comparison import result_grids
from attention_priors.report.tables.grid import Cell, markdown

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


def test_a_heatmap_for_each_task_whose_texts_have_a_depth(asked):
    shown = [one for one in illustrations(asked) if one.kind == "retrieval_heatmap"]
    assert [one.scheme for one in shown] == [scheme["name"] for scheme in asked["schemes"][:2]]
    assert len({one.stem for one in shown}) == 2
    for one in shown:
        assert "passkey-8" in one.stem
        assert "score in digits: passkey_8" in " ".join(one.figure.axes[0].get_title(loc="left").split())
