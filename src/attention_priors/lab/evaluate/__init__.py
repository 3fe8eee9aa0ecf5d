"""Testing long: retrieval, perplexity by position and time, in chunks over a KV cache."""

from attention_priors.lab.evaluate.completion import gc_correlation, gc_trajectory, identity
from attention_priors.lab.evaluate.copying import CopyingRow, copying_rows
from attention_priors.lab.evaluate.evaluate import Observer, check_plan, evaluate
from attention_priors.lab.evaluate.passkey import PasskeyRow, has_given_up, passkey_rows, retrieves
from attention_priors.lab.evaluate.perplexity import PerplexityRow, perplexity_rows, position_bins, token_losses
from attention_priors.lab.evaluate.plan import LONGEST_KEY, TASKS, EvaluationPlan
from attention_priors.lab.evaluate.prefill import chunked_logits
from attention_priors.lab.evaluate.records import Records
from attention_priors.lab.evaluate.settings import (
    CopyingSettings,
    EvaluationSettings,
    PasskeySettings,
    PerplexitySettings,
    SinkMassSettings,
)
from attention_priors.lab.evaluate.subject import Subject, model_fingerprint
from attention_priors.lab.evaluate.summary import (
    Accuracy,
    AtDepth,
    AtPosition,
    Completion,
    Continuation,
    Duration,
    HeadWeight,
    Loss,
    Summary,
    summarize,
)

__all__ = [
    "LONGEST_KEY",
    "TASKS",
    "Accuracy",
    "AtDepth",
    "AtPosition",
    "Completion",
    "Continuation",
    "CopyingRow",
    "CopyingSettings",
    "Duration",
    "EvaluationPlan",
    "EvaluationSettings",
    "HeadWeight",
    "Loss",
    "Observer",
    "PasskeyRow",
    "PasskeySettings",
    "PerplexityRow",
    "PerplexitySettings",
    "Records",
    "SinkMassSettings",
    "Subject",
    "Summary",
    "check_plan",
    "chunked_logits",
    "copying_rows",
    "evaluate",
    "gc_correlation",
    "gc_trajectory",
    "has_given_up",
    "identity",
    "model_fingerprint",
    "passkey_rows",
    "perplexity_rows",
    "position_bins",
    "retrieves",
    "summarize",
    "token_losses",
]
