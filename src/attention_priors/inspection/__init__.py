"""``attention-priors inspect``: what the heads of a trained model do, as data."""

from attention_priors.inspection.inspect import InspectionPlan, inspect_model
from attention_priors.inspection.load import Inspected, check_same_model, load_inspected, text_to_read

__all__ = ["Inspected", "InspectionPlan", "check_same_model", "inspect_model", "load_inspected", "text_to_read"]
