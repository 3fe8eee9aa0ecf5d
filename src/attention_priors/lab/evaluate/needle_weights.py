"""How much of each head's attention goes to what is asked for."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from attention_priors.attention.reference import reference
from attention_priors.hf.observe import LayerAttention, observed_attention
from attention_priors.lab.evaluate.prefill import chunked_logits


@torch.no_grad()
def needle_weights(
    model: PreTrainedModel,
    prompt: Tensor,
    needle: tuple[int, int],
    *,
    chunk: int,
    on_tokens: Callable[[int], None] = lambda count: None,
) -> list[list[float]]:
    """The attention weight that the last token of a prompt gives to a part of it, ``Σ_{j in needle} p_Lj``.

    Args:
        model: a causal language model in evaluation mode; any that :func:`observed_attention` sees.
        prompt: ``(L,)``, at least two tokens.
        needle: its first token, and the one after its last.
        chunk: tokens per forward pass.
        on_tokens: called with the number of tokens that the prompt has been read up to.

    Returns:
        One number for each head of each layer, from 0 to 1.
    """
    cache = DynamicCache(config=model.config)
    for _ in chunked_logits(model, prompt[None, :-1], chunk=chunk, keep=1, cache=cache, on_tokens=on_tokens):
        pass
    weights: list[list[float]] = []

    def see(layer: LayerAttention) -> None:
        of_keys = reference(layer.problem)[2][0, :, -1]
        # Where a window has let keys go, the last ones are there.
        gone = len(prompt) - of_keys.shape[-1]
        weights.append(of_keys[:, max(0, needle[0] - gone) : max(0, needle[1] - gone)].sum(-1).tolist())

    with observed_attention(model, see):
        model(prompt[None, -1:].to(model.device), past_key_values=cache, use_cache=True)
    on_tokens(len(prompt))
    return weights
