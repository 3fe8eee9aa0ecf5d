"""Models: a drop-in attention layer (torch only), and a decoder, an encoder and a vision transformer (transformers)."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from attention_priors.models.layer import PriorAttention

if TYPE_CHECKING:
    from attention_priors.models.decoder import PriorDecoderConfig, PriorDecoderForCausalLM, PriorDecoderModel
    from attention_priors.models.encoder import PriorEncoderConfig, PriorEncoderForMaskedLM, PriorEncoderModel
    from attention_priors.models.vision import PriorVisionConfig, PriorVisionForImageClassification, PriorVisionModel

__all__ = [
    "PriorAttention",
    "PriorDecoderConfig",
    "PriorDecoderForCausalLM",
    "PriorDecoderModel",
    "PriorEncoderConfig",
    "PriorEncoderForMaskedLM",
    "PriorEncoderModel",
    "PriorVisionConfig",
    "PriorVisionForImageClassification",
    "PriorVisionModel",
]

_FILES = {"PriorDecoder": "decoder", "PriorEncoder": "encoder", "PriorVision": "vision"}


def __getattr__(name: str) -> Any:
    """Import a model lazily: the models need transformers, ``PriorAttention`` does not."""
    file = next((file for start, file in _FILES.items() if name.startswith(start)), None)
    if name in __all__ and file is not None:
        return getattr(import_module(f"attention_priors.models.{file}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the module's names, including the models that are not imported yet."""
    return sorted({*globals(), *__all__})
