"""Other people's models and checkpoints: priors in their attention, their weights in our models, and back."""

from attention_priors.hub.mpt import mpt_slopes
from attention_priors.hub.use_priors import restore_attention, use_priors

__all__ = ["mpt_slopes", "restore_attention", "use_priors"]
