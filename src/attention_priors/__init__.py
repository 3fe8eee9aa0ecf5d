"""Attention with positional priors.

:func:`attend` computes attention with a log-prior over positions from the catalogue of priors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attention_priors.attention import (
    Cable,
    ForgetGate,
    KeyBounds,
    NullKey,
    PruningReport,
    ResidualSSMax,
    ShardedSequence,
    SSMax,
    apply_null,
    attend,
    attend_across,
    explain,
    flex_mask_mod,
    flex_score_mod,
    pruning_report,
    shard_index,
    unneeded_keys,
)
from attention_priors.encodings import LearnedTable, LinearToy, Rotary, ShawVectors, Sinusoidal
from attention_priors.models.layer import PriorAttention
from attention_priors.priors import (
    Prior,
    Structure,
    alibi_slopes,
    at_spacing,
    families,
    grid_positions,
    prior_from_config,
    register_prior,
)
from attention_priors.priors.families import *  # noqa: F403

if TYPE_CHECKING:
    from attention_priors.hf import attach

__version__ = "0.1.0"

__all__ = [
    "Cable",
    "ForgetGate",
    "KeyBounds",
    "LearnedTable",
    "LinearToy",
    "NullKey",
    "Prior",
    "PriorAttention",
    "PruningReport",
    "ResidualSSMax",
    "Rotary",
    "SSMax",
    "ShardedSequence",
    "ShawVectors",
    "Sinusoidal",
    "Structure",
    "alibi_slopes",
    "apply_null",
    "at_spacing",
    "attach",
    "attend",
    "attend_across",
    "explain",
    "flex_mask_mod",
    "flex_score_mod",
    "grid_positions",
    "prior_from_config",
    "pruning_report",
    "register_prior",
    "shard_index",
    "unneeded_keys",
]
__all__ += families.__all__


def __getattr__(name: str) -> Any:
    # attach imports transformers, which is optional and takes seconds to import.
    if name == "attach":
        try:
            from attention_priors.hf import attach
        except ModuleNotFoundError as error:
            message = f"attach needs {error.name}; in a clone, run: pip install '.[lab]'"
            raise ModuleNotFoundError(message, name=error.name) from error
        return attach
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
