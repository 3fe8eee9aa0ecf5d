"""Testing long: passkey retrieval and perplexity by position, in chunks over a KV cache."""

from attention_priors.evaluation.passkey import PasskeyRow, has_given_up, passkey_rows, retrieves
from attention_priors.evaluation.perplexity import PerplexityRow, perplexity_rows, position_bins
from attention_priors.evaluation.prefill import chunked_logits
from attention_priors.evaluation.settings import EvaluationSettings, PasskeySettings, PerplexitySettings

__all__ = [
    "EvaluationSettings",
    "PasskeyRow",
    "PasskeySettings",
    "PerplexityRow",
    "PerplexitySettings",
    "chunked_logits",
    "has_given_up",
    "passkey_rows",
    "perplexity_rows",
    "position_bins",
    "retrieves",
]
