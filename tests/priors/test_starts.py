"""Priors with given initial parameters."""

import math
from typing import Any

import pytest
import torch

from attention_priors.priors import (
    ClippedOffsets,
    GeneralizedGaussian,
    KeySink,
    Prior,
    RelativeBuckets,
    Spectral,
    prior_from_config,
)

GIVEN: dict[str, tuple[Any, dict[str, Any]]] = {
    "generalized_gaussian": (
        GeneralizedGaussian(2, init={"theta_alpha": 0.5, "beta": [-0.5, 1.0], "mu": [0.0, -2.0]}),
        {"theta_alpha": [0.5, 0.5], "beta": [-0.5, 1.0], "mu": [0.0, -2.0]},
    ),
    "with the sign kept": (
        GeneralizedGaussian(2, init={"beta": [-0.5, 1.0]}, keep_sign=True),
        {"beta": [-0.5, 1.0], "theta_alpha": [0.0, 0.0]},
    ),
    "spectral": (
        Spectral(2, 3, init={"alpha": [1.0, 0.0, -1.0], "beta": [[1.0, 2.0, 3.0], [0.0, 0.0, 0.5]]}),
        {"alpha": [[1.0, 0.0, -1.0]] * 2, "beta": [[1.0, 2.0, 3.0], [0.0, 0.0, 0.5]]},
    ),
    "key_sink": (KeySink(2, 64, init={"slope": [0.5, 0.25], "bump": 3}), {"slope": [0.5, 0.25], "bump": [3.0, 3.0]}),
    "relative_buckets": (
        RelativeBuckets(2, num_buckets=4, max_distance=8, init={"bias": [0.0, -1.0, -2.0, -3.0]}),
        {"bias": [[0.0, -1.0, -2.0, -3.0]] * 2},
    ),
    "clipped_offsets": (
        ClippedOffsets(1, max_offset=1, init={"bias": torch.tensor([1.0, 2.0, 3.0])}),
        {"bias": [[1.0, 2.0, 3.0]]},
    ),
}


@pytest.mark.parametrize("name", GIVEN)
def test_given_numbers_are_initial_and_survive_the_config(name: str) -> None:
    prior, expected = GIVEN[name]
    assert isinstance(prior, Prior)
    again = prior_from_config(prior.to_config())
    assert again.to_config() == prior.to_config()
    with torch.no_grad():
        for parameter in again.parameters():
            parameter.add_(1.0)
    again.reset_parameters()
    for made in (prior, again):
        natural = made.natural_parameters()
        for key, values in expected.items():
            torch.testing.assert_close(natural[key], torch.tensor(values), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("table", [ClippedOffsets, RelativeBuckets])
@pytest.mark.parametrize(("init", "far_sighted", "hidden"), [("neighbours", 2, -13.0), ("previous", 0, -11.0)])
def test_a_table_starts_as_the_generalized_gaussian_does(
    table: type[ClippedOffsets] | type[RelativeBuckets], init: str, far_sighted: int, hidden: float
) -> None:
    """Both tables have an entry of their own for each distance up to 15 tokens."""
    made = table(4, init=init)
    distance = torch.arange(16)
    expected = GeneralizedGaussian(4, init=init).log_prior_at(distance).clamp(min=-16)
    assert torch.equal(made.log_prior_at(distance), expected)
    far = made.log_prior_at(torch.tensor([10_000])).squeeze(1)
    # The near heads hide far keys, the others do not.
    assert bool((far[:far_sighted] > -0.3).all())
    assert bool((far[far_sighted:] < hidden).all())


@pytest.mark.parametrize("table", [ClippedOffsets, RelativeBuckets])
def test_a_table_without_memory_starts_later(table: type[ClippedOffsets] | type[RelativeBuckets]) -> None:
    with torch.device("meta"):
        made = table(4, init="neighbours")
    made.to_empty(device="cpu").reset_parameters()
    assert torch.equal(made.bias, table(4, init="neighbours").bias)


def test_a_bucket_starts_with_its_smallest_distance() -> None:
    table = RelativeBuckets(2, num_buckets=8, max_distance=64, bidirectional=True, init="neighbours")
    # Buckets of each direction: 0, 1, 2 to 11, the rest.
    expected = GeneralizedGaussian(2, init="neighbours").log_prior_at(torch.tensor([0, 1, 2, 12, -1, -2, -12]))
    distance = torch.tensor([0, 1, 11, 50, -1, -9, -64])
    assert torch.equal(table.log_prior_at(distance), expected.clamp(min=-16))


def test_missing_parameters_start_at_0() -> None:
    assert GeneralizedGaussian(3, init={"beta": 1.0}).mu.tolist() == [0.0] * 3
    assert KeySink(2, 8, init={"bump": 1.0}).natural_parameters()["slope"].tolist() == [0.0, 0.0]


def test_a_sink_with_a_slope_learns_it_and_needs_a_causal_mask() -> None:
    assert "slope" not in KeySink(1, 8, init={"bump": 1.0}).learn
    sink = KeySink(1, 8, init={"slope": 0.1})
    assert "slope" in sink.learn
    with pytest.raises(ValueError, match="slope"):
        sink.check(causal=False)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GeneralizedGaussian(2, init={"theta_beta": 1.0}), "init must be one of .*theta_alpha.*got theta_beta"),
        (lambda: GeneralizedGaussian(2, init={}), r"init must be one of .*theta_alpha.*got \{\}"),
        (lambda: GeneralizedGaussian(2, init={"beta": [1.0, 2.0, 3.0]}), r"init\['beta'\] must be .* shape \(2,\)"),
        (lambda: GeneralizedGaussian(2, init={"beta": "steep"}), r"init\['beta'\] must .*'steep'"),
        (lambda: GeneralizedGaussian(2, init={"beta": math.nan}), r"init\['beta'\] must be finite"),
        (lambda: GeneralizedGaussian(2, init={"beta": [0.0, 1.0]}, keep_sign=True), "keep_sign=True needs an init"),
        (lambda: Spectral(2, 3, init={"alpha": [1.0, 2.0]}), r"init\['alpha'\] must .* shape \(2, 3\)"),
        (lambda: RelativeBuckets(1, init="steep"), "one of uniform, normal, neighbours, previous; got 'steep'"),
    ],
)  # fmt: skip
def test_invalid_numbers_are_named(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
