"""How attention with a prior is computed: ``attend()``, its backends and the logit scale."""

from attention_priors.attention.attend import attend
from attention_priors.attention.key_bounds import KeyBounds
from attention_priors.attention.logit_scale import SSMax, logit_scale_from_config

__all__ = ["KeyBounds", "SSMax", "attend", "logit_scale_from_config"]
