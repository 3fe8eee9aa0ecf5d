"""Checks of what models are called with."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

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
