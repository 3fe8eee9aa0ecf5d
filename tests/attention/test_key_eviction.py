"""Eviction of cached keys that no future query needs, checked by the weights that such queries give them."""

import math
from typing import Any
from unittest import mock

import pytest
import torch
from attention_cases import examples, prior_descriptions, randomize
from hypothesis import given
from hypothesis import strategies as st

from attention_priors import KeySink, Laplace, Prior, SSMax, Window, attend, prior_from_config, unneeded_keys
from attention_priors.attention.pruning import bounds, eviction
from attention_priors.priors import CATALOGUE, Structure
from thoroughness import every_other_slow

STATIONARY = [name for name, prior in CATALOGUE.items() if Structure.STATIONARY in prior.structure]
STEEP = {
    "log_slope": (-1.0, 3.0),
    "theta_alpha": (-1.0, 3.0),
    "theta_beta": (-4.0, 4.0),
    "bias": (-12.0, 12.0),
    "alpha": (-6.0, 6.0),
    "beta": (-6.0, 6.0),
}
"""Ranges of parameters for which short texts have keys to evict."""


def weights_of(
    query: torch.Tensor, key: torch.Tensor, prior: Prior, position: int, logit_scale: SSMax | None
) -> torch.Tensor:
    """Return the weights of a query at ``position`` on the keys up to it, ``(H, position + 1)``, in float64."""
    group = len(query) // len(key)
    keys = key.repeat_interleave(group, dim=0).double()[:, : position + 1]
    logits = (keys @ query.double().unsqueeze(-1)).squeeze(-1) * query.shape[-1] ** -0.5
    distance = position - torch.arange(position + 1)
    log_prior = sum(term.log_prior_at(distance, torch.float64) for term in prior.terms())
    if logit_scale is not None:
        scale = logit_scale.s.double().unsqueeze(-1) * math.log(position + 1)
        logits = scale * (logits + log_prior) if logit_scale.include_prior else scale * logits + log_prior
    else:
        logits = logits + log_prior
    for term in prior.terms():
        seen = term.visible_at(distance)
        if seen is not None:
            logits = logits.masked_fill(~seen, -math.inf)
    return logits.softmax(-1)


@pytest.mark.parametrize("name", every_other_slow(STATIONARY, ["laplace", "generalized_gaussian"]))
def test_future_queries_lose_no_more_than_the_tolerance(name: str) -> None:
    forgotten = 0

    @examples(25, name)
    @given(
        prior_descriptions(name, causal=True),
        st.integers(0, 2**20),
        st.sampled_from([1e-6, 1e-2, 0.3]),
        st.sampled_from([None, True, False]),
        st.integers(1, 3),
        st.sampled_from([1, 3, 50]),
        st.sampled_from([0.1, 3.0]),
    )
    def check(description, seed, tolerance, include_prior, steps, more, scale) -> None:
        nonlocal forgotten
        generator = torch.Generator().manual_seed(seed)
        heads, kv_heads, length, width = 4, 2, int(torch.randint(9, 60, (), generator=generator)), 4
        prior = prior_from_config(description, heads)
        randomize(prior, generator, STEEP)
        logit_scale = None
        if include_prior is not None:
            logit_scale = SSMax(heads, include_prior=include_prior)
            with torch.no_grad():
                logit_scale.s.uniform_(-1, 1, generator=generator)
        final = length + more
        key = torch.randn(kv_heads, final, width, generator=generator) * scale
        with mock.patch.multiple(eviction, BLOCK=4, STEPS=steps), mock.patch.object(bounds, "BLOCK", 4):
            forget = unneeded_keys(
                key[None, :, :length],
                prior,
                tolerance=tolerance,
                query_norm=2.0,
                final_length=final,
                logit_scale=logit_scale,
            )[0]
        forgotten += int(forget.sum())
        for position in range(length, final):
            for direction in (torch.randn(heads, width, generator=generator), key[:, 0].repeat(2, 1)):
                query = 2 * torch.nn.functional.normalize(direction, dim=-1)
                with torch.no_grad():
                    weights = weights_of(query, key, prior, position, logit_scale)
                lost = torch.where(forget, weights[:, :length], 0.0).sum(-1)
                assert (lost <= tolerance * (1 + 1e-6)).all(), f"{lost.max()} at {position}"

    check()
    if name != "uniform":
        assert forgotten > 50, "the test has tested nothing"


@pytest.mark.parametrize("include_prior", [True, False])
def test_attention_without_evicted_keys_is_within_the_tolerance(include_prior: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    length, more, tolerance = 2048, 40, 1e-5
    key, value = (torch.randn(1, 2, length + more, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    prior, scale = Laplace(2, slopes=[0.5, 0.25]), SSMax(2, init=0.4, include_prior=include_prior)
    forget = unneeded_keys(
        key[:, :, :length], prior, tolerance=tolerance, query_norm=4.0, final_length=length + more, logit_scale=scale
    )
    left = torch.cat([~forget.all(1)[0], torch.ones(more, dtype=torch.bool)]).nonzero().flatten()
    assert len(left) < length // 2
    positions = torch.arange(length, length + more)
    query = 4 * torch.nn.functional.normalize(
        torch.randn(1, 2, more, 8, generator=generator, dtype=torch.float64), dim=-1
    )
    whole = attend(query, key, value, prior, logit_scale=scale)
    places: dict[str, Any] = {"query_positions": positions, "key_positions": left}
    rest = attend(
        query, key[:, :, left], value[:, :, left], prior, logit_scale=scale, visible_keys=positions + 1, **places
    )
    bound = 2 * tolerance * float(value.norm(dim=-1).max())
    assert float((rest - whole).detach().norm(dim=-1).max()) <= bound
    miscounted = attend(query, key[:, :, left], value[:, :, left], prior, logit_scale=scale, **places)
    assert float((miscounted - whole).detach().norm(dim=-1).max()) > 10 * bound


def test_local_heads_need_few_keys() -> None:
    key = torch.randn(1, 2, 4096, 16, generator=torch.Generator().manual_seed(0))
    prior = Laplace(2, slopes=[0.5, 1e-6])
    forget = unneeded_keys(key, prior, tolerance=1e-6, query_norm=6.0, final_length=8192)
    assert forget.shape == (1, 2, 4096)
    local, whole = forget[0].sum(-1).tolist()
    assert local >= 4096 - 512
    assert whole == 0
    # Keys outside a window have no weight.
    windowed = unneeded_keys(key, Laplace(2) + Window(2, 100), tolerance=1e-6, query_norm=6.0, final_length=8192)
    assert windowed.sum(-1).eq(4096 - 256).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tolerance": 0.0}, "tolerance must be in"),
        ({"tolerance": 1}, "tolerance must be in"),
        ({"final_length": 8}, "final_length must be an integer above the 8 cached keys"),
        ({"query_norm": -1.0}, "query_norm must be"),
        ({"query_norm": torch.ones(3)}, "query_norm must be"),
        ({"query_norm": math.inf}, "query_norm must be"),
        ({"softmax_scale": 0.0}, "softmax_scale must be"),
        ({"logit_scale": SSMax(3)}, "logit_scale has num_heads=3"),
        ({"prior": KeySink(2, train_length=8)}, "prior must be stationary"),
        ({"key": torch.zeros(1, 3, 8, 4)}, "key must be floating point"),
        ({"key": torch.zeros(2, 8, 4)}, "key must be floating point"),
    ],
)
def test_invalid_arguments_are_refused(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "key": torch.zeros(1, 2, 8, 4),
        "prior": Laplace(2),
        "tolerance": 1e-3,
        "query_norm": 1.0,
        "final_length": 16,
    } | change
    with pytest.raises(ValueError, match=message):
        unneeded_keys(arguments.pop("key"), arguments.pop("prior"), **arguments)
