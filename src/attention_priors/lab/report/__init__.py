"""Figures, tables and pages of results."""

from attention_priors.lab.report.evaluation import evaluation_results, evaluation_tables, write_evaluation_figures
from attention_priors.lab.report.pages.inspection import inspection_summary, write_inspection
from attention_priors.lab.report.pages.study import MissingDataError, overview_table, write_report

__all__ = [
    "MissingDataError",
    "evaluation_results",
    "evaluation_tables",
    "inspection_summary",
    "overview_table",
    "write_evaluation_figures",
    "write_inspection",
    "write_report",
]
