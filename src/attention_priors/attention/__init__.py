"""How attention with a prior is computed: ``attend()``, its backends and the logit scale."""

from attention_priors.attention.attend import attend, attend_with_weights
from attention_priors.attention.context_parallel import attend_across
from attention_priors.attention.flex_mods import flex_mask_mod, flex_score_mod
from attention_priors.attention.key_bounds import KeyBounds
from attention_priors.attention.key_eviction import unneeded_keys
from attention_priors.attention.logit_scale import ResidualSSMax, SSMax, logit_scale_from_config
from attention_priors.attention.pruning_effects import PruningReport, pruning_report
from attention_priors.attention.sequence_shards import ShardedSequence, shard_index

__all__ = [
    "KeyBounds",
    "PruningReport",
    "ResidualSSMax",
    "SSMax",
    "ShardedSequence",
    "attend",
    "attend_across",
    "attend_with_weights",
    "flex_mask_mod",
    "flex_score_mod",
    "logit_scale_from_config",
    "pruning_report",
    "shard_index",
    "unneeded_keys",
]
