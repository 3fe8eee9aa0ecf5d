"""Negative log-likelihood against position."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypedDict

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from attention_priors.evaluation.prefill import chunked_logits


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
        start = 0
        for logits in chunked_logits(model, text[None, :-1], chunk=chunk, keep=length - 1):
            stop = start + logits.shape[1]
            targets = text[start + 1 : stop + 1].to(logits.device)
            total[start:stop] += cross_entropy(logits[0].float(), targets, reduction="none").double().cpu()
            start = stop
        on_text(count)
    rows: list[PerplexityRow] = []
    for first, last in position_bins(length):
        # Entry p - 1 is the loss of the token at position p.
        size = (last - first + 1) * len(texts)
        nll = float(total[first - 1 : last].sum()) / size
        rows.append({"position": math.sqrt(first * last), "nll": nll, "tokens": size})
    return rows
