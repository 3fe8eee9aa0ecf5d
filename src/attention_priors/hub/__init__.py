"""Other people's models and checkpoints: priors in their attention, their weights in our models, and back."""

from attention_priors.hub.bam_checkpoint import load_bam_checkpoint, save_bam_checkpoint
from attention_priors.hub.goat import load_goat_attention
from attention_priors.hub.mpt import mpt_slopes
from attention_priors.hub.use_priors import restore_attention, use_priors

__all__ = [
    "load_bam_checkpoint",
    "load_goat_attention",
    "mpt_slopes",
    "restore_attention",
    "save_bam_checkpoint",
    "use_priors",
]
