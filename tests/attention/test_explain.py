"""explain() names the backend of a call and the reason."""

from typing import Any
from unittest.mock import patch

import pytest
import torch

from attention_priors import (
    ClippedOffsets,
    GeneralizedGaussian,
    KeyBounds,
    KeySink,
    Laplace,
    ShawVectors,
    Spectral,
    SSMax,
    Uniform,
    Window,
    explain,
)
from attention_priors.attention.plan import make_plan
from attention_priors.attention.problem import make_problem
from attention_priors.attention.pruning import certificate
from attention_priors.attention.pruning.certificate import FEWEST_QUERIES

QUERY, KEY, VALUE = torch.randn(3, 1, 4, 300, 8).unbind()


def engine(prior: Any = None, **options: Any) -> str:
    return explain(QUERY, KEY, VALUE, prior, **options).splitlines()[0]


def test_engine_is_named() -> None:
    assert engine() == "lanes: without a prior that changes a logit, one call of PyTorch's attention is enough"
    # A window of 300 tokens hides none of 300 keys.
    assert engine(Window(4, 300)) == engine(Uniform(4)) == engine()
    assert engine(Spectral(4) + Window(4, 300)) == engine(Spectral(4))
    assert engine(Window(4, 299)) == "toeplitz: not all of the prior is factored"
    assert engine(Laplace(4)) == "toeplitz: not all of the prior is factored"
    assert engine(Spectral(4)) == "lanes: all of the prior is factored"
    assert engine(Spectral(4), tolerance=0.1) == "lanes: all of the prior is factored"
    long = torch.randn(1, 4, 600, 8)
    pruned = explain(long, long, long, Spectral(4), tolerance=0.1).splitlines()[0]
    assert pruned == "toeplitz: pruning has tighter bounds for a table than for lanes"
    assert engine(KeySink(4, 64)) == "toeplitz: not all of the prior is factored"
    assert engine(relative=ShawVectors(8, 4)).startswith("blockwise: only the dense formula supports relative")
    assert engine(Laplace(4), backend="reference") == "reference: requested by name"


def test_path_of_each_term_is_named() -> None:
    told = explain(
        QUERY, KEY, VALUE, Laplace(4) + KeySink(4, 64), key_bias=torch.zeros(1, 4, 300), null_logit=torch.zeros(4)
    )
    assert "laplace: one number per distance and head" in told
    assert "key_sink: one number per key and head" in told
    assert "key_bias: one number per key and head, less a constant for each block of queries" in told
    assert "null_logit: applied to the output at the end" in told
    assert "not lanes: not all of the prior is factored" in told
    assert "spectral: columns of queries and keys" in explain(QUERY, KEY, VALUE, Spectral(4))


def test_pruning_is_explained() -> None:
    prior = Laplace(4)
    long = torch.randn(1, 4, 600, 8)
    assert "tolerance: blocks of keys that together weigh less than 0.01 are pruned" in explain(
        long, long, long, prior, tolerance=0.01
    )
    assert "tolerance" not in explain(QUERY, KEY, VALUE, prior)
    mask = torch.zeros(300, 300, dtype=torch.bool)
    with patch.multiple(certificate, FEWEST_KEYS=599, FEWEST_QUERIES=FEWEST_QUERIES, FEWEST_CACHED_KEYS=600):
        for reason, arguments in {
            "up to 599 keys, it would take more time than it saves": (QUERY, KEY, VALUE, prior),
            "an attn_mask may hide any key": (QUERY, KEY, VALUE, prior, {"attn_mask": mask}),
            "with fewer than 32 queries, it needs key_bounds": (QUERY[:, :, :31], KEY, VALUE, prior),
            "up to 600 keys, it": (long[:, :, :1], long, long, prior, {"key_bounds": KeyBounds(long)}),
            "only triton and toeplitz prune": (QUERY, KEY, VALUE, Spectral(4)),
        }.items():
            *given, options = arguments if isinstance(arguments[-1], dict) else (*arguments, {})
            told = explain(*given, tolerance=0.01, **options)
            assert f"tolerance: no key is pruned, because {reason}" in told


def test_treatment_of_large_numbers_is_explained() -> None:
    near = explain(QUERY, KEY, VALUE, Laplace(4))
    assert "float64" not in near
    assert "constant" not in near
    far = ClippedOffsets(4)
    with torch.no_grad():
        far.bias.fill_(-5000.0)
    assert "from query 0 on, a constant is subtracted from the table" in explain(QUERY, KEY, VALUE, far)
    gates = torch.full((1, 4, 300), -1e4, dtype=torch.float64).cumsum(-1)
    assert "rows are computed in float64, block by block" in explain(QUERY, KEY, VALUE, key_bias=-gates)
    # Blocks of a head that forgets half in each token are short enough for float32.
    gates[:, :2], gates[:, 2:] = (torch.tensor(gate).log() * torch.arange(300) for gate in (0.5, 0.999))
    assert "float64" not in explain(QUERY, KEY, VALUE, key_bias=-gates, logit_scale=SSMax(4, init=0.4))


def test_a_requested_backend_computes_or_gives_the_reason() -> None:
    with pytest.raises(ValueError, match="backend='lanes' cannot compute this: not all of the prior is factored"):
        explain(QUERY, KEY, VALUE, Laplace(4), backend="lanes")


def test_a_plan_is_static() -> None:
    """A plan is hashable, holds no tensors, and is equal for problems that differ only in numbers."""
    prior = GeneralizedGaussian(4) + KeySink(4, 64)
    plans = [make_plan(make_problem(x, KEY, VALUE, prior), "auto", need_lse=False) for x in (QUERY, QUERY + 1)]
    assert plans[0] == plans[1]
    assert len({*plans}) == 1
    assert not any(isinstance(part, torch.Tensor) for part in plans[0])
