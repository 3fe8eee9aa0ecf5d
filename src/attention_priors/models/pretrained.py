"""Shared by the models of this package: configurations, settings of transformers, checks of inputs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from attention_priors._io import write_bytes
from attention_priors.attention import ForgetGate, NullKey, SSMax, logit_scale, logit_scale_from_config
from attention_priors.checks import check_booleans
from attention_priors.config import FORMAT, check_can_be_built, check_format
from attention_priors.encodings import Encoding
from attention_priors.priors import CATALOGUE, Prior, Sum, prior_from_config
from attention_priors.priors.base import unset_after_reset


def check_can_be_loaded(module: nn.Module, wrappers: tuple[type[Prior], ...] = (Sum,)) -> None:
    """Raise a ValueError if loading cannot make one of the priors and logit scales in ``module`` from its name.

    Args:
        module: a model, or a part of one.
        wrappers: priors that are described by the priors inside them.
    """
    if isinstance(module, Prior) and not isinstance(module, wrappers):
        check_can_be_built("prior", CATALOGUE, module, cure="register it with attention_priors.register_prior")
    elif isinstance(module, SSMax):
        cure = f"add it to {logit_scale.__name__}.LOGIT_SCALES"
        check_can_be_built("logit scale", logit_scale.LOGIT_SCALES, module, cure=cure)
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
    _keep_in_fp32_modules_strict = ["prior", "logit_scale", "null_logit"]  # noqa: RUF012

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Load as transformers does, and keep fixed what a prior does not learn: loading makes new parameters."""
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
        if not isinstance(module, Prior | SSMax | NullKey | ForgetGate | Encoding):
            super()._init_weights(module)
            return
        tensors = dict([*module.named_parameters(), *module.named_buffers()])
        loaded = {name: x.clone() for name, x in tensors.items() if getattr(x, "_is_hf_initialized", False)}
        empty = [name for name in unset_after_reset(module) if name not in loaded]
        for name, value in loaded.items():
            tensors[name].copy_(value)
        if empty:
            raise NotImplementedError(
                f"{type(module).__name__}.reset_parameters() must give every parameter and buffer its initial value; "
                f"it leaves out {', '.join(empty)}. transformers makes models without memory, so values set in "
                "__init__ are lost: set them in reset_parameters() and call it in __init__"
            )


_SOURCE = '''"""Where ``trust_remote_code=True`` finds the classes of this model: in attention-priors."""

from {module} import {names}

__all__ = [{quoted}]
'''


class PriorConfig(PreTrainedConfig):
    """The description of a model whose attention has a prior: plain data, from which its parts are made.

    Beside ``config.json`` goes a module of three lines, so that ``trust_remote_code=True`` finds the classes of a saved
    model in this package; without it, they are found by those who have imported the model's module.
    """

    auto_classes: ClassVar[dict[str, str]] = {}
    """The classes of the model, by the Auto class that finds them."""

    num_attention_heads: int = 1
    prior: dict[str, Any] | list[dict[str, Any]] | str | None = None
    share_prior: bool = False
    logit_scale: dict[str, Any] | str | None = None
    attention_priors_format: int | None = None
    """Version of the config's format in the file that it comes from; afterwards this version's."""

    def __post_init__(self, **kwargs: Any) -> None:
        check_format(1 if self.attention_priors_format is None else self.attention_priors_format, "the model's config")
        self.attention_priors_format = FORMAT
        check_booleans(share_prior=self.share_prior)
        super().__post_init__(**kwargs)

    def make_prior(self) -> Prior | None:
        """The prior that is described."""
        return None if self.prior is None else prior_from_config(self.prior, self.num_attention_heads)

    def make_logit_scale(self) -> SSMax | None:
        """The logit scale that is described."""
        return logit_scale_from_config(self.logit_scale, self.num_attention_heads)

    def to_dict(self) -> dict[str, Any]:
        """Write transformers' description, and where programs that have not imported this package find the classes."""
        found = {auto: f"{self._auto_module()}.{name}" for auto, name in self.auto_classes.items()}
        return super().to_dict() | {"auto_map": found}

    def to_json_file(self, json_file_path: str | os.PathLike[str], use_diff: bool = True) -> None:
        """Save as transformers does, with the module that ``auto_map`` names beside it."""
        names = sorted(self.auto_classes.values())
        quoted = ", ".join(f'"{name}"' for name in names)
        source = _SOURCE.format(module=type(self).__module__, names=", ".join(names), quoted=quoted)
        write_bytes(Path(json_file_path).with_name(f"{self._auto_module()}.py"), source.encode())
        super().to_json_file(json_file_path, use_diff)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Nothing is left to do, and no source is to be copied: what is saved names this package's classes."""

    def _auto_module(self) -> str:
        return f"modeling_{self.model_type}"


_RECORDED = ("output_attentions", "output_hidden_states")


def refuse_unknown(options: dict[str, Any], model: str, *known: str, advice: str = "") -> None:
    """Raise a ValueError for an argument that would be ignored, and so change the meaning of a call.

    Callers hand on, as None, arguments that were not given to them: PEFT, pipelines. Those are let through.

    Args:
        options: what a model was called with beyond its own arguments.
        model: its name in the message.
        known: what is expected beside ``output_attentions`` and ``output_hidden_states``.
        advice: what to do instead.
    """
    for name, value in options.items():
        if name not in (*_RECORDED, *known) and value is not None:
            raise ValueError(f"{name} is no argument of {model}{advice and '; ' + advice}")


def embedded(table: nn.Embedding, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
    """The vectors of the tokens, ``(B, L, width)``, from their numbers or as they are given.

    Raises:
        ValueError: both or neither are given, or the shape is another.
    """
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError("give either input_ids or inputs_embeds, not both and not neither")
    hidden = table(input_ids) if inputs_embeds is None else inputs_embeds
    if hidden.dim() != 3:
        raise ValueError(
            f"input_ids must have shape (B, L), or inputs_embeds (B, L, {table.embedding_dim}), got "
            f"{tuple((hidden if input_ids is None else input_ids).shape)}"
        )
    return hidden


def beside(tensor: Tensor, *used: nn.Module | None) -> ExitStack:
    """Have the parameters of modules on a tensor's device for a while.

    accelerate sees to it itself for what is called. The parameters of a prior are read without a call of ``forward``,
    and layers on several devices may share one. Gradients find their way back to the parameters.
    """
    stack = ExitStack()
    for root in used:
        for module in () if root is None else root.modules():
            if any(p is not None and p.device != tensor.device for p in module._parameters.values()):
                stack.enter_context(_on_device(module, tensor.device))
    return stack


@contextmanager
def _on_device(module: nn.Module, device: torch.device) -> Iterator[None]:
    if hasattr(module, "_hf_hook"):
        from accelerate.utils import align_module_device, has_offloaded_params

        if has_offloaded_params(module):
            with align_module_device(module, device):
                yield
            return
    # As torch.func.functional_call does it: the parameters themselves stay what they are, and their optimiser's.
    own = dict(module._parameters)
    try:
        for name, parameter in own.items():
            if parameter is not None:
                module._parameters[name] = parameter.to(device)  # pyright: ignore[reportArgumentType]
        yield
    finally:
        module._parameters.update(own)
