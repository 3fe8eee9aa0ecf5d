"""Inspect models: content and position in attention, learned priors of each head, attention sinks."""

from attention_priors.hf.observe import observed_attention
from attention_priors.lab.inspect.additive import (
    Projected,
    additive_logits,
    first_layer_linear_audit,
    first_layer_logits,
    linear_audit,
)
from attention_priors.lab.inspect.inspection import InspectionPlan, head_accounts, inspect_model
from attention_priors.lab.inspect.load import check_same_model, load_inspected, text_to_read
from attention_priors.lab.inspect.posterior import (
    AttentionLogits,
    attention_logits,
    decompose,
    decompose_attention,
    problem_logits,
    transport_minimum,
    transport_objective,
    transport_plan,
)
from attention_priors.lab.inspect.priors import (
    curve_distances,
    effective_reach,
    head_roles,
    logit_scale_rows,
    prior_mass_rows,
    prior_reach_rows,
    prior_rows,
    prior_term_rows,
    window_for,
)
from attention_priors.lab.inspect.sinks import (
    collapse_bounds,
    content_range,
    context_sensitivity,
    sensitivity_bound,
    sink_margin,
    sink_mass,
    sink_mass_rows,
)

__all__ = [
    "AttentionLogits",
    "InspectionPlan",
    "Projected",
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
    "problem_logits",
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
