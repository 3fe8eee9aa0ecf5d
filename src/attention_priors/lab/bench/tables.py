"""Tables of a benchmark, for the terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from attention_priors.lab.bench.way import PASSES
from attention_priors.lab.report.table import ABSENT, Cell, Table
from attention_priors.lab.report.wording import listing, moment, quantity

Results = Mapping[str, Any]
Row = Mapping[str, Any]
MIB = 2**20


def tables(results: Results) -> Iterator[Table]:
    """Yield the tables of each measured pass: time, memory, comparisons.

    Ratios have their quartiles; growth has its fitted lengths.

    Args:
        results: Return value of :func:`bench`.
    """
    labels = {way["name"]: way["label"] for way in results["ways"]}
    for passing in PASSES:
        rows = [row for row in results["rows"] if row["pass"] == passing]
        fits = {(fit["of"], fit["way"]): fit for fit in results["growth"] if fit["pass"] == passing}
        peaks = {(row["way"], row["length"]): row.get("peak_bytes") for row in rows}
        kinds = [("time", "Time", time_cell)]
        if any("beside_neighbours" in row for row in rows):
            number = results["settings"]["neighbours"]
            title = f"Time beside {number} busy process{'es' * (number > 1)}"
            kinds.append(("busy", title, lambda row: time_cell(row | row["beside_neighbours"])))
        if any(peak is not None for peak in peaks.values()):
            kinds += [("memory", "Peak memory above the inputs", partial(memory_cell, peaks=peaks))]
        for of, title, cell in kinds if rows else []:
            cells = [(row, cell(row) if row["status"] == "measured" else row["status"]) for row in rows]
            growth = {name: _growth(fits.get((of, name))) for name in labels}
            yield _by_length(of, f"{title}: {passing}", labels, cells, growth=growth)
        compared = [row for row in results["comparisons"] if row["pass"] == passing]
        if compared:
            title = f"How many times as long others take for the same function: {passing}"
            cells = [(row, _times(row["median_ratio"])) for row in compared]
            second = {row["way"]: labels[row["counterpart"]] for row in compared}
            yield _by_length("comparison", title, labels, cells, {"compared with": second})


def _by_length(
    name: str,
    title: str,
    labels: Mapping[str, str],
    cells: Sequence[tuple[Row, Cell | str]],
    before: Mapping[str, Mapping[str, str]] = {},
    **after: Mapping[str, Cell | str],
) -> Table:
    """Return a table of cells by way and length, with further columns before and after the lengths."""
    found = {(row["way"], row["length"]): cell for row, cell in cells}
    lengths = sorted({length for _, length in found})
    ways = [way for way in labels if any(way == other for other, _ in found)]
    by_length = ({way: found.get((way, length), "") for way in ways} for length in lengths)
    columns = [labels, *before.values(), *by_length, *after.values()]
    header = ["", *before, *(f"L = {length}" for length in lengths), *after]
    return Table(name, title, header, [[column[way] for column in columns] for way in ways], words=1 + len(before))


def markdown_tables(results: Results) -> str:
    """Return all tables of a benchmark as Markdown, with the machine, the failures and a description of each way."""
    lists = {"Missing measurements": failures(results), "What is timed": timed(results)}
    parts = [f"**{title}**\n\n" + "".join(f"- {line}\n" for line in lines) for title, lines in lists.items() if lines]
    return "\n".join([f"{about(results)}\n", *(table.markdown() for table in tables(results)), *parts])


def about(results: Results) -> str:
    """Describe the machine, versions, sizes and date in two sentences."""
    settings, machine, versions = results["settings"], results["machine"], results["versions"]
    on_gpu = settings["device"].startswith("cuda")
    where = machine["device"] if on_gpu else f"{settings['threads']} threads of {machine['processor']}"
    flushed = "denormal numbers count as 0; " * settings.get("flush_denormal", False)
    replayed = "replayed from CUDA graphs; " * settings.get("cuda_graph", False)
    packages = ", ".join(f"{name} {number}" for name, number in versions.items() if number is not None)
    return (
        f"{where}; {settings['dtype']}, batch {settings['batch']}, H = {settings['heads']}, "
        f"D = {settings['head_dim']}; {flushed}{replayed}{moment(results['created'])}; {packages}. "
        f"Medians of {settings['repetitions']} interleaved repetitions; "
        "× is the median ratio to attention without a prior in the same repetition, in brackets its quartiles."
    )


def failures(results: Results) -> list[str]:
    """List the reasons of missing measurements, each with its cases."""
    labels = {way["name"]: way["label"] for way in results["ways"]}
    grouped: dict[tuple[str, str, str, str], list[int]] = {}
    for row in results["rows"]:
        if row["status"] != "measured":
            key = (row["way"], row["pass"], row["status"], row["reason"])
            grouped.setdefault(key, []).append(row["length"])
    return [
        f"{labels[way]}, {passing}, {listing([str(length) for length in lengths])} tokens: {status}: {reason}"
        for (way, passing, status, reason), lengths in grouped.items()
    ]


def timed(results: Results) -> list[str]:
    """Describe the timed code of each tried way, and the largest difference of its outputs from the reference."""
    lines = []
    for way in results["ways"]:
        rows = [row for row in results["rows"] if row["way"] == way["name"]]
        errors = [row["error"] for row in rows if row["status"] == "measured"]
        if rows:
            checked = f" Outputs are within {quantity(max(errors))} of the float64 reference." if errors else ""
            lines.append(f"*{way['label']}* (`{way['name']}`): {way['times']}{checked}")
    return lines


def time_cell(row: Row) -> Cell:
    """Format a time as ``12.3 ms · 1.05× (1.03–1.07)``. A baseline has no ratio."""
    text = seconds_text(row["median_seconds"][0])
    if "median_ratio" not in row or row["baseline"] == row["way"]:
        return Cell(text)
    ratio = _times(row["median_ratio"])
    return Cell(f"{text} · {ratio.text}", ratio.interval)


def memory_cell(row: Row, peaks: Mapping[tuple[str, int], int | None]) -> str:
    """Format a peak as ``55 MiB · 1.31×``. A baseline has no ratio, and baselines below 1 MiB give none."""
    peak = row["peak_bytes"]
    if peak is None:
        return ABSENT
    if peak < MIB:
        return "< 1 MiB"
    text = f"{_three(peak / MIB)} MiB" if peak < 1000 * MIB else f"{_three(peak / MIB / 1024)} GiB"
    limit = peaks.get((row.get("baseline", ""), row["length"])) or 0
    if limit >= MIB and row["baseline"] != row["way"]:
        text += f" · {_three(peak / limit)}×"
    return text


def seconds_text(seconds: float) -> str:
    """Format a time with three significant digits: ``850 µs``, ``12.3 ms``, ``4.57 s``."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= 0.9995 * size:
            return f"{_three(seconds / size)} {unit}"
    return f"{_three(seconds * 1e6)} µs"


def _three(value: float) -> str:
    """Format a number with three significant digits and without an exponent."""
    if value >= 99.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def _times(spread: Sequence[float]) -> Cell:
    median, low, high = map(_three, spread)
    return Cell(f"{median}×", f"({low}–{high})")


def _growth(fit: Row | None) -> Cell:
    """Format growth as ``L^1.98 (8192–65536)``: the power and the range of fitted lengths."""
    if fit is None:
        return Cell(ABSENT)
    return Cell(f"L^{fit['exponent']:.2f}", f"({fit['lengths'][0]}–{fit['lengths'][-1]})")
