"""Base classes of configs and models, and checks of their inputs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from attention_priors._io import write_bytes
from attention_priors.attention import (
    ForgetGate,
    NullKey,
    SSMax,
    attend,
    attend_with_weights,
    logit_scale,
    logit_scale_from_config,
)
from attention_priors.attention.attend import attend_cached
from attention_priors.checks import check_booleans
from attention_priors.config import FORMAT, check_can_be_built, check_format
from attention_priors.encodings import Encoding
from attention_priors.models.card import TRAINING_KEY, write_card
from attention_priors.models.masks import Keys
from attention_priors.priors import CATALOGUE, Prior, Sum, prior_from_config
from attention_priors.priors.base import unset_after_reset


def check_can_be_loaded(module: nn.Module, wrappers: tuple[type[Prior], ...] = (Sum,)) -> None:
    """Raise a ValueError if loading could not rebuild a prior or logit scale in ``module`` from its name.

    Args:
        module: a model, or a part of a model.
        wrappers: prior classes that are described by the priors inside them.
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
    """Base class of transformers models whose attention is computed by :func:`attend`."""

    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_context_parallel = False  # it shards the inputs of PyTorch's SDPA, which has no priors
    # Half precision cannot represent positions beyond a few hundred exactly.
    _keep_in_fp32_modules_strict = ["prior", "logit_scale", "null_logit"]  # noqa: RUF012

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Load a model as transformers does. Parameters that a prior does not learn stay frozen."""
        loaded = super().from_pretrained(*args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        for module in model.modules():
            if isinstance(module, Prior):
                module.freeze_what_is_fixed()
        return loaded

    def save_pretrained(
        self, save_directory: str | os.PathLike[str], is_main_process: bool = True, *args: Any, **kwargs: Any
    ) -> None:
        """Save a model as transformers does, and beside it a model card, unless the folder has a card of a person.

        Raises:
            ValueError: loading could not rebuild a prior or logit scale of the model from its name.
        """
        check_can_be_loaded(self)
        super().save_pretrained(save_directory, is_main_process, *args, **kwargs)
        folder, config = Path(save_directory), self.config
        if is_main_process and (folder / "config.json").is_file():
            own = type(self)
            write_card(
                folder,
                f"{own.__name__} with positional priors",
                config.parts_of_layers(),
                f'from {own.__module__} import {own.__name__}\n\nmodel = {own.__name__}.from_pretrained("THIS_MODEL")',
                notes=("All layers share one prior.",) if config.share_prior else (),
                training=getattr(config, TRAINING_KEY, None),
            )

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Do nothing: saved models already name this package's classes, so no source needs to be copied."""

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
                f"{type(module).__name__}.reset_parameters() must set every parameter and buffer; it does not set "
                f"{', '.join(empty)}. transformers builds models on the meta device, so values set in __init__ are "
                "lost: set them in reset_parameters() and call reset_parameters() in __init__"
            )


_SOURCE = '''"""Classes of this model for ``trust_remote_code=True``, from the package attention-priors."""

from {module} import {names}

__all__ = [{quoted}]
'''


class PriorConfig(PreTrainedConfig):
    """Base class of configs of models with priors.

    Saving writes a short module beside ``config.json``, through which ``trust_remote_code=True`` finds the model's
    classes in this package. Without ``trust_remote_code``, import the model's module before loading.
    """

    auto_classes: ClassVar[dict[str, str]] = {}
    """Names of the model's classes, by Auto class."""

    num_hidden_layers: int = 1
    num_attention_heads: int = 1
    prior: dict[str, Any] | list[dict[str, Any]] | str | None = None
    share_prior: bool = False
    logit_scale: dict[str, Any] | str | None = None
    attention_priors_format: int | None = None
    """Format of the file that the config was read from, which must be :data:`~attention_priors.config.FORMAT`."""

    def __post_init__(self, **kwargs: Any) -> None:
        if self.attention_priors_format is not None:
            check_format(self.attention_priors_format, "the model's config")
        self.attention_priors_format = FORMAT
        check_booleans(share_prior=self.share_prior)
        super().__post_init__(**kwargs)

    def parts_of_layers(self) -> dict[int, dict[str, Any]]:
        """Return the description of each layer's parts, by the index of the layer and the name of the part."""
        parts = {"prior": self.prior, "logit scale": self.logit_scale, "encoding": getattr(self, "encoding", None)}
        return dict.fromkeys(range(self.num_hidden_layers), parts)

    def make_prior(self) -> Prior | None:
        """Build the prior from its description."""
        return None if self.prior is None else prior_from_config(self.prior, self.num_attention_heads)

    def make_logit_scale(self) -> SSMax | None:
        """Build the logit scale from its description."""
        return logit_scale_from_config(self.logit_scale, self.num_attention_heads)

    def to_dict(self) -> dict[str, Any]:
        """Return transformers' description, with an ``auto_map`` to the module that imports the model's classes."""
        found = {auto: f"{self._auto_module()}.{name}" for auto, name in self.auto_classes.items()}
        return super().to_dict() | {"auto_map": found}

    def to_json_file(self, json_file_path: str | os.PathLike[str], use_diff: bool = True) -> None:
        """Save the config as transformers does, and beside it the module that ``auto_map`` names."""
        names = sorted(self.auto_classes.values())
        quoted = ", ".join(f'"{name}"' for name in names)
        source = _SOURCE.format(module=type(self).__module__, names=", ".join(names), quoted=quoted)
        write_bytes(Path(json_file_path).with_name(f"{self._auto_module()}.py"), source.encode())
        super().to_json_file(json_file_path, use_diff)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Do nothing: saved configs already name this package's classes, so no source needs to be copied."""

    def _auto_module(self) -> str:
        return f"modeling_{self.model_type}"


_RECORDED = ("output_attentions", "output_hidden_states")


def refuse_unknown(options: dict[str, Any], model: str, *known: str, advice: str = "") -> None:
    """Raise a ValueError for an unknown argument, which would otherwise be ignored.

    Unknown arguments that are None are accepted, because PEFT and pipelines pass unset arguments as None.

    Args:
        options: keyword arguments beyond the model's own.
        model: the model's name in the message.
        known: names accepted in addition to ``output_attentions`` and ``output_hidden_states``.
        advice: what to do instead.
    """
    for name, value in options.items():
        if name not in (*_RECORDED, *known) and value is not None:
            raise ValueError(f"{model} does not take the argument {name}{advice and '; ' + advice}")


def embedded(table: nn.Embedding, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
    """Return token embeddings ``(B, L, width)``, looked up from ``input_ids`` or equal to ``inputs_embeds``.

    Raises:
        ValueError: both or neither are given, or the shape is wrong.
    """
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError("pass exactly one of input_ids and inputs_embeds")
    hidden = table(input_ids) if inputs_embeds is None else inputs_embeds
    if hidden.dim() != 3:
        raise ValueError(
            f"input_ids must have shape (B, L), or inputs_embeds (B, L, {table.embedding_dim}), got "
            f"{tuple((hidden if input_ids is None else input_ids).shape)}"
        )
    return hidden


def beside(tensor: Tensor, *used: nn.Module | None) -> AbstractContextManager[Any]:
    """Return a context in which the parameters of ``used`` are on the device of ``tensor``.

    accelerate moves the parameters of modules that are called. The parameters of a prior are read without a call of
    ``forward``, and layers on several devices may share a prior. Gradients flow back to the original parameters.
    """
    stack = None
    for root in used:
        # Most priors have no submodules, and this runs once per layer and token.
        for module in () if root is None else root.modules() if root._modules else (root,):
            for parameter in module._parameters.values():
                if parameter is not None and parameter.device != tensor.device:
                    stack = ExitStack() if stack is None else stack
                    stack.enter_context(_on_device(module, tensor.device))
                    break
    return nullcontext() if stack is None else stack


def attend_over(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    prior: Prior | None,
    keys: Keys,
    wants_weights: bool,
    *used: nn.Module | None,
    logit_scale: SSMax | None = None,
    softmax_scale: float | None = None,
    dropout_p: float = 0.0,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute attention of a layer's queries, ``(B, H, L, D)``, over the keys of a call.

    ``key`` and ``value`` have the slots of the cache, of which the last may be empty. ``keys`` holds positions and
    masks. ``used`` are other modules whose parameters attention reads (see :func:`beside`). ``options`` are further
    arguments of :func:`attend`; with any, even None, a decoding step takes longer. With ``wants_weights``, the dense
    formula computes the weights too.

    Returns:
        Output ``(B, L, H, Dv)``, and the weights ``(B, H, L, num_keys)`` or None.
    """
    if keys.is_plain and key.shape[2] == keys.num_keys and not (dropout_p or options or wants_weights):
        # Most decoding steps need nothing of what follows, and this runs once per layer and token.
        out = attend_cached(query, key, value, prior, logit_scale, softmax_scale)
        if out is not None:
            return out.transpose(1, 2), None
    key, value = keys.trim(key, value)
    options |= keys.options(prior)
    options |= {"logit_scale": logit_scale, "softmax_scale": softmax_scale, "dropout_p": dropout_p}
    weights = None
    with beside(query, prior, *used):
        if wants_weights:
            out, weights = attend_with_weights(query, key, value, prior, **options)
        else:
            out = attend(query, key, value, prior, **options)
    return out.transpose(1, 2), weights


@contextmanager
def _on_device(module: nn.Module, device: torch.device) -> Iterator[None]:
    if hasattr(module, "_hf_hook"):
        from accelerate.utils import align_module_device, has_offloaded_params

        if has_offloaded_params(module):
            with align_module_device(module, device):
                yield
            return
    # As in torch.func.functional_call: the optimizer keeps the original parameters.
    own = dict(module._parameters)
    try:
        for name, parameter in own.items():
            if parameter is not None:
                module._parameters[name] = parameter.to(device)  # pyright: ignore[reportArgumentType]
        yield
    finally:
        module._parameters.update(own)
