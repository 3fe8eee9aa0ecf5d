"""GOAT's copy-mixture task: each token copies the first token, copies an earlier token, or is noise."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from pydantic import Field, model_validator
from torch import Tensor
from transformers import PreTrainedModel

from attention_priors.lab.data.packing import Rows, packed_row, row_seed
from attention_priors.lab.strict_yaml import Strict
from attention_priors.lab.tasks.generation import token_losses
from attention_priors.lab.tasks.task import Record, Setting, Task, Unit

HELD_OUT_SEED = -1
"""Seed of test rows, which no training uses."""

COPY_KINDS = ("first", "previous", "noise")
"""Kinds of tokens, in the order of their numbers in :attr:`CopySample.kinds`."""

_FIRST, _PREVIOUS, _NOISE = range(3)


class CopySample(NamedTuple):
    """Row of the task."""

    tokens: Tensor
    """Token ids, int64 ``(L,)``."""
    kinds: Tensor
    """Kind of each token as an index into :data:`COPY_KINDS`, int64 ``(L,)``. The first token is noise."""


class CopyMixture(Strict):
    """Independent mixture of three kinds of tokens: copy of the first, copy of the token ``lag`` before, uniform noise.

    ``P(x_i = v | x_<i) = first · 1[v = x_0] + previous · 1[v = x_{i - lag}] + noise / V``. Before position ``lag``, the
    first token takes the place of ``x_{i - lag}``. The query that predicts ``x_i`` is at position ``i - 1``. It must
    look only at key 0 and at distance ``lag - 1``.

    Source: GOAT, Figure 1 and section 6 ("Ablating the prior"): tokens copy "the previous token", and "the optimal
    strategy is to attend to" ``j = 0`` or ``j = i - 1``. Both statements hold if "previous" is relative to the query,
    which is ``lag = 2``, the default. With ``lag = 1``, a token copies the query's own token, which needs no attention.
    The paper states neither the shares nor the sizes; the defaults here are equal shares and 64 tokens.
    """

    vocabulary_size: int = Field(default=64, ge=2)
    """Number of different tokens, ``V``."""
    first: float = Field(default=1 / 3, ge=0, lt=1)
    """Share of tokens that copy the first token."""
    previous: float = Field(default=1 / 3, ge=0, lt=1)
    """Share of tokens that copy the token ``lag`` before. The rest is noise. It must be above 0, because without noise
    every token equals the first."""
    lag: int = Field(default=2, ge=1)
    """Distance of the copied token."""

    @model_validator(mode="after")
    def _leaves_room_for_noise(self) -> CopyMixture:
        if self.first + self.previous >= 1:
            raise ValueError(
                f"first and previous must sum to less than 1, to leave room for noise; they are {self.first} and "
                f"{self.previous}"
            )
        return self

    @property
    def shares(self) -> dict[str, float]:
        """Share of each of :data:`COPY_KINDS`."""
        return {"first": self.first, "previous": self.previous, "noise": 1 - self.first - self.previous}

    def sample(self, length: int, generator: torch.Generator) -> CopySample:
        """Draw a row.

        Args:
            length: Number of tokens, at least 1.
            generator: Random number generator.
        """
        draws = torch.rand(length, generator=generator, dtype=torch.float64)
        kinds = (draws >= self.first).long() + (draws >= self.first + self.previous).long()
        kinds[0] = _NOISE
        tokens = torch.randint(self.vocabulary_size, (length,), generator=generator)
        tokens[kinds == _FIRST] = tokens[0].clone()
        # A chain of copies, spaced by lag, ends at a token that is not a copy, or at the first token.
        origins = torch.where(kinds == _PREVIOUS, 0, torch.arange(length))
        chains = torch.nn.functional.pad(origins, (0, -length % self.lag)).view(-1, self.lag)
        return CopySample(tokens[chains.cummax(0).values.flatten()[:length]], kinds)

    def optimal_token_losses(self, tokens: Tensor) -> Tensor:
        """Return the negative log-likelihood of each token but the first under the true distribution, in nats.

        Args:
            tokens: ``(..., L)``.

        Returns:
            float64, ``(..., L - 1)``. No model has a lower expected loss.
        """
        target = tokens[..., 1:]
        previous = tokens[..., (torch.arange(1, tokens.shape[-1]) - self.lag).clamp(min=0)]
        likelihood = torch.full(target.shape, self.shares["noise"] / self.vocabulary_size, dtype=torch.float64)
        likelihood = likelihood + self.first * (target == tokens[..., :1]) + self.previous * (target == previous)
        return -likelihood.log()

    def optimal_losses(self, length: int) -> dict[str, float]:
        """Return the expected loss of the best predictor per token of each kind, in nats, in closed form.

        The predictor knows the shares, but not the kind of a token. The loss of a token depends on whether the token
        ``lag`` before equals the first. ``e_i = P(x_i = x_0)`` is 1 up to position 0. Then
        ``e_i = first + previous · e_{i - lag} + noise / V``, so ``e_i = e + (1 - e) · previous^⌈i / lag⌉`` with
        ``e = (first + noise / V) / (1 - previous)``.

        Args:
            length: Length of a row in tokens, at least 2. The mean excludes the first token.

        Returns:
            Losses by kind, and under ``all`` their mean weighted by the shares.

        Raises:
            ValueError: ``length`` is below 2.
        """
        if length < 2:
            raise ValueError(f"length must be at least 2 tokens; it is {length}")
        size, shares = self.vocabulary_size, self.shares
        limit = (self.first + shares["noise"] / size) / (1 - self.previous)
        powers = [self.previous ** math.ceil(max(place - self.lag, 0) / self.lag) for place in range(1, length)]
        equal = limit + (1 - limit) * sum(powers) / len(powers)

        rare = shares["noise"] / size

        def loss(likelihood: float) -> float:
            return -math.log(likelihood)

        both = loss(self.first + self.previous + rare)
        alone = {"first": loss(self.first + rare), "previous": loss(self.previous + rare)}
        noise_if_equal = (both + (size - 1) * loss(rare)) / size
        noise_if_not = (sum(alone.values()) + (size - 2) * loss(rare)) / size
        losses = {kind: equal * both + (1 - equal) * alone[kind] for kind in alone}
        losses["noise"] = equal * noise_if_equal + (1 - equal) * noise_if_not
        return losses | {"all": sum(shares[kind] * losses[kind] for kind in COPY_KINDS)}


class CopyMixtureRows(Rows):
    """Rows of the copy-mixture task for a causal language model, with the fields of `TrainingMixture`.

    Row ``i`` depends on ``seed`` and ``i`` alone, so training can resume at any row, with any number of workers.

    Args:
        task: Task from which rows are drawn.
        context_length: Tokens of a row, at least 2.
        num_rows: Number of rows, at least 1.
        seed: Seed of the rows; any integer.

    Raises:
        ValueError: an argument is outside the range given above.
    """

    def __init__(self, task: CopyMixture, *, context_length: int, num_rows: int, seed: int) -> None:
        super().__init__(context_length, num_rows)
        self.task = task
        self._seed = seed

    def sample(self, index: int) -> CopySample:
        """Return the tokens of a row and their kinds."""
        self._check(index)
        generator = torch.Generator().manual_seed(row_seed(self._seed, index))
        return self.task.sample(self._context_length, generator)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = self.sample(index).tokens
        return packed_row(tokens, torch.zeros_like(tokens))


TOKENS_AT_A_TIME = 16384
"""Number of tokens in a batch of rows."""


def copying_rows(
    model: PreTrainedModel, task: CopyMixture, samples: Sequence[CopySample], *, chunk: int
) -> list[dict[str, Any]]:
    """Return the loss of every kind of token, and of all tokens, in rows of one length.

    The first token of a row has no loss. Kinds without tokens are left out.

    Args:
        model: causal language model in evaluation mode.
        task: task of the rows.
        samples: rows of one length; at least one.
        chunk: tokens of a row per forward pass.
    """
    tokens, kinds = map(torch.stack, zip(*samples, strict=True))
    length = tokens.shape[1]
    together = max(1, TOKENS_AT_A_TIME // length)
    sums = torch.zeros(len(COPY_KINDS), 3, dtype=torch.float64)  # losses of model and optimum, number of tokens
    for part, part_kinds in zip(tokens.split(together), kinds[:, 1:].split(together), strict=True):
        losses = token_losses(model, part, chunk=chunk)
        values = torch.stack([losses, task.optimal_token_losses(part), torch.ones_like(losses)], -1)
        sums.index_add_(0, part_kinds.flatten(), values.flatten(0, 1))
    expected = task.optimal_losses(length)
    found = zip((*COPY_KINDS, "all"), torch.cat([sums, sums.sum(0, keepdim=True)]).tolist(), strict=True)
    return [
        {
            "length": length,
            "kind": kind,
            "nll": loss / count,
            "optimal_nll": optimal / count,
            "expected_nll": expected[kind],
            "tokens": int(count),
        }
        for kind, (loss, optimal, count) in found
        if count
    ]


class Copying(Task):
    """Measure the loss of each kind of token in held-out rows of the model's training mixture."""

    def __init__(self, name: str, setting: Setting) -> None:
        super().__init__(name, setting)
        if self.subject.mixture is None:
            raise ValueError(f"tasks: {name!r} needs a model of a recipe with corpus.copy_mixture")
        self._mixture = self.subject.mixture

    def identity(self) -> dict[str, Any]:
        """Return everything that determines the rows."""
        return {"mixture": self._mixture.model_dump(), "tokens": self.plan.tokens}

    def groups(self, length: int) -> Iterator[Sequence[Unit]]:
        """Yield all rows of a length in one group."""
        count = max(1, self.plan.tokens // length)
        yield [Unit({}, count * length, count)]

    def ask(self, length: int, units: Sequence[Unit]) -> list[Record]:
        """Return the losses of each kind."""
        (unit,) = units
        count = unit.content
        rows = CopyMixtureRows(self._mixture, context_length=length, num_rows=count, seed=HELD_OUT_SEED)
        samples = [rows.sample(index) for index in range(count)]
        return [{"kinds": copying_rows(self.subject.model, self._mixture, samples, chunk=self.setting.chunk)}]
