"""Reading of a text in chunks over a KV cache, and continuation of a text: greedy, or drawn."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

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


@torch.no_grad()
def forced_predictions(
    model: PreTrainedModel,
    prompts: Tensor,
    answers: Tensor,
    *,
    chunk: int,
    on_tokens: Callable[[int], None] = lambda count: None,
) -> Tensor:
    """Return the likeliest token at each place of the answers, after the true ones before it, ``(B, A)``.

    Greedy decoding gives exactly the answer if and only if all of these are right; and one pass is enough to know.

    Args:
        model: Causal language model in evaluation mode.
        prompts: ``(B, L)``, without padding.
        answers: ``(B, A)``.
        chunk: Tokens per forward pass.
        on_tokens: Called with the number of tokens that each text has been read up to.

    Raises:
        ValueError: The model gives logits that are not finite, as where half precision overflows.
    """
    tokens = torch.cat([prompts, answers[:, :-1]], dim=1)
    parts = chunked_logits(model, tokens, chunk=chunk, keep=answers.shape[1], on_tokens=on_tokens)
    return torch.cat([likeliest(logits) for logits in parts], dim=1).cpu()


def likeliest(logits: Tensor) -> Tensor:
    """Return the token with the highest logit, ``(...)`` of logits ``(..., V)``.

    Raises:
        ValueError: The highest logit is not finite.
    """
    highest, tokens = logits.max(-1)
    _check_finite(highest, logits.dtype)
    return tokens


def draw_among(candidates: Sequence[int], generators: Sequence[torch.Generator]) -> Callable[[Tensor], Tensor]:
    """Return a function that draws one of some tokens for each text, at temperature 1.

    Args:
        candidates: Token ids.
        generators: One for each text, on the CPU; each text depends on its own generator alone.

    Returns:
        Function of logits ``(B, V)`` that gives token ids ``(B,)``. It raises a ValueError where the candidates' logits
        give no probabilities: one is infinite or NaN, or all are −∞.
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
    on_tokens: Callable[[int], None] = lambda count: None,
) -> list[list[int]]:
    """Return a continuation of each prompt, by default the greedy one.

    Args:
        model: Causal language model in evaluation mode.
        prompts: ``(B, L)``, without padding.
        new_tokens: Largest number of tokens of a continuation.
        choose: Function of logits ``(B, V)`` that gives the next token of each text, ``(B,)``.
        chunk: Tokens per forward pass.
        stop: Tokens that end a text; they are not returned.
        on_tokens: Called with the number of tokens that each text has been read up to.

    Raises:
        ValueError: The model gives logits that are not finite, as where half precision overflows.
    """
    cache = DynamicCache(config=model.config)
    (logits,) = chunked_logits(model, prompts, chunk=chunk, keep=1, cache=cache, on_tokens=on_tokens)
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
        logits = model(chosen[:, None], past_key_values=cache, use_cache=True).logits
    return texts
