"""Other people's models: priors attached to them, saved and loaded."""

from attention_priors.hub.adapter import load_adapter, load_attached, push_adapter_to_hub, save_adapter
from attention_priors.hub.attach import attach, attached_priors, detach, train_attached

__all__ = [
    "attach",
    "attached_priors",
    "detach",
    "load_adapter",
    "load_attached",
    "push_adapter_to_hub",
    "save_adapter",
    "train_attached",
]
