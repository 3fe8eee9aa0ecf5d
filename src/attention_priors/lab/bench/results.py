"""``results.json``: raw repetitions, their medians, what could not run, and what all of it was made on."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import attention_priors
from attention_priors._io import read_json, write_json
from attention_priors.lab.bench.case import PASSES
from attention_priors.lab.bench.recipe import BenchRecipe
from attention_priors.lab.bench.statistics import Spread, growth, ratios, spread
from attention_priors.lab.bench.ways import WAYS
from attention_priors.lab.machine import memory_bytes, processor, versions
from attention_priors.lab.strict_yaml import RecipeError
from attention_priors.lab.wall_clock import now

FORMAT = 1
SOFTWARE = ("attention-priors", "torch", "triton", "transformers", "x-transformers", "goat-attention")
IDENTITY = "identity.json"
MEANT = 2**20
"""Peaks below this many bytes are a few pages here or there, and no growth is read from them."""
CODE = (
    "attention/*.py",
    "priors/*.py",
    *(f"benchmark/{name}.py" for name in ("case", "way", "ways", "grid_ways", "peers", "timing", "memory")),
)
"""What decides how long something takes, and in how much memory."""

Results = dict[str, Any]
Row = dict[str, Any]


def identity(recipe: BenchRecipe) -> Results:
    """What must be the same for measurements to stand side by side."""
    return {
        "settings": recipe.model_dump(mode="json", exclude={"name", "description", "parts"}),
        "versions": versions(SOFTWARE),
        "machine": {
            "platform": platform.platform(),
            "processor": processor(),
            "cores": os.cpu_count(),
            "memory_bytes": memory_bytes(),
            "device": _device(recipe.device),
        },
        "code": _fingerprint(),
    }


def check_identity(output: Path, who: Results) -> None:
    """Write down what a folder's measurements are made with, or make sure that it is what they were made with.

    A package that was not installed before may be now.

    Raises:
        RecipeError: naming what differs.
    """
    path = output / IDENTITY
    if path.exists():
        old = read_json(path)
        for section in ("settings", "versions", "machine"):
            for key, value in who[section].items():
                was = old[section].get(key)
                if was != value and (was is not None or section != "versions"):
                    raise RecipeError(
                        f"{output} holds measurements with {key} = {was}, not {value}; use another folder"
                    )
        if old["code"] != who["code"]:
            raise RecipeError(f"{output} holds measurements of another version of this code; use another folder")
        who = who | {"begun": old["begun"]}
    else:
        who = who | {"begun": now()}
    write_json(path, who)


def collect(output: Path) -> Results:
    """Put everything that a folder holds together.

    ``rows`` has one entry per pass, length and way: its ``status`` (``measured``, ``cannot run``, ``not run``) and
    ``reason``, ``seconds`` of every repetition, ``ratios`` to the ``baseline`` in the same repetition, medians and
    quartiles (``[median, low, high]``), ``calls`` per measurement, ``error`` (largest difference from the float64
    reference, relative to the largest output) and ``peak_bytes``. ``comparisons`` has, for each way that computes
    what a way of this library does, how many times as long it takes. ``growth`` has fitted powers of the length.
    """
    records = [read_json(path) for path in (output / "measurements").glob("*.json")]
    records.sort(key=lambda record: (PASSES.index(record["pass"]), record["length"]))
    rows = [row for record in records for row in _rows(record)]
    return {
        "format": FORMAT,
        "created": now(),
        **read_json(output / IDENTITY),
        "ways": [
            {
                "name": way.name,
                "label": way.label,
                "kind": way.kind,
                "times": way.times,
                "baseline": way.baseline,
                "counterpart": way.counterpart,
            }
            for way in WAYS.values()
        ],
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
        row = who | {"status": "measured", "seconds": seconds, "median_seconds": list(spread(seconds))}
        row |= sitting["ways"][name] | {"peak_bytes": record["peaks"].get(name)}
        if way.baseline in sitting["ways"]:
            against = ratios(sitting["rounds"], name, way.baseline)
            row |= {"baseline": way.baseline, "ratios": against, "median_ratio": list(spread(against))}
        yield row


def _sitting(record: Row, *names: str) -> Row | None:
    """The first sitting with all of these ways in every repetition."""
    for sitting in record["sittings"]:
        if sitting["rounds"] and all(name in entry for name in names for entry in sitting["rounds"]):
            return sitting
    return None


def _comparisons(record: Row) -> Iterator[Row]:
    for name, way in WAYS.items():
        sitting = None if way.counterpart is None else _sitting(record, name, way.counterpart)
        if sitting is not None and way.counterpart is not None:
            times = ratios(sitting["rounds"], name, way.counterpart)
            yield {
                "pass": record["pass"],
                "length": record["length"],
                "way": name,
                "counterpart": way.counterpart,
                "ratios": times,
                "median_ratio": list(spread(times)),
            }


def _growth(rows: list[Row]) -> Iterator[Row]:
    for passing in PASSES:
        for name in WAYS:
            mine = [row for row in rows if (row["pass"], row["way"]) == (passing, name) and row["status"] == "measured"]
            for what, values in (
                ("time", {row["length"]: Spread(*row["median_seconds"]).median for row in mine}),
                ("memory", {row["length"]: row["peak_bytes"] for row in mine if (row["peak_bytes"] or 0) >= MEANT}),
            ):
                fit = growth(values)
                if fit is not None:
                    yield {
                        "pass": passing,
                        "way": name,
                        "of": what,
                        "exponent": fit.exponent,
                        "lengths": fit.lengths,
                    }


def _device(device: str) -> str:
    return torch.cuda.get_device_name(torch.device(device)) if device.startswith("cuda") else "cpu"


def _fingerprint() -> str:
    """Of the code that is measured, and measures: two states of it are not mixed."""
    root = Path(attention_priors.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(path for pattern in CODE for path in root.glob(pattern)):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]
