"""What transformers needs to know about every model of this package."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attention_priors.attention import SSMax, logit_scale
from attention_priors.config import check_can_be_built
from attention_priors.encodings import Encoding
from attention_priors.priors import CATALOGUE, Prior, Sum


def check_can_be_loaded(module: nn.Module, wrappers: tuple[type[Prior], ...] = (Sum,)) -> None:
    """Raise a ValueError if loading cannot make one of the priors and logit scales in ``module`` from its name.

    Args:
        module: a model, or a part of one.
        wrappers: priors that are described by the priors inside them.
    """
    if isinstance(module, Prior) and not isinstance(module, wrappers):
        check_can_be_built("prior", CATALOGUE, module, place="attention_priors.priors.CATALOGUE")
    elif isinstance(module, SSMax):
        place = f"{logit_scale.__name__}.LOGIT_SCALES"
        check_can_be_built("logit scale", logit_scale.LOGIT_SCALES, module, place=place)
    else:
        for child in module.children():
            check_can_be_loaded(child, wrappers)


class PriorPreTrainedModel(PreTrainedModel):
    """A transformers model whose attention goes through :func:`attend`."""

    supports_gradient_checkpointing = True
    # Attention goes through attend(), which chooses its own kernels: there is nothing to choose between.
    _supports_sdpa = False
    _supports_flash_attn = False
    _supports_flex_attn = False
    _supports_attention_backend = False
    _supports_context_parallel = False  # it shards what goes into PyTorch's SDPA, which knows no priors
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

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """Save as transformers does.

        Raises:
            ValueError: if loading could not make a prior or a logit scale of the model from its name.
        """
        check_can_be_loaded(self)
        super().save_pretrained(*args, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Nothing is left to do, and no source is to be copied: what is saved names this package's classes."""

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if not isinstance(module, Prior | SSMax | Encoding):
            super()._init_weights(module)
            return
        loaded = {name: x.clone() for name, x in _tensors(module).items() if getattr(x, "_is_hf_initialized", False)}
        for tensor in _tensors(module).values():
            if tensor.is_floating_point():
                tensor.fill_(torch.nan)
        reset = getattr(module, "reset_parameters", None)
        if reset is not None:
            reset()
        filled = _tensors(module)
        for name, value in loaded.items():
            filled[name].copy_(value)
        empty = [name for name, tensor in filled.items() if name not in loaded and tensor.isnan().any()]
        if empty:
            raise NotImplementedError(
                f"{type(module).__name__}.reset_parameters() must give every parameter and buffer its initial value; "
                f"it leaves out {', '.join(empty)}. transformers makes models without memory, so values set in "
                "__init__ are lost: set them in reset_parameters() and call it in __init__"
            )


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return dict([*module.named_parameters(), *module.named_buffers()])
