"""Attention with positional priors: one catalogue of log-priors, one ``attend()``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attention_priors.attention import (
    KeyBounds,
    PruningReport,
    ResidualSSMax,
    ShardedSequence,
    SSMax,
    attend,
    attend_across,
    flex_mask_mod,
    flex_score_mod,
    pruning_report,
    shard_index,
    unneeded_keys,
)
from attention_priors.encodings import LearnedTable, LinearToy, Rotary, ShawVectors, Sinusoidal
from attention_priors.models.layer import PriorAttention
from attention_priors.priors import (
    Axial,
    ClippedOffsets,
    GeneralizedGaussian,
    KeySink,
    KeySink2d,
    Laplace,
    Prior,
    Radial,
    RelativeBuckets,
    Spectral,
    Spectral2d,
    Structure,
    Uniform,
    Window,
    alibi_slopes,
    at_spacing,
    grid_positions,
    prior_from_config,
)

if TYPE_CHECKING:
    from attention_priors.hf import attach

__version__ = "0.1.0"

__all__ = [
    "Axial",
    "ClippedOffsets",
    "GeneralizedGaussian",
    "KeyBounds",
    "KeySink",
    "KeySink2d",
    "Laplace",
    "LearnedTable",
    "LinearToy",
    "Prior",
    "PriorAttention",
    "PruningReport",
    "Radial",
    "RelativeBuckets",
    "ResidualSSMax",
    "Rotary",
    "SSMax",
    "ShardedSequence",
    "ShawVectors",
    "Sinusoidal",
    "Spectral",
    "Spectral2d",
    "Structure",
    "Uniform",
    "Window",
    "alibi_slopes",
    "at_spacing",
    "attach",
    "attend",
    "attend_across",
    "flex_mask_mod",
    "flex_score_mod",
    "grid_positions",
    "prior_from_config",
    "pruning_report",
    "shard_index",
    "unneeded_keys",
]


def __getattr__(name: str) -> Any:
    # It needs transformers, which this package does not, and which takes seconds to import.
    if name == "attach":
        from attention_priors.hf import attach

        return attach
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
