"""The rows of heatmaps, which both kinds of them share."""

import pytest

from attention_priors.lab.report.figures.depths import depth_rows

TENTHS = ["0–10", "10–20", "20–30", "30–40", "40–50", "50–60", "60–70", "70–80", "80–90", "90–100"]


def test_few_depths_that_all_texts_have_are_rows():
    depths = [index / 19 for index in range(20)]
    names, row_of = depth_rows([depths, {*depths}])
    assert names[:3] == ["0", "5", "11"]
    assert names[-1] == "100"
    assert [row_of[depth] for depth in depths] == [*range(20)]


@pytest.mark.parametrize("measured", [[[0.3], [0.6]], [[0.3, 0.6], [0.3]], [[index / 20 for index in range(21)]]])
def test_others_or_many_are_put_together_by_tenths(measured):
    names, row_of = depth_rows(measured)
    assert names == TENTHS
    assert {row_of[depth] for found in measured for depth in found} <= {*range(10)}


def test_a_depth_at_the_edge_of_two_tenths_is_in_the_farther_one():
    edges = [index / 10 for index in range(11)]
    _, row_of = depth_rows([[*edges, 1 - 0.9, 0.29, 0.05], [0.5]])
    assert [row_of[edge] for edge in edges] == [*range(10), 9]
    assert (row_of[1 - 0.9], row_of[0.29], row_of[0.05]) == (1, 2, 0)
