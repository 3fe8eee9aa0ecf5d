"""Models: a drop-in attention layer (torch alone) and a decoder language model (transformers)."""

from typing import TYPE_CHECKING, Any

from attention_priors.models.prior_attention import PriorAttention

if TYPE_CHECKING:
    from attention_priors.models.decoder import PriorDecoderConfig, PriorDecoderForCausalLM, PriorDecoderModel

__all__ = ["PriorAttention", "PriorDecoderConfig", "PriorDecoderForCausalLM", "PriorDecoderModel"]


def __getattr__(name: str) -> Any:
    """Import the decoder when it is first asked for: it needs transformers, PriorAttention does not."""
    if name in __all__:
        from attention_priors.models import decoder

        return getattr(decoder, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
