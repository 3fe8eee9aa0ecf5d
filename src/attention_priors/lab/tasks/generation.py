"""Chunked reading of texts with a KV cache, and greedy or sampled continuation."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import DynamicCache, PreTrainedModel

from attention_priors.hf.loading import check_chunk, has_growing_frequencies


@torch.no_grad()
def chunked_logits(
    model: PreTrainedModel, tokens: Tensor, *, chunk: int, keep: int, cache: DynamicCache | None = None
) -> Iterator[Tensor]:
    """Yield the logits of the last ``keep`` positions of each text, chunk by chunk.

    Args:
        model: causal language model of transformers, in evaluation mode.
        tokens: ``(B, L)``. All texts have the same length.
        chunk: tokens per forward pass.
        keep: number of last positions with logits. Other positions only fill the cache.
        cache: empty cache to fill; by default a new cache.

    Yields:
        Logits ``(B, n, vocabulary)``; the ``n`` sum to ``min(keep, L)``.

    Raises:
        ValueError: the model must read a text of this length in one pass; raised before reading.
    """
    length = tokens.shape[1]
    check_chunk(model, length, chunk)
    if has_growing_frequencies(model):
        model(tokens[:, :1].to(model.device), use_cache=False)  # resets frequencies that earlier texts changed
    cache = DynamicCache(config=model.config) if cache is None else cache
    first_kept = max(0, length - keep)
    start = 0
    while start < length:
        # A chunk lies entirely before or entirely within the kept positions.
        stop = min(start + chunk, first_kept if start < first_kept else length)
        part = tokens[:, start:stop].to(model.device)
        kept = start >= first_kept
        out = model(part, cache=cache, use_cache=True, logits_to_keep=0 if kept else 1)
        if kept:
            yield out.logits
        start = stop


def token_losses(model: PreTrainedModel, tokens: Tensor, *, chunk: int) -> Tensor:
    """Return the negative log-likelihood of each token but the first, in nats, float64 ``(B, L - 1)``.

    Args:
        model: causal language model in evaluation mode.
        tokens: ``(B, L)``, at least two tokens. All texts have the same length.
        chunk: tokens per forward pass.
    """
    chunks = chunked_logits(model, tokens[:, :-1], chunk=chunk, keep=tokens.shape[1])
    losses = []
    for logits, targets in zip(chunks, tokens[:, 1:].split(chunk, 1), strict=True):
        flat = logits.flatten(0, 1).float(), targets.flatten().to(logits.device)
        losses.append(cross_entropy(*flat, reduction="none").view(targets.shape).double().cpu())
    return torch.cat(losses, 1)


@torch.no_grad()
def forced_predictions(
    model: PreTrainedModel, prompts: Tensor, answers: Tensor, *, chunk: int
) -> tuple[Tensor, Tensor]:
    """Predict each token of the answers, given the true answer tokens before it.

    Greedy decoding gives exactly the answer if and only if all predictions are right, so one pass is enough.

    Args:
        model: causal language model in evaluation mode.
        prompts: ``(B, L)``. Prompts have no padding.
        answers: ``(B, A)``.
        chunk: Tokens per forward pass.

    Returns:
        The likeliest tokens ``(B, A)``, and the margins ``(B, A)``: the logit of the true token minus the largest logit
        of another token.

    Raises:
        ValueError: the model gives logits that are not finite, for example because half precision overflows.
    """
    tokens = torch.cat([prompts, answers[:, :-1]], dim=1)
    parts = chunked_logits(model, tokens, chunk=chunk, keep=answers.shape[1])
    logits = torch.cat([*parts], dim=1)
    true = answers[..., None].to(logits.device)
    margins = logits.gather(-1, true) - logits.scatter(-1, true, -math.inf).amax(-1, keepdim=True)
    return likeliest(logits).cpu(), margins[..., 0].float().cpu()


def likeliest(logits: Tensor) -> Tensor:
    """Return the token with the highest logit, shape ``(...)`` for logits ``(..., V)``.

    Raises:
        ValueError: the highest logit is not finite.
    """
    highest, tokens = logits.max(-1)
    _check_finite(highest, logits.dtype)
    return tokens


def draw_among(candidates: Sequence[int], generators: Sequence[torch.Generator]) -> Callable[[Tensor], Tensor]:
    """Return a function that draws the next token of each text from some candidates, at temperature 1.

    Args:
        candidates: Token ids.
        generators: One generator per text, on the CPU. Each text depends on its own generator alone.

    Returns:
        Function from logits ``(B, V)`` to token ids ``(B,)``. It raises a ValueError if the candidates' logits give no
        probabilities: one is infinite or NaN, or all are −∞.
    """

    def draw(logits: Tensor) -> Tensor:
        tokens = torch.tensor(candidates, device=logits.device)
        _check_finite(logits[:, tokens].float().logsumexp(-1), logits.dtype)
        shares = logits[:, tokens].double().softmax(-1).cpu()
        places = [torch.multinomial(row, 1, generator=own) for row, own in zip(shares, generators, strict=True)]
        return tokens[torch.cat(places).to(logits.device)]

    return draw


def _check_finite(logits: Tensor, dtype: torch.dtype) -> None:
    wrong = logits[~logits.isfinite()]
    if wrong.numel():
        raise ValueError(f"the model must give finite logits; in {dtype} it gives {wrong[:4].tolist()}")


@torch.no_grad()
def continue_texts(
    model: PreTrainedModel,
    prompts: Tensor,
    new_tokens: int,
    choose: Callable[[Tensor], Tensor] = likeliest,
    *,
    chunk: int,
    stop: Collection[int] = (),
) -> list[list[int]]:
    """Return a continuation of each prompt, by default the greedy one.

    Args:
        model: causal language model in evaluation mode.
        prompts: ``(B, L)``. Prompts have no padding.
        new_tokens: Largest number of tokens of a continuation.
        choose: Function that picks the next tokens. Maps logits ``(B, V)`` to token ids ``(B,)``.
        chunk: Tokens per forward pass.
        stop: End tokens. Not part of the continuations.

    Raises:
        ValueError: the model gives logits that are not finite, for example because half precision overflows.
    """
    cache = DynamicCache(config=model.config)
    (logits,) = chunked_logits(model, prompts, chunk=chunk, keep=1, cache=cache)
    texts: list[list[int]] = [[] for _ in prompts]
    ended = [False] * len(prompts)
    for step in range(new_tokens):
        chosen = choose(logits[:, -1])
        for index, token in enumerate(chosen.tolist()):
            ended[index] = ended[index] or token in stop
            if not ended[index]:
                texts[index].append(token)
        if all(ended) or step + 1 == new_tokens:
            break
        logits = model(chosen[:, None], cache=cache, use_cache=True).logits
    return texts
