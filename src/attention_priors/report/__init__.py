"""Figures, tables and a self-contained HTML report from the results of an experiment."""

from attention_priors.report.comparison import write_report
from attention_priors.report.evaluation import evaluation_markdown, evaluation_tables
from attention_priors.report.evaluation_figures import write_evaluation_figures
from attention_priors.report.gallery import write_figures
from attention_priors.report.images import are_of_images, image_table, write_image_results
from attention_priors.report.inspection import inspection_summary, write_inspection
from attention_priors.report.page import refresh_page
from attention_priors.report.result_grids import write_tables
from attention_priors.report.tables import render_text_table

__all__ = [
    "are_of_images",
    "evaluation_markdown",
    "evaluation_tables",
    "image_table",
    "inspection_summary",
    "refresh_page",
    "render_text_table",
    "write_evaluation_figures",
    "write_figures",
    "write_image_results",
    "write_inspection",
    "write_report",
    "write_tables",
]
