"""Tasks of evaluations and comparisons: make texts, query a model, and score the answers."""

from attention_priors.lab.tasks.catalogue import make_task
from attention_priors.lab.tasks.completion import gc_correlation, gc_trajectory
from attention_priors.lab.tasks.copying import CopyMixture, CopyMixtureRows
from attention_priors.lab.tasks.needles.haystack import Haystack, PunktSplitter, load_haystack
from attention_priors.lab.tasks.needles.prompts import NEEDLE_TASKS, NeedleSettings
from attention_priors.lab.tasks.needles.task import NeedleTask, match_all
from attention_priors.lab.tasks.needles.texts import NeedleTexts
from attention_priors.lab.tasks.passkey import PasskeyTexts
from attention_priors.lab.tasks.plan import TASKS, EvaluationPlan
from attention_priors.lab.tasks.subject import Subject
from attention_priors.lab.tasks.task import Setting, Task

__all__ = [
    "NEEDLE_TASKS",
    "TASKS",
    "CopyMixture",
    "CopyMixtureRows",
    "EvaluationPlan",
    "Haystack",
    "NeedleSettings",
    "NeedleTask",
    "NeedleTexts",
    "PasskeyTexts",
    "PunktSplitter",
    "Setting",
    "Subject",
    "Task",
    "gc_correlation",
    "gc_trajectory",
    "load_haystack",
    "make_task",
    "match_all",
]
