"""Results of a study: one file of rows, written by a comparison and read by tables, figures and pages.

``results.jsonl.gz`` holds one JSON object a line. Each names its ``row``; numbers that do not exist are null.

- ``study`` (first line): ``format``, ``recipe`` and its ``recipe_sha256``, ``versions``, ``machine``, ``seeds``,
  ``created``, ``wall_seconds``, and ``corpus`` or ``images``.
- ``scheme`` (in display order): ``scheme``, ``description``, ``context_length`` of the last training in tokens,
  ``parameters``, ``prior_parameters``; ``axes`` where a sweep compares schemes, ``extended_from`` where a context was
  extended.
- All other rows name ``scheme`` and ``seed``:

==================  ==================================================================================================
``run``             ``train_seconds``, ``steps``, ``final_loss``, ``history``, ``evaluate_seconds``, ``stopped``
``retrieval``       ``plan`` (null for the recipe's own pass keys), ``task``, ``length``, ``depth``, ``trials``,
                    ``correct`` (sum of scores), ``token_accuracy``, ``tokens_right``, ``stopped``
``perplexity``      ``plan`` (null likewise), ``task``, ``length``, ``position`` (geometric middle of a range), ``nll``
                    in nats, ``tokens``
``copying``         ``length``, ``kind``, ``nll``, ``optimal_nll``, ``expected_nll``, ``tokens``
``completion``      ``plan``, ``length``, ``pieces``, ``continuations``, ``identity``, ``chance``, ``gc_correlation``
``needle_weight``   ``plan``, ``length``, ``layer``, ``head``, ``texts``, ``weight``
``timing``          ``plan``, ``length``, ``pass``, ``passes``, ``mean_ms``, ``std_ms``, ``median_ms``, ``peak_bytes``
``sink_mass``       ``layer``, ``head``, ``factor``, ``signal``, ``mass``
``prior``           ``layer``, ``head``, ``prior``, ``parameters``, ``distance``, ``log_prior``
``prior_term``      ``layer``, ``head``, ``prior``, ``over``, ``places``, ``log_prior``, ``ahead``, ``scale``
``prior_mass``      ``layer``, ``head``, ``first``, ``previous``, ``itself``, ``scaled``
``prior_reach``     ``layer``, ``head``, ``half`` (distance that holds half of the prior, by length of the text)
``logit_scale``     ``layer``, ``head``, ``s``
``extension``       ``from``, ``to``, ``steps``, ``loss`` (before and after, by length)
``accuracy``        ``size`` in pixels, ``correct``, ``trials``
``prior_map``       ``layer``, ``head``, and the log-prior around the middle patch
==================  ==================================================================================================
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attention_priors._io import write_bytes

if TYPE_CHECKING:
    import pandas as pd

FORMAT = 2
"""Version of the rows; no other is read."""

FILE = "results.jsonl.gz"

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Results:
    """Rows of one study.

    Attributes:
        study: The first row: recipe, versions, machine.
        schemes: One entry per scheme, in display order.
        tables: All other rows by their name.
    """

    study: Row
    schemes: list[Row]
    tables: Mapping[str, pd.DataFrame]

    @classmethod
    def of(cls, rows: Iterable[Row]) -> Results:
        """Sort rows into tables.

        Raises:
            ValueError: the format is not :data:`FORMAT`, or a row names an unknown scheme.
        """
        import pandas as pd

        study, *others = rows
        if study.get("row") != "study" or study.get("format") != FORMAT:
            raise ValueError(f"format must be {FORMAT}, the only one that this version reads; got {study.get('format')!r}")
        schemes = [row for row in others if row["row"] == "scheme"]
        names = {row["scheme"] for row in schemes}
        tables: dict[str, list[Row]] = defaultdict(list)
        for row in others:
            if row["scheme"] not in names:
                raise ValueError(f"scheme of a row must be one of {', '.join(sorted(names))}; got {row['scheme']!r}")
            if row["row"] != "scheme":
                tables[row["row"]].append(row)
        return cls(study, schemes, {name: pd.DataFrame.from_records(found) for name, found in tables.items()})

    @classmethod
    def read(cls, folder: Path) -> Results:
        """Read the results of a folder.

        Raises:
            ValueError: as :meth:`of`.
            FileNotFoundError: the folder has none.
        """
        with gzip.open(folder / FILE, "rt", encoding="utf-8") as file:
            return cls.of(map(json.loads, file))


def write_rows(folder: Path, rows: Iterable[Row]) -> Path:
    """Write rows to a folder; the same rows give the same bytes."""
    text = "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
    write_bytes(folder / FILE, gzip.compress(text.encode(), mtime=0))
    return folder / FILE
