"""Packed rows in any causal language model: several documents in a row that do not see each other."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from attention_priors.attention.geometry import positions_in_documents


def packed_inputs(model: nn.Module, input_ids: Tensor, document_ids: Tensor) -> dict[str, Any]:
    """What a model is called with for a packed row.

    Our models take ``document_ids``. Others take ``position_ids`` that start again at 0 with each document, which
    transformers' masks read as packing where there is no cache.

    Args:
        model: a causal language model, not wrapped.
        input_ids: ``(B, L)``.
        document_ids: ``(B, L)``.

    Raises:
        ValueError: the model takes neither.
    """
    takes = inspect.signature(model.forward).parameters
    inputs = {"input_ids": input_ids, "use_cache": False}
    if "document_ids" in takes:
        return inputs | {"document_ids": document_ids}
    if "position_ids" in takes:
        return inputs | {"position_ids": positions_in_documents(document_ids)}
    raise ValueError(
        f"{type(model).__name__} takes neither document_ids nor position_ids: packed documents cannot be kept apart"
    )


@torch.no_grad()
def check_documents_apart(model: nn.Module) -> None:
    """Make sure that a packed document does not see the one before it.

    Raises:
        ValueError: it does, in this model.
    """
    device = next(model.parameters()).device
    document_ids = torch.tensor([[0] * 4 + [1] * 4], device=device)
    # The first documents differ in any vocabulary of two tokens at least.
    size = getattr(getattr(model, "config", None), "vocab_size", 9)
    first = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8]], device=device) % size
    second = torch.tensor([[4, 1, 1, 2, 5, 6, 7, 8]], device=device) % size
    was_training = model.training
    model.eval()
    one, other = (model(**packed_inputs(model, ids, document_ids)).logits[:, 4:].float() for ids in (first, second))
    model.train(was_training)
    if float((one - other).abs().max()) > 1e-5 * float(one.abs().max()):
        attention = getattr(getattr(model, "config", None), "_attn_implementation", "unknown")
        raise ValueError(
            f"{type(model).__name__} with attention implementation {attention!r} lets a packed document see the one "
            "before it: it cannot be trained on packed rows"
        )
