"""The results in a paragraph of plain language."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from attention_priors.lab.report.numbers import listing, multiple, percent
from attention_priors.lab.report.selections.losses import loss_measure
from attention_priors.lab.report.selections.passkeys import PasskeyCell, passkey_table
from attention_priors.lab.report.selections.results import (
    Results,
    common_training_length,
    distinct,
    rows,
    scheme_names,
    schemes_with,
    training_lengths,
)

HOLDS = 0.95
"""A scheme holds at a length if it retrieves at least this share of the pass keys there."""


@dataclass(frozen=True)
class Reach:
    """How far a scheme holds.

    Attributes:
        farthest: The cell of the longest length it holds at; None if it holds at none.
        dip: Its worst cell at a shorter length, if it does not hold there.
    """

    farthest: PasskeyCell | None
    dip: PasskeyCell | None


def reach(results: Results) -> dict[str, Reach]:
    """How far each scheme that was asked for pass keys holds.

    Lengths that only some of its seeds were evaluated at do not count.
    """
    reached = {}
    cells = passkey_table(results)
    for scheme in dict.fromkeys(cell.scheme for cell in cells):
        mine = [cell for cell in cells if cell.scheme == scheme and cell.complete]
        farthest = max((cell for cell in mine if cell.share >= HOLDS), key=lambda cell: cell.length, default=None)
        before = [cell for cell in mine if farthest and cell.length < farthest.length and cell.share < HOLDS]
        reached[scheme] = Reach(farthest, min(before, key=lambda cell: cell.share, default=None))
    return reached


def summarize(results: Results) -> str:
    """Say what was compared and how far each scheme holds."""
    trained = training_lengths(results)
    schemes = scheme_names(results)
    sentences = [
        f"{_counted(len(schemes), 'scheme')} {'was' if len(schemes) == 1 else 'were'} trained on contexts of "
        f"{listing([str(length) for length in trained])} tokens, each with {_seeds_of_each(results)}."
    ]
    reached = reach(results)
    if reached:
        sentences += _passkey_sentences(results, reached, common_training_length(results))
        missing = [name for name in schemes if name not in reached]
        if missing:
            sentences.append(f"No pass keys were asked of {listing(missing)}.")
    sentences += _loss_sentence(results)
    return " ".join(sentences)


def _seeds_of_each(results: Results) -> str:
    """``3 seeds``, or ``1 to 3 seeds`` where schemes have different numbers of them."""
    counts = [len(distinct(rows(results, "runs", scheme), "seed")) for scheme in schemes_with(results, "runs")]
    fewest, most = min(counts, default=len(results["seeds"])), max(counts, default=len(results["seeds"]))
    return _counted(most, "seed") if fewest == most else f"{fewest} to {_counted(most, 'seed')}"


def _passkey_sentences(results: Results, reached: dict[str, Reach], trained: int | None) -> list[str]:
    lengths = distinct(rows(results, "passkey"), "length")
    span = f"of {lengths[0]} tokens" if len(lengths) == 1 else f"of {lengths[0]} to {lengths[-1]} tokens"
    sentences = [f"Each model then had to find a pass key in texts {span}."]
    by_length: dict[int, list[str]] = defaultdict(list)
    for scheme, found in reached.items():
        by_length[found.farthest.length if found.farthest else 0].append(scheme)
    for length, names in sorted(by_length.items(), reverse=True):
        if not length:
            sentences.append(f"{listing(names)} did not find {100 * HOLDS:.0f} % of the keys at any length.")
            continue
        ratio = f", {multiple(length / trained)}× the training length" if trained else ""
        end = ", the longest tested" if length == lengths[-1] else ""
        dips = [
            f"{name} only {percent(dip.share)} % at {dip.length} tokens" for name in names if (dip := reached[name].dip)
        ]
        sentences.append(
            f"{listing(names)} found at least {100 * HOLDS:.0f} % of the keys in texts of up to {length} "
            f"tokens{ratio}{end}" + (f" (but {listing(dips)})." if dips else ".")
        )
    return sentences


def _loss_sentence(results: Results) -> list[str]:
    measure = loss_measure(results)
    curves = {name: measure.by_position(rows(results, "perplexity", name)) for name in scheme_names(results)}
    positions = [position for curve in curves.values() for position in curve]
    if not positions:
        return []
    farthest = max(positions)
    there = {name: curve[farthest].mean for name, curve in curves.items() if farthest in curve}
    best = min(there, key=lambda name: there[name])
    return [
        f"At the farthest positions that were read, around token {farthest:.0f}, {best} has {measure.least}: "
        f"{measure.written(there[best])}."
    ]


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
