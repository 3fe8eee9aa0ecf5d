"""Results of a study: a file of rows, written by comparisons and read by tables, figures and pages.

``results.jsonl.gz`` holds one JSON object per line. Its ``row`` is the kind of row. Missing numbers are null.

- ``study`` (first line): ``format``, ``recipe``, ``recipe_sha256``, ``versions``, ``machine``, ``seeds``,
  ``created``, ``wall_seconds``, and ``corpus`` or ``images``.
- ``scheme`` (in display order): ``scheme``, ``description``, ``context_length`` of the last training in tokens,
  ``parameters``, ``prior_parameters``. A sweep that compares schemes adds ``axes``. An extended context adds
  ``extended_from``. A checkpoint that states its length adds ``pretrained_length``.
- All other rows name ``scheme``, ``seed`` and the fields of :data:`FIELDS`.

Kinds of rows:

==================  ==================================================================================================
``run``             training run: seconds, steps, losses; reason why its preset pass keys stopped before the longest
                    text
``retrieval``       texts of one task, length and depth: ``correct`` is the sum of scores. ``plan`` is null for the
                    pass-key preset
``perplexity``      mean loss ``nll`` in nats over the ``tokens`` in a range of positions, named by its geometric
                    middle. ``plan`` is null for the preset. A null ``position`` is for whole ``documents``; ``low``
                    and ``high`` are then the 95 % interval over the documents
``copying``         loss by kind of token; loss of the true distribution, on these tokens and in expectation
``completion``      share of bases that equal the true bases, and r of GC content, with intervals over pieces
``needle_weight``   attention weight of a head on the requested needle, with an interval over texts
``timing``          milliseconds and bytes of a pass
``sink_mass``       weight of the first token at a factor on the content logits, whose range is ``signal``
``prior``           prior of a head: parameters, and curve over ``distance`` in nats
``prior_term``      summand of a prior: curve over ``places`` in nats
``prior_mass``      weight that the prior alone gives to three keys
``prior_reach``     ``half``: distance that holds half of the prior, by length of the text
``logit_scale``     ``s`` of a head
``extension``       ``loss`` before and after the extension of a context, by length
``accuracy``        accuracy on images of one ``size`` in pixels
``prior_map``       log-prior of a head around the middle patch
==================  ==================================================================================================
"""

from __future__ import annotations

import gzip
import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from attention_priors._io import write_bytes

FORMAT = 2
"""Version of the rows. Other versions are not read."""

FILE = "results.jsonl.gz"

FIELDS = {
    "run": "train_seconds steps final_loss history evaluate_seconds stopped",
    "retrieval": "plan task length depth trials correct token_accuracy tokens_right margin stopped",
    "perplexity": "plan task length position nll tokens documents low high",
    "copying": "plan length kind nll optimal_nll expected_nll tokens",
    "completion": "plan length pieces continuations identity identity_low identity_high chance gc_correlation gc_low "
    "gc_high",
    "needle_weight": "plan length layer head texts weight low high",
    "timing": "plan length pass passes mean_ms std_ms median_ms peak_bytes",
    "sink_mass": "layer head factor signal mass",
    "prior": "layer head prior parameters distance log_prior log_prior_ahead",
    "prior_term": "layer head prior over places log_prior ahead scale",
    "prior_mass": "layer head first previous itself scaled",
    "prior_reach": "layer head half",
    "logit_scale": "layer head s",
    "extension": "from to steps loss",
    "accuracy": "size correct trials",
    "prior_map": "layer head log_prior",
}
"""Fields of each kind of row, besides ``scheme`` and ``seed``. Fields that a row lacks are missing numbers."""

DECIMALS = {"log_prior": 3, "log_prior_ahead": 3, "ahead": 3, "scale": 6}
"""Decimals of each field of curves, whose numbers are most of a file. For log-priors, the unit is a nat: rounding to a
thousandth changes a weight by a thousandth of itself at most, for each term of the prior and times any logit scale."""

Row = Mapping[str, Any]

Frame: TypeAlias = Any
"""Pandas ``DataFrame``. The type is ``Any`` because type checkers do not know its columns."""


@dataclass(frozen=True, eq=False)
class Results:
    """Rows of one study as data frames: ``results["retrieval"]``.

    Attributes:
        study: First row: recipe, versions, machine.
        schemes: One entry per scheme, in display order.
        frames: Data frame of each other kind of row, possibly empty. ``scheme`` is a categorical in display order.
            Missing numbers are nan.
    """

    study: Row
    schemes: list[Row]
    frames: Mapping[str, Frame]

    def __getitem__(self, kind: str) -> Frame:
        return self.frames[kind]

    @property
    def names(self) -> list[str]:
        """Names of the schemes, in display order."""
        return [entry["scheme"] for entry in self.schemes]

    @property
    def of_images(self) -> bool:
        """Whether the models classify images."""
        return "images" in self.study

    @property
    def context_lengths(self) -> list[int]:
        """Distinct training lengths of the schemes in tokens, ascending; empty for image classifiers."""
        return [] if self.of_images else sorted({self.context_length(name) for name in self.names})

    def context_length(self, scheme: str) -> int:
        """Return the training length of a scheme in tokens: of its checkpoint, or of its last training if longer.

        Raises:
            ValueError: Neither the scheme nor the recipe has a valid length.
        """
        return max(self.row_length(scheme), self._entry(scheme).get("pretrained_length", 0))

    def row_length(self, scheme: str) -> int:
        """Return the row length of the last training of a scheme in tokens. Errors are as in :meth:`context_length`."""
        length = self._entry(scheme).get(
            "context_length", self.study["recipe"].get("training", {}).get("context_length")
        )
        if not isinstance(length, int) or length < 1:
            raise ValueError(f"context_length of {scheme!r} must be a positive integer (tokens), got {length!r}")
        return length

    def _entry(self, scheme: str) -> Row:
        return next(entry for entry in self.schemes if entry["scheme"] == scheme)

    @classmethod
    def of(cls, rows: Iterable[Row]) -> Results:
        """Sort rows into data frames by kind.

        Raises:
            ValueError: The format is not :data:`FORMAT`, or a row has an unknown kind or scheme.
        """
        import pandas as pd

        study, *others = rows
        if study.get("row") != "study" or study.get("format") != FORMAT:
            raise ValueError(
                f"format must be {FORMAT}, the only one that this version reads; got {study.get('format')!r}"
            )
        schemes = [row for row in others if row["row"] == "scheme"]
        names = [row["scheme"] for row in schemes]
        sorted_rows: dict[str, list[Row]] = {kind: [] for kind in FIELDS}
        for row in others:
            if row["scheme"] not in names:
                raise ValueError(
                    f"scheme of a {row['row']} row must be one of {', '.join(names)}; got {row['scheme']!r}"
                )
            if row["row"] not in (*FIELDS, "scheme"):
                raise ValueError(f"row must be one of scheme, {', '.join(FIELDS)}; got {row['row']!r}")
            if row["row"] != "scheme":
                sorted_rows[row["row"]].append(row)
        frames = {}
        for kind, found in sorted_rows.items():
            frame = pd.DataFrame(found, columns=["scheme", "seed", *FIELDS[kind].split()])
            # Without this conversion, a column of only nulls would have dtype object.
            frame = frame.fillna(math.nan).infer_objects()
            frames[kind] = frame.assign(scheme=pd.Categorical(frame.scheme, categories=names, ordered=True))
        return cls(study, schemes, frames)

    @classmethod
    def read(cls, folder: Path) -> Results:
        """Read the results of a folder.

        Raises:
            ValueError: The format is not :data:`FORMAT`, or a row has an unknown kind or scheme.
            FileNotFoundError: The folder has no results.
        """
        return cls.of(read_rows(folder))


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """Read the rows of a folder."""
    with gzip.open(folder / FILE, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def write_rows(folder: Path, rows: Iterable[Row]) -> Path:
    """Write rows to a folder and return the path of the file. Equal rows give equal bytes."""
    short = (
        row | {field: _rounded(row[field], decimals) for field, decimals in DECIMALS.items() if field in row}
        for row in map(dict, rows)
    )
    text = "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in short)
    write_bytes(folder / FILE, gzip.compress(text.encode(), mtime=0))
    return folder / FILE


def _rounded(numbers: Any, decimals: int) -> Any:
    """Round numbers in nested lists."""
    if isinstance(numbers, list):
        return [_rounded(one, decimals) for one in numbers]
    return round(numbers, decimals) if isinstance(numbers, float) else numbers


def recipe_sha256(recipe: Row) -> str:
    """Return the SHA-256 (64 hex digits) of a recipe's JSON with sorted keys."""
    return hashlib.sha256(json.dumps(recipe, sort_keys=True, ensure_ascii=False).encode()).hexdigest()
