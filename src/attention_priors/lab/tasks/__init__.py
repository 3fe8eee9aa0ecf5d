"""Tasks of evaluations and comparisons: make texts, query a model, and score the answers."""

from attention_priors.lab.tasks.copying import CopyMixture, CopyMixtureRows
from attention_priors.lab.tasks.passkey import PasskeyTexts
from attention_priors.lab.tasks.plan import EvaluationPlan
from attention_priors.lab.tasks.ruler.haystack import Haystack, PunktSplitter, load_haystack
from attention_priors.lab.tasks.ruler.task import RulerTask, match_all
from attention_priors.lab.tasks.ruler.texts import RulerTexts
from attention_priors.lab.tasks.ruler.variables import VariableSettings
from attention_priors.lab.tasks.subject import Subject

__all__ = [
    "CopyMixture",
    "CopyMixtureRows",
    "EvaluationPlan",
    "Haystack",
    "PasskeyTexts",
    "PunktSplitter",
    "RulerTask",
    "RulerTexts",
    "Subject",
    "VariableSettings",
    "load_haystack",
    "match_all",
]
