"""The eight needle-in-a-haystack tasks of RULER: prompts equal to the reference's, and their score."""

from attention_priors.lab.data.needles.draws import NeedleDraws, draw
from attention_priors.lab.data.needles.haystack import Haystack, haystack_of, load_haystack
from attention_priors.lab.data.needles.prompt import render
from attention_priors.lab.data.needles.sentences import PunktSplitter, RegexSplitter, SentenceSplitter
from attention_priors.lab.data.needles.settings import DEPTHS, NEEDLE_TASKS, NeedleSettings
from attention_priors.lab.data.needles.task import NeedleSample, NeedleTask, match_all
from attention_priors.lab.data.needles.texts import NeedleTexts

__all__ = [
    "DEPTHS",
    "NEEDLE_TASKS",
    "Haystack",
    "NeedleDraws",
    "NeedleSample",
    "NeedleSettings",
    "NeedleTask",
    "NeedleTexts",
    "PunktSplitter",
    "RegexSplitter",
    "SentenceSplitter",
    "draw",
    "haystack_of",
    "load_haystack",
    "match_all",
    "render",
]
