"""A sample of every prior in the catalogue; a new prior needs an entry here."""

from typing import Any, TypeVar

import pytest
import torch

from attention_priors.priors import CATALOGUE, Prior

HEADS = 3

AnyPrior = TypeVar("AnyPrior", bound=Prior)

GGD = {"name": "generalized_gaussian", "init": "uniform", "learn": ["alpha", "beta"], "keep_sign": False}
LAPLACE = {"name": "laplace", "slopes": None, "learn": ["slope"]}
SPECTRAL = {
    "name": "spectral",
    "num_frequencies": 3,
    "base": 100.0,
    "shortest_period": 4.5,
    "init": "uniform",
    "learn": ["alpha", "beta"],
}

SAMPLES: dict[str, list[dict[str, Any]]] = {
    "uniform": [{}],
    "laplace": [{}, {"slopes": [0.5, 1e-3, 2.0], "learn": ["slope"]}],
    "generalized_gaussian": [
        {},
        {"init": "roles", "learn": ["alpha", "mu"], "keep_sign": True},
        {"init": "neighbours", "learn": [], "keep_sign": False},
    ],
    "spectral": [
        {},
        {"num_frequencies": 5, "base": 500.0, "shortest_period": 3.0, "init": "recency", "learn": ["beta"]},
    ],
    "key_sink": [
        {"train_length": 64},
        {
            "train_length": 100,
            "num_frequencies": 3,
            "hidden_size": 5,
            "base": 77.0,
            "init": "recency",
            "learn": ["gain", "bump"],
            "activation": "silu",
        },
    ],
    "relative_buckets": [
        {},
        {"num_buckets": 12, "max_distance": 40, "bidirectional": True, "init": "normal", "learn": []},
    ],
    "clipped_offsets": [{}, {"max_offset": 4, "init": "normal", "learn": []}],
    "window": [{"size": 4}],
    "axial": [
        {"rows": GGD},
        {"rows": LAPLACE, "columns": SPECTRAL},
        {"rows": SPECTRAL},
    ],
    "spectral_2d": [
        {},
        {"num_frequencies": 3, "base": 30.0, "shortest_period": 2.5, "init": "recency", "learn": ["beta"]},
    ],
    "radial": [{"prior": LAPLACE}, {"prior": GGD}],
    "key_sink_2d": [
        {"rows": 4, "columns": 6},
        {
            "rows": 3,
            "columns": 3,
            "num_frequencies": 2,
            "hidden_size": 5,
            "base": 20.0,
            "init": {"bump": 1.5},
            "learn": ["gain", "bump"],
            "activation": "silu",
        },
    ],
}
"""By name: what the constructor is given besides ``num_heads``; all that it needs, then all that it takes."""


def make(name: str, arguments: dict[str, Any], num_heads: int = HEADS) -> Prior:
    return CATALOGUE[name](**{"num_heads": num_heads, **arguments})


def randomise(prior: AnyPrior, seed: int = 0, scale: float = 0.5) -> AnyPrior:
    """Fill every parameter with N(0, scale²), so that nothing is zero or the same in two heads."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in prior.parameters():
            parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))
    return prior


def _cases(*, with_parameters: bool) -> list[Any]:
    return [
        pytest.param(name, arguments, id=f"{name}-{number}")
        for name in CATALOGUE
        for number, arguments in enumerate(SAMPLES.get(name, []))
        if not with_parameters or any(True for _ in make(name, arguments).parameters())
    ]


every_prior = pytest.mark.parametrize(("name", "arguments"), _cases(with_parameters=False))
every_prior_with_parameters = pytest.mark.parametrize(("name", "arguments"), _cases(with_parameters=True))
