"""What transformers needs to know about every model of this package."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedModel

from attention_priors.attention import SSMax
from attention_priors.encodings import Encoding
from attention_priors.priors import Prior


class PriorPreTrainedModel(PreTrainedModel):
    """A transformers model whose attention goes through :func:`attend`."""

    supports_gradient_checkpointing = True
    # Attention goes through attend(), which chooses its own kernels: there is nothing to choose between.
    _supports_sdpa = False
    _supports_flash_attn = False
    _supports_flex_attn = False
    _supports_attention_backend = False
    _supports_context_parallel = False  # it shards what goes into PyTorch's SDPA, which knows no priors
    starts_anew: ClassVar[tuple[type[nn.Module], ...]] = (Prior, SSMax, Encoding)
    """Modules that know by themselves how they start: by ``reset_parameters``, if they have any."""
    # Positions beyond a few hundred do not fit a half-precision parameter.
    _keep_in_fp32_modules_strict = ["prior", "logit_scale"]  # noqa: RUF012

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """As transformers', except that what a prior does not learn stays fixed: loading makes new parameters."""
        loaded = super().from_pretrained(*args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        for module in model.modules():
            if isinstance(module, Prior):
                module.freeze_what_is_fixed()
        return loaded

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Nothing is left to do, and no source is to be copied: what is saved names this package's classes."""

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, self.starts_anew):
            loaded = [p for p in module.parameters() if getattr(p, "_is_hf_initialized", False)]
            values = [p.clone() for p in loaded]
            reset = getattr(module, "reset_parameters", None)
            if reset is not None:
                reset()
            for parameter, value in zip(loaded, values, strict=True):
                parameter.copy_(value)
        else:
            super()._init_weights(module)
