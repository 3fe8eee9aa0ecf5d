"""The tables of a study."""

from __future__ import annotations

from pathlib import Path

from attention_priors._io import write_bytes
from attention_priors.lab.report.table import Table
from attention_priors.lab.report.tables import heads, losses, scores, study
from attention_priors.lab.results import Results

_MAKERS = (
    study.accuracy, scores.passkey, losses.perplexity, losses.copying, scores.retrieval, scores.answer_tokens,
    losses.plan_losses, losses.completions, scores.needle_weights, study.timing, study.axes, study.extension,
    heads.head_counts, heads.prior_mass, heads.prior_reach, study.training, study.runs,
)  # fmt: skip


def tables(results: Results) -> dict[str, Table]:
    """Return every table of a study by name; those that there is no data for have no lines."""
    return {table.name: table for table in (make(results) for make in _MAKERS)}


def write_tables(made: dict[str, Table], folder: Path) -> list[Path]:
    """Write tables as Markdown and as LaTeX, and remove the files of those that there is no data for any more.

    Args:
        made: What :func:`tables` returned.
        folder: Where to; made if there is something to write.

    Returns:
        The files.
    """
    written = []
    for name, table in made.items():
        for ending, form in (("md", table.markdown), ("tex", table.latex)):
            path = folder / f"{name}.{ending}"
            if table.lines:
                write_bytes(path, form().encode())
                written.append(path)
            else:
                path.unlink(missing_ok=True)
    return written
