"""The selections that figures, tables and text make from results; ``results_format.py`` says what they hold."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

from attention_priors.lab.results_format import FORMAT, SECTIONS

Results: TypeAlias = Mapping[str, Any]
Row: TypeAlias = Mapping[str, Any]


class Count(NamedTuple):
    """How many of how many trials."""

    correct: float
    """A task may give a part of its score for a part of the answers."""
    trials: int

    @property
    def share(self) -> float:
        """From 0 to 1."""
        return self.correct / self.trials


def check_results(results: Results) -> None:
    """Raise a ValueError unless ``results`` is of the known format and its rows name known schemes."""
    if results.get("format") != FORMAT:
        raise ValueError(
            f"results['format'] must be {FORMAT}, the only one this version reads; it is {results.get('format')!r}"
        )
    for section in SECTIONS:
        for row in results.get(section, ()):
            _check_scheme(results, row["scheme"], f"the scheme of a row in results[{section!r}]")


def scheme_names(results: Results) -> list[str]:
    """The schemes in display order."""
    return [scheme["name"] for scheme in results["schemes"]]


def rows(results: Results, section: str, scheme: str | None = None) -> list[Row]:
    """The rows of one section, of one scheme or of all."""
    if scheme is None:
        return list(results.get(section, ()))
    _check_scheme(results, scheme, "scheme")
    return [row for row in results.get(section, ()) if row["scheme"] == scheme]


def schemes_with(results: Results, section: str) -> list[str]:
    """The schemes that have rows in a section, in display order."""
    present = {row["scheme"] for row in rows(results, section)}
    return [name for name in scheme_names(results) if name in present]


def distinct(selected: Iterable[Row], key: str) -> list[Any]:
    """The different values of one field, sorted."""
    return sorted({row[key] for row in selected})


def training_length(results: Results, scheme: str) -> int:
    """Tokens of the contexts that a scheme was trained on; of its context extension, if it has had one."""
    entry = next(entry for entry in results["schemes"] if entry["name"] == scheme)
    length = entry.get("context_length", results["recipe"].get("training", {}).get("context_length"))
    if not isinstance(length, int) or length < 1:
        raise ValueError(
            f"results['recipe']['training']['context_length'] must be a positive integer (tokens); it is {length!r}"
        )
    return length


def training_lengths(results: Results) -> list[int]:
    """The different training lengths of all schemes, rising."""
    return sorted({training_length(results, scheme) for scheme in scheme_names(results)})


def common_training_length(results: Results) -> int | None:
    """The training length of all schemes; None where they differ."""
    lengths = training_lengths(results)
    return lengths[0] if len(lengths) == 1 else None


def stopped(results: Results, scheme: str, seed: int | None = None) -> bool:
    """Whether the scheme's evaluation stopped before the longest length: with one seed, or with all."""
    runs = [row for row in rows(results, "runs", scheme) if seed is None or row["seed"] == seed]
    return bool(runs) and all(run.get("stopped") is not None for run in runs)


def count_passkeys(selected: Iterable[Row], *keys: str) -> dict[tuple[Any, ...], Count]:
    """Sum the passkey rows that agree in all of ``keys``: ``{(value of each key): Count}``."""
    sums: dict[tuple[Any, ...], Count] = defaultdict(lambda: Count(0, 0))
    for row in selected:
        key = tuple(row[key] for key in keys)
        sums[key] = Count(sums[key].correct + row["correct"], sums[key].trials + row["trials"])
    return dict(sums)


def _check_scheme(results: Results, scheme: str, what: str) -> None:
    names = scheme_names(results)
    if scheme not in names:
        raise ValueError(f"{what} must be one of {', '.join(names)}; it is {scheme!r}")
