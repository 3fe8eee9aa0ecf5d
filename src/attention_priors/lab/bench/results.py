"""``results.json``: raw repetitions, medians, growth with length, and the reasons of missing measurements."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from attention_priors._io import read_json
from attention_priors.lab.bench.way import PASSES
from attention_priors.lab.bench.ways import WAYS
from attention_priors.lab.machine import now

FORMAT = 1
IDENTITY = "identity.json"
LONG = 8192
"""Shortest length of a growth fit, if at least three lengths remain. Fixed costs matter below."""
SMALLEST_PEAK = 2**20
"""Smallest peak of a growth fit in bytes. Smaller peaks are noise of a few memory pages."""

Row = dict[str, Any]


def collect(output: Path) -> dict[str, Any]:
    """Combine the measurements of a folder.

    ``rows`` has one entry per pass, length and way, with these fields:

    - ``status``: ``measured``, ``cannot run`` or ``not run``. The latter two have a ``reason``.
    - ``seconds``: time of every repetition.
    - ``ratios``: time relative to the ``baseline``, within each repetition.
    - ``median_seconds`` and ``median_ratio``: ``[median, lower quartile, upper quartile]``.
    - ``calls``: calls per measurement.
    - ``error``: largest difference from the float64 reference, relative to the largest output.
    - ``peak_bytes``: peak memory above the inputs.
    - ``beside_neighbours``: seconds and ratios beside busy processes, if the recipe asks for neighbours.

    ``comparisons`` has the time ratio of each other package to this library's way that computes an equal function.
    ``growth`` has the fitted powers of the length.
    """
    records = [read_json(path) for path in (output / "measurements").glob("*.json")]
    records.sort(key=lambda record: (PASSES.index(record["pass"]), record["length"]))
    rows = [row for record in records for row in _rows(record)]
    described = ("name", "label", "kind", "times", "baseline", "counterpart")
    return {
        "format": FORMAT,
        "created": now(),
        **read_json(output / IDENTITY),
        "ways": [{key: getattr(way, key) for key in described} for way in WAYS.values()],
        "rows": rows,
        "comparisons": [row for record in records for row in _comparisons(record)],
        "growth": list(_growth(rows)),
    }


def _rows(record: Row) -> Iterator[Row]:
    for name, way in WAYS.items():
        who = {"pass": record["pass"], "length": record["length"], "way": name}
        sitting = _sitting(record, name)
        if sitting is None:
            if name in record["failures"]:
                yield who | record["failures"][name]
            continue
        seconds = [entry[name] for entry in sitting["rounds"]]
        row = who | {"status": "measured", "seconds": seconds, "median_seconds": spread(seconds)}
        row |= sitting["ways"][name] | {"peak_bytes": record["peaks"].get(name)}
        if way.baseline in sitting["ways"]:
            row |= {"baseline": way.baseline} | _ratios(sitting, name, way.baseline)
        if "beside_neighbours" in sitting:
            busy = [entry[name] for entry in sitting["beside_neighbours"]]
            row["beside_neighbours"] = {"seconds": busy, "median_seconds": spread(busy)}
            if way.baseline in sitting["ways"]:
                row["beside_neighbours"] |= _ratios({"rounds": sitting["beside_neighbours"]}, name, way.baseline)
        yield row


def _sitting(record: Row, *names: str) -> Row | None:
    """Return the first sitting that has all of these ways in every repetition; None if there is none."""
    for sitting in record["sittings"]:
        if sitting["rounds"] and all(name in entry for name in names for entry in sitting["rounds"]):
            return sitting
    return None


def _ratios(sitting: Row, way: str, baseline: str) -> Row:
    found = ratios(sitting["rounds"], way, baseline)
    return {"ratios": found, "median_ratio": spread(found)}


def _comparisons(record: Row) -> Iterator[Row]:
    for name, way in WAYS.items():
        sitting = None if way.counterpart is None else _sitting(record, name, way.counterpart)
        if sitting is not None and way.counterpart is not None:
            who = {"pass": record["pass"], "length": record["length"], "way": name, "counterpart": way.counterpart}
            yield who | _ratios(sitting, name, way.counterpart)


def _growth(rows: list[Row]) -> Iterator[Row]:
    for passing in PASSES:
        for name in WAYS:
            mine = [row for row in rows if (row["pass"], row["way"]) == (passing, name) and row["status"] == "measured"]
            times = {row["length"]: row["median_seconds"][0] for row in mine}
            peaks = {row["length"]: row["peak_bytes"] for row in mine if (row["peak_bytes"] or 0) >= SMALLEST_PEAK}
            for of, values in (("time", times), ("memory", peaks)):
                fit = growth(values)
                if fit is not None:
                    yield {"pass": passing, "way": name, "of": of, "exponent": fit[0], "lengths": fit[1]}


def spread(values: Sequence[float]) -> list[float]:
    """Return the median, the lower and the upper quartile, with linear interpolation."""
    return np.quantile(values, (0.5, 0.25, 0.75)).tolist()


def ratios(rounds: Sequence[Mapping[str, float]], way: str, baseline: str) -> list[float]:
    """Return ``way / baseline`` in each repetition, because a disturbance affects both ways of a repetition."""
    return [seconds[way] / seconds[baseline] for seconds in rounds]


def growth(values: Mapping[int, float]) -> tuple[float, list[int]] | None:
    """Fit the exponent ``p`` of ``value ∝ length^p``, by least squares on the logarithms.

    The fit uses lengths of at least 8192 if there are three or more, else all lengths. Values of 0 have no logarithm
    and are left out.

    Args:
        values: Value at each length.

    Returns:
        The exponent and the fitted lengths; None if fewer than two lengths remain.
    """
    positive = sorted(length for length, value in values.items() if value > 0)
    far = [length for length in positive if length >= LONG]
    lengths = far if len(far) >= 3 else positive
    if len(lengths) < 2:
        return None
    exponent, _ = np.polyfit(np.log(lengths), np.log([values[length] for length in lengths]), 1)
    return float(exponent), lengths
