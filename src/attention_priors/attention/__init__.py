"""How attention with a prior is computed: ``attend()``, its backends and the logit scale."""

from attention_priors.attention.attend import attend
from attention_priors.attention.flex_mods import flex_mask_mod, flex_score_mod
from attention_priors.attention.key_bounds import KeyBounds
from attention_priors.attention.key_eviction import unneeded_keys
from attention_priors.attention.logit_scale import SSMax, logit_scale_from_config
from attention_priors.attention.pruning_effects import PruningReport, pruning_report

__all__ = [
    "KeyBounds",
    "PruningReport",
    "SSMax",
    "attend",
    "flex_mask_mod",
    "flex_score_mod",
    "logit_scale_from_config",
    "pruning_report",
    "unneeded_keys",
]
