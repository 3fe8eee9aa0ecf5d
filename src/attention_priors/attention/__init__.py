"""How attention with a prior is computed: ``attend()``, its backends and the logit scale."""

from attention_priors.attention.attend import attend, attend_with_weights
from attention_priors.attention.distributed.ring import attend_across
from attention_priors.attention.distributed.shards import ShardedSequence, shard_index
from attention_priors.attention.explain import explain
from attention_priors.attention.flex.mods import flex_mask_mod, flex_score_mod
from attention_priors.attention.forget_gate import Cable, ForgetGate
from attention_priors.attention.logit_scale import ResidualSSMax, SSMax, logit_scale_from_config
from attention_priors.attention.null_key import NullKey, apply_null
from attention_priors.attention.pruning.bounds import KeyBounds
from attention_priors.attention.pruning.eviction import unneeded_keys
from attention_priors.attention.pruning.report import PruningReport, pruning_report

__all__ = [
    "Cable",
    "ForgetGate",
    "KeyBounds",
    "NullKey",
    "PruningReport",
    "ResidualSSMax",
    "SSMax",
    "ShardedSequence",
    "apply_null",
    "attend",
    "attend_across",
    "attend_with_weights",
    "explain",
    "flex_mask_mod",
    "flex_score_mod",
    "logit_scale_from_config",
    "pruning_report",
    "shard_index",
    "unneeded_keys",
]
