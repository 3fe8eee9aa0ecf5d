"""Attention of each head on the pass key when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from attention_priors.attention.reference import reference
from attention_priors.hf.observe import LayerAttention, observed_attention
from attention_priors.lab.tasks.generation import chunked_logits
from attention_priors.lab.tasks.passkey import PasskeyRetrieval
from attention_priors.lab.tasks.task import OnShare, Record, Unit, tokens_as_share


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


class PasskeyWeight(PasskeyRetrieval):
    """Measure the attention that the question's last token gives to the pass key, of every head."""

    stops_after_zeros = False

    def tokens_read(self, length: int) -> int:
        """Return the tokens of the prompt: no answer is read."""
        return length

    def check(self) -> None:
        """Raise a ValueError if the task cannot be measured, or the model's attention cannot be observed."""
        super().check()
        with observed_attention(self.subject.model, lambda layer: None):
            pass

    def groups(self, length: int) -> Iterator[Sequence[Unit]]:
        """Yield each text alone."""
        for group in super().groups(length):
            yield from ([unit] for unit in group)

    def ask(self, length: int, units: Sequence[Unit], on_share: OnShare) -> list[Record]:
        """Return the weights of all heads, a list for each layer."""
        ((unit,), (question,)) = units, self.questions(length, units)
        assert question.needle is not None
        weights = needle_weights(
            self.subject.model,
            question.prompt,
            question.needle,
            chunk=self.setting.chunk,
            on_tokens=tokens_as_share(on_share, length),
        )
        return [self.place(unit, question) | {"weights": [[round(weight, 7) for weight in layer] for layer in weights]}]
