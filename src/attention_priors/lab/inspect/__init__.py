"""Looking inside: what attention is made of, the priors that a model's heads have learned, what its sinks hold."""

from attention_priors.hf.observe import LayerAttention, observed_attention
from attention_priors.lab.inspect.account import HeadAccount, head_accounts
from attention_priors.lab.inspect.additive import AdditiveLogits, LinearAudit, Projected, additive_logits, linear_audit
from attention_priors.lab.inspect.curves import (
    LogitScaleRow,
    PriorRow,
    curve_distances,
    logit_scale_rows,
    prior_rows,
)
from attention_priors.lab.inspect.decomposition import Decomposition, decompose, decompose_attention
from attention_priors.lab.inspect.first_layer import first_layer_linear_audit, first_layer_logits
from attention_priors.lab.inspect.inspection import InspectionPlan, inspect_model
from attention_priors.lab.inspect.load import Inspected, check_same_model, load_inspected, text_to_read
from attention_priors.lab.inspect.logits import AttentionLogits, attention_logits
from attention_priors.lab.inspect.margins import (
    Margin,
    collapse_bounds,
    content_range,
    context_sensitivity,
    sensitivity_bound,
    sink_margin,
)
from attention_priors.lab.inspect.reach import effective_reach, window_for
from attention_priors.lab.inspect.roles import Role, head_roles
from attention_priors.lab.inspect.sinks import SinkMassRow, sink_mass, sink_mass_rows
from attention_priors.lab.inspect.terms import (
    PriorMassRow,
    PriorReachRow,
    PriorTermRow,
    prior_mass_rows,
    prior_reach_rows,
    prior_term_rows,
)
from attention_priors.lab.inspect.transport import transport_minimum, transport_objective, transport_plan

__all__ = [
    "AdditiveLogits",
    "AttentionLogits",
    "Decomposition",
    "HeadAccount",
    "Inspected",
    "InspectionPlan",
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
    "check_same_model",
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
    "inspect_model",
    "linear_audit",
    "load_inspected",
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
    "text_to_read",
    "transport_minimum",
    "transport_objective",
    "transport_plan",
    "window_for",
]
