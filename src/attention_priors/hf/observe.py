"""The attention of every layer while a model reads, with the name of the module that it belongs to."""

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
    """The attention that one layer computes."""

    index: int
    """How many others have been computed before it."""
    name: str
    """The path of the module that computes it, as in ``named_modules()``."""
    module: nn.Module
    problem: Problem
    """Queries, keys, prior, masks and scales."""


@contextmanager
def observed_attention(model: PreTrainedModel, see: Callable[[LayerAttention], None]) -> Iterator[None]:
    """Within this block, call ``see`` with the attention of each layer that the model computes.

    Args:
        model: of ours, with something attached, BLOOM, MPT, T5, or whatever :func:`attach` takes.
        see: called in the order of the layers, before each one's attention is computed.

    Raises:
        ValueError: the model's attention cannot be seen; it says why.
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
    """Within this block all of a model's attention goes through :func:`attend`: same weights, same outputs.

    Ours and attached ones do so anyway. BLOOM, MPT and T5 do by :func:`use_priors`; for any other, every layer gets a
    uniform prior, which changes nothing.

    Args:
        model: of ours, or of transformers.

    Raises:
        ValueError: its attention cannot be computed so; it says why.
    """
    modules = [*model.modules()]
    with ExitStack() as undo:
        if hasattr(model, STATE):
            # Layers that have nothing attached are computed by SDPA, unless they have an empty attachment.
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
