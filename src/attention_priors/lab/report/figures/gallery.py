"""Which figures a results dictionary gives, what they are called, and what is said about them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from matplotlib.figure import Figure

from attention_priors.lab.report.figures import by_axis, comparison, copying, prior_parts
from attention_priors.lab.report.figures.files import write_pngs
from attention_priors.lab.report.figures.longest import longest_by_axis
from attention_priors.lab.report.figures.needle_weights import needle_weight_by_length
from attention_priors.lab.report.figures.prior_reach import prior_reach
from attention_priors.lab.report.figures.style import png
from attention_priors.lab.report.numbers import listing
from attention_priors.lab.report.selections.losses import loss_measure
from attention_priors.lab.report.selections.needle_weights import plans_with_weights
from attention_priors.lab.report.selections.plans import loss_views, retrieval_views, token_views
from attention_priors.lab.report.selections.results import Results, check_results, scheme_names, schemes_with

_BY_AXIS = {
    longest_by_axis: "Share of pass keys retrieved at the longest length",
    by_axis.passkey_by_axis: "Share of pass keys retrieved against context length",
    by_axis.perplexity_by_axis: "{losses} against position",
    by_axis.theta_by_axis: "Shape β against θα of every Generalized Gaussian head",
    by_axis.logit_scales_by_axis: "Histograms of the heads' logit scales s",
}

_NAMES = (
    "(passkey_by_length|passkey_heatmap|perplexity_by_position|copying_by_length|retrieval|losses|needle-weights|"
    "prior_curves|prior_terms|prior_logits|prior_weights|prior_reach|sink_mass|"
    "(longest|passkey|perplexity|theta|logit_scales)_by_axis|theta_scatter|logit_scale_histogram)([_-].*)?"
)
"""Of files, without the ending."""


@dataclass(frozen=True)
class Illustration:
    """A figure and its words.

    Attributes:
        kind: The function that drew it: ``"passkey_heatmap"``, ...
        scheme: The scheme it is about; None where it is about all.
        stem: Its file's name, without the ending.
        alt: What it shows, for those who cannot see it.
        png: The drawing, as a PNG file.
    """

    kind: str
    scheme: str | None
    stem: str
    alt: str
    png: bytes


def illustrations(results: Results) -> Iterator[Illustration]:
    """Every figure that the results have data for, in the order of the report."""
    check_results(results)
    used: set[str] = set()
    for one in _illustrations(results):
        # Plans may differ only in what a file name cannot hold, which for some systems is case: the later has a number.
        numbered = (f"{one.stem}-{number}" for number in itertools.count(2))
        stem = next(name for name in itertools.chain([one.stem], numbered) if name.casefold() not in used)
        used.add(stem.casefold())
        yield replace(one, stem=stem)


def _illustrations(results: Results) -> Iterator[Illustration]:
    losses = loss_measure(results).name.capitalize()
    asked, read = (listing(schemes_with(results, section)) for section in ("passkey", "perplexity"))
    yield from _for_all(
        comparison.passkey_by_length, results, f"Share of pass keys retrieved against context length: {asked}."
    )
    yield from _for_each(
        comparison.passkey_heatmap, results, "Share of pass keys retrieved at each depth and context length"
    )
    yield from _for_all(comparison.perplexity_by_position, results, f"{losses} against position: {read}.")
    copied, sunk = (listing(schemes_with(results, section)) for section in ("copying", "sink_mass"))
    yield from _for_all(
        copying.copying_by_length, results, f"Loss above the optimum in the copy-mixture task against length: {copied}."
    )
    for view in (*retrieval_views(results), *token_views(results)):
        draw = partial(comparison.passkey_by_length, view.results, view.title, view.measure)
        words = f"{view.measure.capitalize()}, % of them, by scheme and context length: {view.title}."
        yield from _drawn(draw, "retrieval", None, _plain(f"retrieval_{view.title}"), words)
    for view in retrieval_views(results):
        words = f"Score at each depth and context length, {view.title}"
        yield from _for_each(
            partial(comparison.passkey_heatmap, what=f"score in {view.title}"),
            view.results,
            words,
            "retrieval_heatmap",
            f"retrieval_heatmap_{_plain(view.title)}",
        )
    for view in loss_views(results):
        draw = partial(comparison.perplexity_by_position, view.results, view.title)
        stem = _plain(f"losses_{view.title}")
        yield from _drawn(draw, "losses", None, stem, f"{view.measure.capitalize()} by scheme: {view.title}.")
    for plan in plans_with_weights(results):
        words = f"Attention on the pass key when it is asked for, against length: {plan}."
        stem = _plain(f"needle_weights_{plan}")
        yield from _drawn(partial(needle_weight_by_length, results, plan), "needle_weights", None, stem, words)
    yield from _for_each(comparison.prior_curves, results, "Log-prior of each head against distance")
    yield from _for_each(prior_parts.prior_terms, results, "Summands of each head's log-prior, against distance or key")
    yield from _for_each(
        prior_parts.prior_logits, results, "Each head's log-prior of every query and key before the causal mask"
    )
    yield from _for_each(prior_parts.prior_weights, results, "Weights that each head's prior gives alone")
    looking = listing(schemes_with(results, "prior_reach"))
    yield from _for_all(
        prior_reach, results, f"How far each head's prior looks, against the length of the text: {looking}."
    )
    yield from _for_all(
        prior_parts.sink_mass, results, f"Weight of the first token against the range of the content logits: {sunk}."
    )
    for place, axis in enumerate(by_axis.axes_of_figures(results), start=1):
        for draw, words in _BY_AXIS.items():
            stem = draw.__name__ if axis is None else f"{draw.__name__}_{place:02d}_{_plain(axis)}"
            alt = (
                f"{words.format(losses=losses)}, compared along {'each axis' if axis is None else f'the axis {axis}'}."
            )
            yield from _drawn(partial(draw, results, axis), draw.__name__, None, stem, alt)
    yield from _for_all(comparison.theta_scatter, results, "Shape β against θα of every Generalized Gaussian head.")
    yield from _for_all(comparison.logit_scale_histogram, results, "Histograms of the heads' logit scales s.")


def write_figures(results: Results, folder: Path, drawn: Iterable[Illustration] | None = None) -> list[Path]:
    """Write every figure that the results have data for as a PNG file; remove those that an earlier call has left.

    Args:
        results: A results dictionary.
        folder: Where to; made if it is not there.
        drawn: The results' :func:`illustrations`, if they are at hand: drawing them is what takes the time.

    Returns:
        The files, in the order of the report.

    Raises:
        ValueError: ``results`` is of an unknown format, or one of its rows names an unknown scheme.
    """
    drawn = illustrations(results) if drawn is None else drawn
    return write_pngs(((one.stem, one.png) for one in drawn), Path(folder), _NAMES)


def _for_all(draw: Callable[[Results], Figure], results: Results, alt: str) -> Iterator[Illustration]:
    yield from _drawn(partial(draw, results), draw.__name__, None, draw.__name__, alt)


def _for_each(
    draw: Callable[..., Figure], results: Results, what: str, kind: str | None = None, stem: str | None = None
) -> Iterator[Illustration]:
    kind = draw.__name__ if kind is None else kind
    beginning = kind if stem is None else stem
    for place, scheme in enumerate(scheme_names(results), start=1):
        # The place keeps the names of schemes apart that differ only in what a file name cannot hold.
        name = f"{beginning}_{place:02d}_{_plain(scheme)}"
        yield from _drawn(partial(draw, results, scheme), kind, scheme, name, f"{what}: {scheme}.")


def _plain(name: str) -> str:
    # Of a sweep's long names the beginning: a file's name has 255 bytes at most.
    return re.sub(r"[^A-Za-z0-9.]+", "-", name)[:100].strip("-.")


def _drawn(draw: Callable[[], Figure], kind: str, scheme: str | None, stem: str, alt: str) -> Iterator[Illustration]:
    try:
        yield Illustration(kind, scheme, stem, alt, png(draw()))
    except comparison.NothingToShowError:
        return
