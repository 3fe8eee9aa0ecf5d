"""Classes of this model for ``trust_remote_code=True``, from the package attention-priors."""

from attention_priors.models.decoder import PriorDecoderConfig, PriorDecoderForCausalLM, PriorDecoderModel

__all__ = ["PriorDecoderConfig", "PriorDecoderForCausalLM", "PriorDecoderModel"]
