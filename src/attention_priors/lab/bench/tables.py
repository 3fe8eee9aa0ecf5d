"""The tables of a benchmark, for the terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich.table import Table

from attention_priors.lab.bench.way import PASSES
from attention_priors.lab.report.wording import listing, moment, quantity

Results = Mapping[str, Any]
Row = Mapping[str, Any]
MIB = 2**20


@dataclass(frozen=True)
class Grid:
    """A table before it has a form."""

    title: str
    header: list[str]
    lines: list[list[str]]


def grids(results: Results, *, quartiles: bool = True) -> Iterator[Grid]:
    """Yield time, memory and comparisons of each pass that was measured.

    Args:
        results: what :func:`bench` returns.
        quartiles: whether ratios come with theirs, and growth with the lengths it was fitted over.
    """
    labels = {way["name"]: way["label"] for way in results["ways"]}
    for passing in PASSES:
        rows = [row for row in results["rows"] if row["pass"] == passing]
        fits = {(fit["of"], fit["way"]): fit for fit in results["growth"] if fit["pass"] == passing}
        peaks = {(row["way"], row["length"]): row.get("peak_bytes") for row in rows}
        tables = [("time", f"Time: {passing}", partial(time_cell, quartiles=quartiles))]
        if any(peak is not None for peak in peaks.values()):
            tables += [("memory", f"Peak memory above the inputs: {passing}", partial(memory_cell, peaks=peaks))]
        for of, title, cell in tables if rows else []:
            cells = [(row, cell(row) if row["status"] == "measured" else row["status"]) for row in rows]
            last = {name: exponent_text(fits.get((of, name)), with_lengths=quartiles) for name in labels}
            yield _by_length(title, labels, cells, growth=last)
        compared = [row for row in results["comparisons"] if row["pass"] == passing]
        if compared:
            title = f"How many times as long others take for the same function: {passing}"
            cells = [(row, _times(row["median_ratio"], quartiles)) for row in compared]
            second = {row["way"]: labels[row["counterpart"]] for row in compared}
            yield _by_length(title, labels, cells, {"compared with": second})


def _by_length(
    title: str,
    labels: Mapping[str, str],
    cells: Sequence[tuple[Row, str]],
    before: Mapping[str, Mapping[str, str]] = {},
    **after: Mapping[str, str],
) -> Grid:
    """Arrange cells by way and length, with further columns before and after the lengths."""
    text = {(row["way"], row["length"]): cell for row, cell in cells}
    lengths = sorted({length for _, length in text})
    names = [name for name in labels if any(way == name for way, _ in text)]
    columns = [labels, *before.values(), *({n: text.get((n, length), "") for n in names} for length in lengths)]
    header = ["", *before, *(f"L = {length}" for length in lengths), *after]
    return Grid(title, header, [[column[name] for column in (*columns, *after.values())] for name in names])


def markdown_tables(results: Results) -> str:
    """Return all tables of a benchmark as Markdown, with its machine, its failures and the meaning of its rows."""
    parts = [f"{about(results)}\n"]
    for grid in grids(results):
        lines = [f"**{grid.title}**", "", _markdown_line(grid.header), _markdown_line(["---"] * len(grid.header))]
        lines += [_markdown_line(line) for line in grid.lines]
        parts.append("\n".join(lines) + "\n")
    refused = failures(results)
    if refused:
        parts.append("**What was not measured**\n\n" + "\n".join(f"- {line}" for line in refused) + "\n")
    parts.append("**What is timed**\n\n" + "\n".join(f"- {line}" for line in timed(results)) + "\n")
    return "\n".join(parts)


def render_text_tables(results: Results) -> Iterator[Table | str]:
    """Yield the tables for a terminal, and the reasons of missing measurements."""
    for grid in grids(results, quartiles=False):
        table = Table(title=grid.title, title_justify="left")
        for index, head in enumerate(grid.header):
            table.add_column(head, justify="left" if index == 0 else "right")
        for line in grid.lines:
            table.add_row(*line)
        yield table
    yield from failures(results)


def about(results: Results) -> str:
    """Describe machine, versions, sizes and date in two sentences."""
    settings, machine, versions = results["settings"], results["machine"], results["versions"]
    on_gpu = settings["device"].startswith("cuda")
    where = machine["device"] if on_gpu else f"{settings['threads']} threads of {machine['processor']}"
    packages = ", ".join(f"{name} {number}" for name, number in versions.items() if number is not None)
    return (
        f"{where}; {settings['dtype']}, batch {settings['batch']}, H = {settings['heads']}, "
        f"D = {settings['head_dim']}; {moment(results['created'])}; {packages}. "
        f"Medians of {settings['repetitions']} interleaved repetitions; "
        "× is the median ratio to attention without a prior in the same repetition, in brackets its quartiles."
    )


def failures(results: Results) -> list[str]:
    """List each reason of a missing measurement, with the cases that it applies to."""
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
    """Describe what is timed of each way that was tried, and how far its outputs were from the reference."""
    lines = []
    for way in results["ways"]:
        rows = [row for row in results["rows"] if row["way"] == way["name"]]
        errors = [row["error"] for row in rows if row["status"] == "measured"]
        if rows:
            checked = f" (outputs within {quantity(max(errors))} of the float64 reference)" if errors else ""
            lines.append(f"*{way['label']}* (`{way['name']}`): {way['times']}{checked}")
    return lines


def time_cell(row: Row, *, quartiles: bool = True) -> str:
    """Write a time as ``12.3 ms · 1.05× (1.03–1.07)``; no ratio for a baseline."""
    text = seconds_text(row["median_seconds"][0])
    if "median_ratio" in row and row["baseline"] != row["way"]:
        text += f" · {_times(row['median_ratio'], quartiles)}"
    return text


def memory_cell(row: Row, peaks: Mapping[tuple[str, int], int | None]) -> str:
    """Write a peak as ``55 MiB · 1.31×``; no ratio for a baseline, nor to a baseline below 1 MiB."""
    peak = row["peak_bytes"]
    if peak is None:
        return "–"
    if peak < MIB:
        return "< 1 MiB"
    text = f"{_three(peak / MIB)} MiB" if peak < 1000 * MIB else f"{_three(peak / MIB / 1024)} GiB"
    limit = peaks.get((row.get("baseline", ""), row["length"])) or 0
    if limit >= MIB and row["baseline"] != row["way"]:
        text += f" · {_three(peak / limit)}×"
    return text


def seconds_text(seconds: float) -> str:
    """Write a time with three significant digits: ``850 µs``, ``12.3 ms``, ``4.57 s``."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= 0.9995 * size:
            return f"{_three(seconds / size)} {unit}"
    return f"{_three(seconds * 1e6)} µs"


def _three(value: float) -> str:
    """Write three significant digits without an exponent."""
    if value >= 99.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def _times(spread: Sequence[float], quartiles: bool) -> str:
    median, low, high = spread
    return f"{_three(median)}×" + (f" ({_three(low)}–{_three(high)})" if quartiles else "")


def exponent_text(fit: Row | None, *, with_lengths: bool = True) -> str:
    """Write a growth as ``L^1.98 (8192–65536)``: the power and the lengths it was fitted over."""
    if fit is None:
        return "–"
    over = f" ({fit['lengths'][0]}–{fit['lengths'][-1]})" if with_lengths else ""
    return f"L^{fit['exponent']:.2f}{over}"


def _markdown_line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
