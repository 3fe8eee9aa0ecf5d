"""Figures of a study, with their file names and alternative texts."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from attention_priors._io import write_bytes
from attention_priors.lab.report.comparisons import comparisons
from attention_priors.lab.report.estimates import (
    by_scheme,
    by_task,
    by_text,
    loss_measure,
    own_passkeys,
    schemes_in,
)
from attention_priors.lab.report.figures import curves, heads, heatmaps
from attention_priors.lab.report.wording import listing, wording
from attention_priors.lab.results import Frame, Results

FILES = (
    "(accuracy_by_size|prior_maps|passkey_(by_length|margins|heatmap)|perplexity_by_position|copying_by_length|retrieval|"
    "margins|losses|needle-weights|prior_curves|prior_terms|prior_logits|prior_weights|prior_reach|sink_mass|"
    "(longest|passkey|perplexity|theta|logit_scales)_by_axis|theta_scatter|logit_scale_histogram)([_-].*)?"
)
"""Regular expression of the figures' file names, without the extension."""

Draw = Callable[..., Figure | None]


@dataclass(frozen=True)
class Illustration:
    """Figure with its alternative text.

    Attributes:
        kind: Kind of the figure, such as ``"passkey_heatmap"``.
        scheme: Scheme of the figure. None for figures of all schemes.
        stem: File name without the extension.
        alt: Alternative text.
        draw: Function that draws the figure. It returns None without data.
    """

    kind: str
    scheme: str | None
    stem: str
    alt: str
    draw: Callable[[], Figure | None]


def illustrations(results: Results) -> Iterator[Illustration]:
    """Yield every figure for which results may have data, in the order of the report, without drawing it."""
    used: set[str] = set()
    for one in _illustrations(results):
        # File names of plans may coincide, on some systems because case is ignored. Later duplicates get a number.
        numbered = (f"{one.stem}-{number}" for number in itertools.count(2))
        stem = next(name for name in itertools.chain([one.stem], numbered) if name.casefold() not in used)
        used.add(stem.casefold())
        yield replace(one, stem=stem)


def write_pngs(drawings: Iterable[tuple[str, bytes]], folder: Path, names: str = FILES) -> list[Path]:
    """Write drawings as PNG files, and remove outdated files of earlier calls.

    Args:
        drawings: Name of each file, without the extension, and its content.
        folder: Target folder; created if there is a file to write.
        names: Regular expression of the caller's file names. Other files are never removed.

    Returns:
        Paths of the files, in the order of the drawings.
    """
    written = []
    for name, content in drawings:
        written.append(folder / f"{name}.png")
        write_bytes(written[-1], content)
    for path in {*folder.glob("*.png")}.difference(written):
        if re.fullmatch(names, path.stem):
            path.unlink()
    return written


def _illustrations(results: Results) -> Iterator[Illustration]:
    passkeys, scores, texts = own_passkeys(results), results["retrieval"], results["perplexity"]
    own_texts, terms, masses = texts[texts.plan.isna()], results["prior_term"], results["prior_mass"]
    losses = loss_measure(results).name.capitalize()

    def whole(kind: str, draw: Draw, rows: Frame, name: str = "") -> Illustration:
        alt = wording(name or kind, schemes=listing(schemes_in(rows)), losses=losses)
        return Illustration(kind, None, kind, alt, partial(draw, results))

    def each(kind: str, draw: Draw, *frames: Frame, stem: str = "", **words: str) -> Iterator[Illustration]:
        parts = [dict(by_scheme(frame)) for frame in frames]
        for place, name in enumerate(results.names, start=1):
            if name in parts[0]:
                own = [part.get(name, frame[:0]) for part, frame in zip(parts, frames, strict=True)]
                # The number distinguishes schemes whose names differ only in characters that file names cannot hold.
                file = f"{stem or kind}_{place:02d}_{_plain(name)}"
                yield Illustration(kind, name, file, wording(kind, scheme=name, **words), partial(draw, *own, name))

    def heatmap(what: str, rows: Frame, _: Frame, name: str) -> Figure | None:
        return heatmaps.depth_heatmap(rows, name, f"{name}: {what}, %", results.context_length(name))

    def plan(kind: str, name: str, title: str, draw: Draw, *arguments: Any, measure: str = "") -> Illustration:
        alt = wording(name, title=title, losses=losses, measure=measure.capitalize())
        return Illustration(kind, None, _plain(f"{kind}_{title}"), alt, partial(draw, results, *arguments))

    yield whole("accuracy_by_size", curves.accuracy_by_size, results["accuracy"])
    for one in each("prior_maps", heads.prior_maps, results["prior_map"]):
        yield replace(one, stem=one.stem[: len("prior_maps_00")])
    yield whole("passkey_by_length", partial(curves.scores_by_length, rows=passkeys), passkeys)
    yield whole("passkey_margins", partial(curves.margins_by_length, rows=passkeys), passkeys)
    yield from each("passkey_heatmap", partial(heatmap, "pass keys retrieved", passkeys), passkeys)
    yield whole("perplexity_by_position", partial(curves.losses_by_position, rows=own_texts), own_texts)
    yield whole("copying_by_length", curves.copying_by_length, results["copying"])
    tokens = scores[scores.token_accuracy.notna()]
    tokens = tokens.assign(correct=tokens.token_accuracy * tokens.trials)
    for rows, suffix, measure in ((scores, "", "score"), (tokens, ", answer's tokens", "answer's tokens right")):
        for task, own in by_task(rows):
            title, draw = f"{task}{suffix}", curves.scores_by_length
            yield plan("retrieval", "retrieval_by_length", title, draw, own, title, measure, measure=measure)
    for task, own in by_task(scores[scores.margin.notna()]):
        yield plan("margins", "margins_by_length", task, curves.margins_by_length, own, task)
    for task, own in by_task(scores):
        stem = f"retrieval_heatmap_{_plain(task)}"
        yield from each("retrieval_heatmap", partial(heatmap, f"score in {task}", own), own, stem=stem, title=task)
    for title, own in by_text(texts):
        own = own[own.position.notna()]
        yield plan("losses", "losses_by_position", title, curves.losses_by_position, own, title)
    for title in results["needle_weight"].plan.unique():
        yield plan("needle_weights", "needle_weight_by_length", title, curves.needle_weight_by_length, title)
    yield from each("prior_curves", heads.prior_curves, results["prior"])
    yield from each("prior_terms", heads.prior_terms, terms)
    yield from each("prior_logits", heads.prior_logits, terms, masses)
    yield from each("prior_weights", heads.prior_weights, terms, masses)
    yield whole("prior_reach", heads.prior_reach, results["prior_reach"], "prior_reach_figure")
    yield whole("sink_mass", curves.sink_mass, results["sink_mass"])
    axes = [one.axis for one in comparisons(results)]
    # One figure for all axes, or one per axis if an axis has several comparisons.
    for place, axis in enumerate(dict.fromkeys(axes if len({*axes}) < len(axes) else [None][: len(axes)]), start=1):
        compared = comparisons(results, axis)
        along = {"along": "each axis" if axis is None else f"the axis {axis}", "losses": losses}
        for kind, draw in {
            "longest_by_axis": partial(heatmaps.longest_by_axis, compared, passkeys),
            "passkey_by_axis": partial(curves.scores_by_length, results, passkeys, compared=compared),
            "perplexity_by_axis": partial(curves.losses_by_position, results, own_texts, compared=compared),
            "theta_by_axis": partial(heads.thetas, results, compared),
            "logit_scales_by_axis": partial(heads.logit_scales, results, compared),
        }.items():
            stem = kind if axis is None else f"{kind}_{place:02d}_{_plain(axis)}"
            yield Illustration(kind, None, stem, wording(kind, **along), draw)
    yield whole("theta_scatter", heads.thetas, results["prior"])
    yield whole("logit_scale_histogram", heads.logit_scales, results["logit_scale"])


def _plain(name: str) -> str:
    # Truncate the long names of a sweep, because a file name has at most 255 bytes.
    return re.sub(r"[^A-Za-z0-9.]+", "-", name)[:100].strip("-.")
