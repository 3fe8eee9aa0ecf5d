"""Integration with Hugging Face: priors in transformers models, and conversion of checkpoints."""

from attention_priors.hf.adapter import load_adapter, load_attached, push_adapter_to_hub, save_adapter
from attention_priors.hf.alibi import mpt_slopes
from attention_priors.hf.attach import attach, attached_priors, detach, train_attached
from attention_priors.hf.bam_checkpoint import load_bam_checkpoint, save_bam_checkpoint
from attention_priors.hf.export import export_onnx, export_program
from attention_priors.hf.gguf import export_gguf
from attention_priors.hf.goat import load_goat_attention
from attention_priors.hf.loading import load_model
from attention_priors.hf.use_priors import restore_attention, use_priors

__all__ = [
    "attach",
    "attached_priors",
    "detach",
    "export_gguf",
    "export_onnx",
    "export_program",
    "load_adapter",
    "load_attached",
    "load_bam_checkpoint",
    "load_goat_attention",
    "load_model",
    "mpt_slopes",
    "push_adapter_to_hub",
    "restore_attention",
    "save_adapter",
    "save_bam_checkpoint",
    "train_attached",
    "use_priors",
]
