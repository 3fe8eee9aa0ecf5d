"""Resumable evaluations: every task at every length, with one record per text."""

from attention_priors.lab.evaluate.evaluate import Observer, evaluate
from attention_priors.lab.evaluate.summary import Summary
from attention_priors.lab.tasks.plan import TASKS, EvaluationPlan
from attention_priors.lab.tasks.subject import Subject

__all__ = [
    "TASKS",
    "EvaluationPlan",
    "Observer",
    "Subject",
    "Summary",
    "evaluate",
]
