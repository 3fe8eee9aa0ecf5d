"""Looking inside a model: the priors its heads have learned."""

from attention_priors.analysis.curves import (
    LogitScaleRow,
    PriorRow,
    curve_distances,
    logit_scale_rows,
    prior_rows,
)

__all__ = ["LogitScaleRow", "PriorRow", "curve_distances", "logit_scale_rows", "prior_rows"]
