"""Tasks of evaluations and comparisons: make texts, query a model, and score the answers."""

from attention_priors.lab.tasks.catalogue import make_task
from attention_priors.lab.tasks.completion import gc_correlation, gc_trajectory
from attention_priors.lab.tasks.copying import CopyMixture, CopyMixtureRows
from attention_priors.lab.tasks.passkey import PasskeyTexts
from attention_priors.lab.tasks.plan import TASKS, EvaluationPlan
from attention_priors.lab.tasks.ruler import RULER_TASKS
from attention_priors.lab.tasks.ruler.haystack import Haystack, PunktSplitter, load_haystack
from attention_priors.lab.tasks.ruler.needles import NeedleSettings
from attention_priors.lab.tasks.ruler.task import RulerTask, match_all
from attention_priors.lab.tasks.ruler.texts import RulerTexts
from attention_priors.lab.tasks.ruler.variables import VariableSettings
from attention_priors.lab.tasks.subject import Subject
from attention_priors.lab.tasks.task import Setting, Task

__all__ = [
    "RULER_TASKS",
    "TASKS",
    "CopyMixture",
    "CopyMixtureRows",
    "EvaluationPlan",
    "Haystack",
    "NeedleSettings",
    "PasskeyTexts",
    "PunktSplitter",
    "RulerTask",
    "RulerTexts",
    "Setting",
    "Subject",
    "Task",
    "VariableSettings",
    "gc_correlation",
    "gc_trajectory",
    "load_haystack",
    "make_task",
    "match_all",
]
