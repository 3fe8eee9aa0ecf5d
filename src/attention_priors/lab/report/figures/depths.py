"""The rows of a heatmap of depths."""

from __future__ import annotations

from collections.abc import Collection, Sequence

_MOST_DEPTHS = 20
_BANDS = 10


def depth_rows(measured: Sequence[Collection[float]]) -> tuple[list[str], dict[float, int]]:
    """What the rows are called, and the row of each depth: a row for each where all texts have the same few.

    Where there are more than 20, or others here than there, as where a task draws them, the rows are tenths of the
    text.

    Args:
        measured: the depths, from 0 to 1, of the texts that were read at once: of one model at one length.
    """
    depths = sorted({depth for found in measured for depth in found})
    if len(depths) <= _MOST_DEPTHS and all(len({*found}) == len(depths) for found in measured):
        return [f"{100 * depth:.0f}" for depth in depths], {depth: row for row, depth in enumerate(depths)}
    step = 100 // _BANDS
    names = [f"{start}–{start + step}" for start in range(0, 100, step)]
    # Rounded first: a depth that was computed may be a hair below the tenth that it is.
    return names, {depth: min(int(round(_BANDS * depth, 6)), _BANDS - 1) for depth in depths}
