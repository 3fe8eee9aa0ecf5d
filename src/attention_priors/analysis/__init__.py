"""Looking inside a model: the priors its heads have learned, and what its sinks hold."""

from attention_priors.analysis.curves import (
    LogitScaleRow,
    PriorRow,
    curve_distances,
    logit_scale_rows,
    prior_rows,
)
from attention_priors.analysis.sinks import SinkMassRow, sink_mass, sink_mass_rows
from attention_priors.analysis.terms import PriorMassRow, PriorTermRow, prior_mass_rows, prior_term_rows

__all__ = [
    "LogitScaleRow",
    "PriorMassRow",
    "PriorRow",
    "PriorTermRow",
    "SinkMassRow",
    "curve_distances",
    "logit_scale_rows",
    "prior_mass_rows",
    "prior_rows",
    "prior_term_rows",
    "sink_mass",
    "sink_mass_rows",
]
