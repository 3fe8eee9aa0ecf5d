"""Observing the attention of every layer while a model runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from attention_priors.attention.observe import observed
from attention_priors.attention.problem import Problem
from attention_priors.hf.attach import STATE, attach, attention_layers, detach
from attention_priors.hf.interface import ATTRIBUTE, AttachedPrior
from attention_priors.hf.use_priors import has_own_bias, restore_attention, use_priors, uses_priors
from attention_priors.models.pretrained import PriorPreTrainedModel


@dataclass(frozen=True)
class LayerAttention:
    """Attention computed by one layer."""

    index: int
    """Number of attention computations before this one."""
    name: str
    """Path of the module that computes attention, as in ``named_modules()``."""
    module: nn.Module
    problem: Problem
    """Queries, keys, prior, masks and scales."""


@contextmanager
def observed_attention(model: PreTrainedModel, see: Callable[[LayerAttention], None]) -> Iterator[None]:
    """Return a context in which ``see`` is called with the attention of each layer that the model computes.

    Args:
        model: a model of this package, BLOOM, MPT, T5, or a model that :func:`attach` supports. It may have attached
            priors.
        see: callback, called in the order of layers, before each layer's attention is computed.

    Raises:
        ValueError: the model's attention cannot be observed. The message says why.
    """
    running: list[tuple[str, nn.Module]] = []
    count = 0

    def enter(name: str) -> Callable[..., None]:
        return lambda module, args: running.append((name, module))

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        running.pop()

    def notice(problem: Problem) -> None:
        nonlocal count
        name, module = running[-1] if running else ("", model)
        see(LayerAttention(count, name, module, problem))
        count += 1

    with through_attend(model), observed(notice):
        hooks = []
        for name, module in model.named_modules():
            hooks.append(module.register_forward_pre_hook(enter(name)))
            hooks.append(module.register_forward_hook(leave, always_call=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


@contextmanager
def through_attend(model: PreTrainedModel) -> Iterator[None]:
    """Return a context in which all of a model's attention is computed by :func:`attend`, with unchanged outputs.

    Models of this package and models with attached priors use :func:`attend` already. BLOOM, MPT and T5 are converted
    by :func:`use_priors`. Any other model gets a uniform prior, which changes nothing.

    Args:
        model: a model of this package or of transformers.

    Raises:
        ValueError: :func:`attend` cannot compute the model's attention. The message says why.
    """
    modules = [*model.modules()]
    with ExitStack() as undo:
        if hasattr(model, STATE):
            # Layers without an attachment use SDPA; an empty attachment makes them use attend().
            for module in attention_layers(model).values():
                if not hasattr(module, ATTRIBUTE):
                    setattr(module, ATTRIBUTE, AttachedPrior(None, None))
                    undo.callback(nn.Module.__delattr__, module, ATTRIBUTE)
        elif not uses_priors(model) and has_own_bias(model):
            use_priors(model)
            undo.callback(restore_attention, model)
        elif not uses_priors(model) and not any(isinstance(module, PriorPreTrainedModel) for module in modules):
            attach(model, "uniform")
            undo.callback(detach, model)
        yield
