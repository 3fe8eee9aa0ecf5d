"""Loss in the copy-mixture task, by what each token copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypedDict

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from attention_priors.lab.data import COPY_KINDS, CopyMixture, CopySample
from attention_priors.lab.evaluate.prefill import chunked_logits

TOKENS_AT_A_TIME = 16384
"""As many rows are read together as hold so many tokens."""


class CopyingRow(TypedDict):
    """Mean losses of the tokens of one kind in rows of one length, in nats per token."""

    length: int
    kind: str
    """One of :data:`COPY_KINDS`, or ``all``."""
    nll: float
    """The model's."""
    optimal_nll: float
    """The true distribution's, of the same tokens; the difference of the two varies far less than either."""
    expected_nll: float
    """What the true distribution's tends to (:meth:`CopyMixture.optimal_losses`)."""
    tokens: int


def copying_rows(
    model: PreTrainedModel,
    task: CopyMixture,
    samples: Sequence[CopySample],
    *,
    chunk: int,
    on_rows: Callable[[int], None] = lambda count: None,
) -> list[CopyingRow]:
    """The loss of every kind of token, and of all, in rows of one length.

    The first token of a row has no loss. A kind that no token has is left out.

    Args:
        model: a causal language model in evaluation mode.
        task: what the rows were drawn from.
        samples: the rows.
        chunk: tokens of a row per forward pass.
        on_rows: called with the number of rows done.

    Raises:
        ValueError: there are no rows, or they differ in length.
    """
    lengths = {len(sample.tokens) for sample in samples}
    if len(lengths) != 1:
        raise ValueError(f"samples must be rows of one length, got the lengths {sorted(lengths)}")
    (length,) = lengths
    together = max(1, TOKENS_AT_A_TIME // length)
    sums = torch.zeros(len(COPY_KINDS), 3, dtype=torch.float64)  # the model's losses, the optimum's, tokens
    for start in range(0, len(samples), together):
        part = samples[start : start + together]
        tokens = torch.stack([sample.tokens for sample in part])
        kinds = torch.stack([sample.kinds for sample in part])[:, 1:].flatten()
        losses = _losses(model, tokens, chunk)
        values = torch.stack([losses, task.optimal_token_losses(tokens), torch.ones_like(losses)], -1)
        sums.index_add_(0, kinds, values.flatten(0, 1))
        on_rows(start + len(part))
    expected = task.optimal_losses(length)
    rows: list[CopyingRow] = []
    for kind, (loss, optimal, count) in zip(
        (*COPY_KINDS, "all"), torch.cat([sums, sums.sum(0, keepdim=True)]).tolist(), strict=True
    ):
        if count:
            rows.append(
                {
                    "length": length,
                    "kind": kind,
                    "nll": loss / count,
                    "optimal_nll": optimal / count,
                    "expected_nll": expected[kind],
                    "tokens": int(count),
                }
            )
    return rows


def _losses(model: PreTrainedModel, tokens: Tensor, chunk: int) -> Tensor:
    """Of each token but the first, ``(B, L - 1)`` in float64."""
    places = tokens.shape[1] - 1
    parts = []
    start = 0
    for logits in chunked_logits(model, tokens[:, :-1], chunk=chunk, keep=places):
        stop = start + logits.shape[1]
        targets = tokens[:, start + 1 : stop + 1].to(logits.device)
        parts.append(cross_entropy(logits.float().transpose(1, 2), targets, reduction="none").double().cpu())
        start = stop
    return torch.cat(parts, 1)
