"""Resumable evaluations: every task at every length, with one record per text."""

from attention_priors.lab.evaluate.evaluate import Observer, check_plan, evaluate
from attention_priors.lab.evaluate.records import Records
from attention_priors.lab.evaluate.settings import EvaluationSettings
from attention_priors.lab.evaluate.summary import Continuation, Summary, summarize
from attention_priors.lab.tasks import TASKS, EvaluationPlan, Subject

__all__ = [
    "TASKS",
    "Continuation",
    "EvaluationPlan",
    "EvaluationSettings",
    "Observer",
    "Records",
    "Subject",
    "Summary",
    "check_plan",
    "evaluate",
    "summarize",
]
