"""Looking inside: what attention is made of, the priors that a model's heads have learned, what its sinks hold."""

from attention_priors.analysis.account import HeadAccount, head_accounts
from attention_priors.analysis.additive import AdditiveLogits, LinearAudit, Projected, additive_logits, linear_audit
from attention_priors.analysis.curves import (
    LogitScaleRow,
    PriorRow,
    curve_distances,
    logit_scale_rows,
    prior_rows,
)
from attention_priors.analysis.decomposition import Decomposition, decompose, decompose_attention
from attention_priors.analysis.first_layer import first_layer_linear_audit, first_layer_logits
from attention_priors.analysis.logits import AttentionLogits, attention_logits
from attention_priors.analysis.margins import (
    Margin,
    collapse_bounds,
    content_range,
    context_sensitivity,
    sensitivity_bound,
    sink_margin,
)
from attention_priors.analysis.reach import effective_reach, window_for
from attention_priors.analysis.roles import Role, head_roles
from attention_priors.analysis.sinks import SinkMassRow, sink_mass, sink_mass_rows
from attention_priors.analysis.terms import (
    PriorMassRow,
    PriorReachRow,
    PriorTermRow,
    prior_mass_rows,
    prior_reach_rows,
    prior_term_rows,
)
from attention_priors.analysis.transport import transport_minimum, transport_objective, transport_plan
from attention_priors.hub.observation import LayerAttention, observed_attention

__all__ = [
    "AdditiveLogits",
    "AttentionLogits",
    "Decomposition",
    "HeadAccount",
    "LayerAttention",
    "LinearAudit",
    "LogitScaleRow",
    "Margin",
    "PriorMassRow",
    "PriorReachRow",
    "PriorRow",
    "PriorTermRow",
    "Projected",
    "Role",
    "SinkMassRow",
    "additive_logits",
    "attention_logits",
    "collapse_bounds",
    "content_range",
    "context_sensitivity",
    "curve_distances",
    "decompose",
    "decompose_attention",
    "effective_reach",
    "first_layer_linear_audit",
    "first_layer_logits",
    "head_accounts",
    "head_roles",
    "linear_audit",
    "logit_scale_rows",
    "observed_attention",
    "prior_mass_rows",
    "prior_reach_rows",
    "prior_rows",
    "prior_term_rows",
    "sensitivity_bound",
    "sink_margin",
    "sink_mass",
    "sink_mass_rows",
    "transport_minimum",
    "transport_objective",
    "transport_plan",
    "window_for",
]
