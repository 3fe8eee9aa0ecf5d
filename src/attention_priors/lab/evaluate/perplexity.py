"""Negative log-likelihood against position."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypedDict

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from attention_priors.lab.evaluate.prefill import chunked_logits


class PerplexityRow(TypedDict):
    """Mean negative log-likelihood of the tokens in one range of positions."""

    position: float
    """Geometric middle of the range, in tokens."""
    nll: float
    """In nats per token."""
    tokens: int
    """How many tokens the mean is over."""


def position_bins(length: int) -> list[tuple[int, int]]:
    """Ranges ``first..last`` of positions that grow by a factor of two: 1-1, 2-3, 4-7, ... up to ``length - 1``.

    Position 0 has nothing before it and is left out.
    """
    return [(2**k, min(2 ** (k + 1), length) - 1) for k in range((length - 1).bit_length()) if 2**k < length]


def token_losses(
    model: PreTrainedModel, tokens: Tensor, *, chunk: int, on_tokens: Callable[[int], None] = lambda count: None
) -> Tensor:
    """The negative log-likelihood of each token but the first, in nats, float64 ``(L - 1,)``.

    Args:
        model: a causal language model in evaluation mode.
        tokens: of one text, ``(L,)``.
        chunk: tokens per forward pass.
        on_tokens: called with the number of tokens read.
    """
    losses = torch.zeros(len(tokens) - 1, dtype=torch.float64)
    start = 0
    for logits in chunked_logits(model, tokens[None, :-1], chunk=chunk, keep=len(tokens) - 1, on_tokens=on_tokens):
        stop = start + logits.shape[1]
        targets = tokens[start + 1 : stop + 1].to(logits.device)
        losses[start:stop] = cross_entropy(logits[0].float(), targets, reduction="none").double().cpu()
        start = stop
    return losses


def binned(losses: Tensor) -> list[tuple[int, int, float]]:
    """The first and last position of each range (:func:`position_bins`), and the sum of the losses in it.

    Args:
        losses: of the tokens at positions 1, 2, 3, ..., ``(L - 1,)``.
    """
    bins = position_bins(len(losses) + 1)
    return [(first, last, float(losses[first - 1 : last].sum())) for first, last in bins]


def perplexity_rows(
    model: PreTrainedModel,
    texts: Sequence[Tensor],
    *,
    chunk: int,
    on_text: Callable[[int], None] = lambda count: None,
) -> list[PerplexityRow]:
    """Mean negative log-likelihood per range of positions.

    Args:
        model: a causal language model in evaluation mode.
        texts: tokens of each text, ``(L,)``, all of one length.
        chunk: tokens per forward pass.
        on_text: called with the number of texts done.
    """
    if not texts:
        raise ValueError("texts must hold at least one text, got none")
    length = len(texts[0])
    total = torch.zeros(length - 1, dtype=torch.float64)
    for count, text in enumerate(texts, start=1):
        total += token_losses(model, text, chunk=chunk)
        on_text(count)
    rows: list[PerplexityRow] = []
    for first, last, loss in binned(total):
        size = (last - first + 1) * len(texts)
        rows.append({"position": math.sqrt(first * last), "nll": loss / size, "tokens": size})
    return rows
