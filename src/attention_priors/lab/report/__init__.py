"""Figures, tables and pages of results.

``attention-priors report`` reads the rows of a study (:class:`attention_priors.lab.results.Results`) and calls
:func:`write_report` in ``pages/study.py``. Each mark ``<!-- table: NAME -->`` on a page receives the table of this name
from :func:`~attention_priors.lab.report.tables.tables`. Figures come from ``figures`` in the same way.
"""

from attention_priors.lab.report.evaluation import evaluation_results, evaluation_tables, write_evaluation_figures
from attention_priors.lab.report.pages.inspection import inspection_summary, write_inspection
from attention_priors.lab.report.pages.study import MissingDataError, overview_table, write_report
from attention_priors.lab.report.pages.tour import tour_results, write_tour

__all__ = [
    "MissingDataError",
    "evaluation_results",
    "evaluation_tables",
    "inspection_summary",
    "overview_table",
    "tour_results",
    "write_evaluation_figures",
    "write_inspection",
    "write_report",
    "write_tour",
]
