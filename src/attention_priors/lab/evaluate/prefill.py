"""Reading a long text in chunks over a KV cache, so that memory is the cache and one chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from attention_priors.hf.loading import check_chunk, has_growing_frequencies


@torch.no_grad()
def chunked_logits(
    model: PreTrainedModel,
    tokens: Tensor,
    *,
    chunk: int,
    keep: int,
    cache: DynamicCache | None = None,
    on_tokens: Callable[[int], None] = lambda count: None,
) -> Iterator[Tensor]:
    """Logits of the last ``keep`` places of each text, chunk by chunk.

    Args:
        model: a causal language model of transformers, in evaluation mode.
        tokens: ``(B, L)``, all of one length.
        chunk: tokens per forward pass.
        keep: how many of the last places get logits; the others only fill the cache.
        cache: an empty one to fill; its own by default.
        on_tokens: called with the number of tokens that each text has been read up to.

    Yields:
        ``(B, n, vocabulary)``; the ``n`` sum to ``min(keep, L)``.

    Raises:
        ValueError: before any is read, if the model must read a text of this length in one pass.
    """
    length = tokens.shape[1]
    check_chunk(model, length, chunk)
    if has_growing_frequencies(model):
        model(tokens[:, :1].to(model.device), use_cache=False)  # what was read before must not matter
    cache = DynamicCache(config=model.config) if cache is None else cache
    first_kept = max(0, length - keep)
    start = 0
    while start < length:
        # A chunk lies wholly before the kept places or wholly within them.
        stop = min(start + chunk, first_kept if start < first_kept else length)
        part = tokens[:, start:stop].to(model.device)
        kept = start >= first_kept
        out = model(part, past_key_values=cache, use_cache=True, logits_to_keep=0 if kept else 1)
        on_tokens(stop)
        if kept:
            yield out.logits
        start = stop
