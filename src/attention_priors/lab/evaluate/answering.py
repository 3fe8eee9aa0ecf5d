"""What a model answers to a prompt: its continuation, greedy or drawn, after a prefill in chunks over a KV cache."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from attention_priors.lab.evaluate.prefill import chunked_logits


@torch.no_grad()
def forced_predictions(
    model: PreTrainedModel,
    prompts: Tensor,
    answers: Tensor,
    *,
    chunk: int,
    on_tokens: Callable[[int], None] = lambda count: None,
) -> Tensor:
    """The likeliest token at each place of the answers, each with the true ones before it, ``(B, A)``.

    Greedy decoding gives exactly the answer if and only if all of these are right; and one pass is enough to know.

    Args:
        model: a causal language model in evaluation mode.
        prompts: ``(B, L)``, without padding.
        answers: ``(B, A)``.
        chunk: tokens per forward pass.
        on_tokens: called with the number of tokens that each text has been read up to.

    Raises:
        ValueError: the model gives logits that are not finite, as where half precision overflows.
    """
    tokens = torch.cat([prompts, answers[:, :-1]], dim=1)
    parts = chunked_logits(model, tokens, chunk=chunk, keep=answers.shape[1], on_tokens=on_tokens)
    return torch.cat([_most_likely(model, logits) for logits in parts], dim=1).cpu()


def _most_likely(model: PreTrainedModel, logits: Tensor) -> Tensor:
    """The most likely tokens; what is not finite has none."""
    highest, tokens = logits.max(-1)
    if not bool(highest.isfinite().all()):
        raise _not_finite(model, logits[~highest.isfinite()])
    return tokens


def _not_finite(model: PreTrainedModel, logits: Tensor) -> ValueError:
    return ValueError(
        f"model {type(model).__name__} must give finite logits; in {model.dtype} it gives "
        f"{logits.flatten()[:4].tolist()}"
    )


@torch.no_grad()
def greedy(
    model: PreTrainedModel,
    prompts: Tensor,
    new_tokens: int,
    *,
    chunk: int,
    stop: Collection[int] = (),
    on_tokens: Callable[[int], None] = lambda count: None,
) -> list[list[int]]:
    """The greedy continuation of each prompt.

    Args:
        model: a causal language model in evaluation mode.
        prompts: ``(B, L)``, without padding.
        new_tokens: how many at most.
        chunk: tokens per forward pass.
        stop: tokens that end a text; they are not returned.
        on_tokens: called with the number of tokens that each text has been read up to.

    Raises:
        ValueError: the model gives logits that are not finite, as where half precision overflows.
    """
    return _continued(
        model,
        prompts,
        new_tokens,
        lambda logits: _most_likely(model, logits),
        chunk=chunk,
        stop=stop,
        on_tokens=on_tokens,
    )


@torch.no_grad()
def sampled(
    model: PreTrainedModel,
    prompts: Tensor,
    new_tokens: int,
    generators: Sequence[torch.Generator],
    *,
    among: Sequence[int],
    chunk: int,
    on_tokens: Callable[[int], None] = lambda count: None,
) -> list[list[int]]:
    """A continuation of each prompt, drawn token by token from the model's probabilities of some tokens.

    Args:
        model: a causal language model in evaluation mode.
        prompts: ``(B, L)``, without padding.
        new_tokens: how many.
        generators: one for each prompt, on the CPU; each continuation depends on its own alone.
        among: the tokens.
        chunk: tokens per forward pass.
        on_tokens: called with the number of tokens that each text has been read up to.

    Raises:
        ValueError: the model gives logits that are not finite, as where half precision overflows.
    """
    tokens = torch.tensor(among)

    def draw(logits: Tensor) -> Tensor:
        chances = logits[:, tokens.to(logits.device)].double().softmax(-1).cpu()
        if not bool(chances.isfinite().all()):
            raise _not_finite(model, logits[:, tokens.to(logits.device)])
        places = [torch.multinomial(row, 1, generator=own) for row, own in zip(chances, generators, strict=True)]
        return tokens[torch.cat(places)].to(logits.device)

    return _continued(model, prompts, new_tokens, draw, chunk=chunk, stop=(), on_tokens=on_tokens)


def _continued(
    model: PreTrainedModel,
    prompts: Tensor,
    new_tokens: int,
    choose: Callable[[Tensor], Tensor],
    *,
    chunk: int,
    stop: Collection[int],
    on_tokens: Callable[[int], None],
) -> list[list[int]]:
    """Continuations whose next tokens, ``(B,)``, are chosen by their logits, ``(B, V)``."""
    cache = DynamicCache(config=model.config)
    logits: Any = None
    for logits in chunked_logits(model, prompts, chunk=chunk, keep=1, cache=cache, on_tokens=on_tokens):  # noqa: B007
        pass
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
