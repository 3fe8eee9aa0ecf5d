"""The attention of every layer while a model reads, with the name of the module that it belongs to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from attention_priors.attention.observe import observed
from attention_priors.attention.problem import Problem
from attention_priors.hf.through_attend import through_attend


@dataclass(frozen=True)
class LayerAttention:
    """What one layer asks of attention."""

    index: int
    """How many others have been computed before it."""
    name: str
    """The path of the module that computes it, as in ``named_modules()``."""
    module: nn.Module
    problem: Problem
    """Queries, keys, prior, masks and scales."""


@contextmanager
def observed_attention(model: PreTrainedModel, see: Callable[[LayerAttention], None]) -> Iterator[None]:
    """Within this block, ``see`` is told the attention of each layer that the model computes.

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
