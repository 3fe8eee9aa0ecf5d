"""Figures, tables and a self-contained HTML report from the results of an experiment."""

from attention_priors.lab.report.figures.evaluation import write_evaluation_figures
from attention_priors.lab.report.figures.gallery import illustrations, write_figures
from attention_priors.lab.report.pages.comparison import write_report
from attention_priors.lab.report.pages.images import write_image_results
from attention_priors.lab.report.pages.inspection import inspection_summary, write_inspection
from attention_priors.lab.report.pages.written import refresh_page
from attention_priors.lab.report.selections.images import are_of_images
from attention_priors.lab.report.tables.comparison import write_tables
from attention_priors.lab.report.tables.evaluation import evaluation_markdown, evaluation_tables
from attention_priors.lab.report.tables.images import image_table
from attention_priors.lab.report.tables.terminal import render_text_table

__all__ = [
    "are_of_images",
    "evaluation_markdown",
    "evaluation_tables",
    "illustrations",
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
