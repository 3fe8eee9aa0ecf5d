"""Invalid constructor arguments: each error names the argument and shows the value."""

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
from prior_samples import SAMPLES, make

from attention_priors.attention import ResidualSSMax, SSMax
from attention_priors.encodings import ShawVectors
from attention_priors.priors import (
    ClippedOffsets,
    GeneralizedGaussian,
    KeySink,
    Laplace,
    RelativeBuckets,
    Spectral,
    Window,
    alibi_slopes,
)
from attention_priors.priors.sum import Sum

BAD: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    (Laplace, {"slopes": [1.0]}),
    (Laplace, {"slopes": [1.0, 2.0, 3.0]}),
    (Laplace, {"slopes": [1.0, 0.0]}),
    (Laplace, {"slopes": [1.0, -1.0]}),
    (Laplace, {"slopes": [1.0, math.inf]}),
    (Laplace, {"slopes": [1.0, math.nan]}),
    (Laplace, {"slopes": "12"}),
    (Laplace, {"slopes": ["1", "2"]}),
    (Laplace, {"slopes": [True, True]}),
    (Laplace, {"slopes": {1.0: 0, 2.0: 0}}),
    (Laplace, {"slopes": 3}),
    (Laplace, {"learn": "slopes"}),
    (Laplace, {"learn": None}),
    (Laplace, {"learn": 3}),
    (GeneralizedGaussian, {"init": "alibi"}),
    (GeneralizedGaussian, {"learn": ["beta", "gamma"]}),
    (GeneralizedGaussian, {"learn": None}),
    (GeneralizedGaussian, {"init": "roles", "keep_sign": "false"}),
    (GeneralizedGaussian, {"keep_sign": 0}),
    (Spectral, {"num_frequencies": 0}),
    (Spectral, {"num_frequencies": 2.0}),
    (Spectral, {"base": 1.0}),
    (Spectral, {"base": math.inf}),
    (Spectral, {"base": math.nan}),
    (Spectral, {"shortest_period": 1.99}),
    (Spectral, {"shortest_period": math.inf}),
    (Spectral, {"shortest_period": "3"}),
    (Spectral, {"init": "laplace"}),
    (Spectral, {"learn": "gamma"}),
    (KeySink, {"train_length": 0}),
    (KeySink, {"train_length": 8.0}),
    (KeySink, {"train_length": 8, "num_frequencies": 0}),
    (KeySink, {"train_length": 8, "hidden_size": -1}),
    (KeySink, {"train_length": 8, "base": 0.5}),
    (KeySink, {"train_length": 8, "base": math.nan}),
    (KeySink, {"train_length": 8, "init": "sink"}),
    (KeySink, {"train_length": 8, "learn": "sink"}),
    (KeySink, {"train_length": 8, "activation": "relu"}),
    (RelativeBuckets, {"num_buckets": 1}),
    (RelativeBuckets, {"num_buckets": 32.0}),
    (RelativeBuckets, {"bidirectional": True, "num_buckets": 2}),
    (RelativeBuckets, {"bidirectional": True, "num_buckets": 33}),
    (RelativeBuckets, {"num_buckets": 32, "max_distance": 16}),
    (RelativeBuckets, {"num_buckets": 32, "bidirectional": True, "max_distance": 8}),
    (RelativeBuckets, {"max_distance": 128.0}),
    (RelativeBuckets, {"bidirectional": "x"}),
    (RelativeBuckets, {"bidirectional": None}),
    (RelativeBuckets, {"init": "zeros"}),
    (RelativeBuckets, {"learn": "buckets"}),
    (ClippedOffsets, {"max_offset": 0}),
    (ClippedOffsets, {"max_offset": 4.0}),
    (ClippedOffsets, {"init": "zeros"}),
    (ClippedOffsets, {"learn": "offsets"}),
    (Window, {"size": 0}),
    (Window, {"size": -3}),
    (Window, {"size": 2.0}),
    (Window, {"size": True}),
]


@pytest.mark.parametrize(("prior", "arguments"), BAD)
def test_invalid_arguments_are_named(prior: Callable[..., Any], arguments: dict[str, Any]):
    argument, value = list(arguments.items())[-1]
    shown = "" if argument == "slopes" else re.escape(repr(value))
    with pytest.raises(ValueError, match=rf"\b{argument}\b.*{shown}"):
        prior(2, **arguments)


@pytest.mark.parametrize("heads", [0, -1, 2.0, "4", True, None])
@pytest.mark.parametrize("name", list(SAMPLES))
def test_num_heads_must_be_a_positive_integer(name: str, heads: Any):
    with pytest.raises(ValueError, match=re.escape(f"num_heads must be a positive integer, got {heads!r}")):
        make(name, SAMPLES[name][0], heads)


def test_smallest_sizes_are_allowed():
    RelativeBuckets(1, num_buckets=2, max_distance=2)
    RelativeBuckets(1, num_buckets=4, max_distance=2, bidirectional=True)
    RelativeBuckets(1, num_buckets=3, max_distance=2)
    ClippedOffsets(1, max_offset=1)
    Spectral(1, num_frequencies=1, shortest_period=2)
    KeySink(1, 1, num_frequencies=1, hidden_size=1)
    Window(1, 1)


def test_empty_sums_are_refused():
    with pytest.raises(ValueError, match="priors must hold at least one prior"):
        Sum([])


@pytest.mark.parametrize("priors", [None, 3, "laplace", ["laplace"], Laplace(2), {"name": "laplace"}])
def test_sums_of_other_objects_are_refused(priors: Any):
    with pytest.raises(ValueError, match=re.escape(f"priors must be a list of priors, got {priors!r}")):
        Sum(priors)


@pytest.mark.parametrize("scale", [SSMax, ResidualSSMax])
def test_include_prior_must_be_a_boolean(scale: type[SSMax]):
    with pytest.raises(ValueError, match="include_prior must be True or False, got 'no'"):
        scale(2, include_prior="no")  # pyright: ignore[reportArgumentType]


def test_values_must_be_a_boolean():
    with pytest.raises(ValueError, match="values must be True or False, got 'no'"):
        ShawVectors(4, values="no")  # pyright: ignore[reportArgumentType]


def test_slopes_of_no_head_are_refused():
    with pytest.raises(ValueError, match="num_heads must be a positive integer, got 0"):
        alibi_slopes(0)
