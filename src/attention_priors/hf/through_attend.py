"""A model of any kind, computing its attention by :func:`attend` for a while: there it can be seen."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch import nn
from transformers import PreTrainedModel

from attention_priors.hf import alibi
from attention_priors.hf.attach import STATE, attach, attention_layers, detach
from attention_priors.hf.interface import ATTRIBUTE, AttachedPrior
from attention_priors.hf.use_priors import T5_STACKS, restore_attention, use_priors, uses_priors
from attention_priors.models.pretrained import PriorPreTrainedModel


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
            _include_the_rest(model, undo)
        elif {type(module) for module in modules} & {*alibi.ATTENTION, *T5_STACKS}:
            use_priors(model)
            undo.callback(restore_attention, model)
        elif not uses_priors(model) and not any(isinstance(module, PriorPreTrainedModel) for module in modules):
            attach(model, "uniform")
            undo.callback(detach, model)
        yield


def _include_the_rest(model: PreTrainedModel, undo: ExitStack) -> None:
    """Layers that have nothing attached are computed by SDPA, unless they have an empty attachment."""
    for module in attention_layers(model).values():
        if not hasattr(module, ATTRIBUTE):
            setattr(module, ATTRIBUTE, AttachedPrior(None, None))
            undo.callback(nn.Module.__delattr__, module, ATTRIBUTE)
