"""Constructor arguments for every prior of the catalogue."""

from typing import Any, TypeVar

import pytest
import torch

from attention_priors.priors import CATALOGUE, Prior

HEADS = 3

AnyPrior = TypeVar("AnyPrior", bound=Prior)


def arguments_of(prior: Prior) -> dict[str, Any]:
    """Return the constructor's arguments besides ``num_heads``."""
    return {key: value for key, value in prior.to_config().items() if key not in ("name", "num_heads")}


SAMPLES: dict[str, list[dict[str, Any]]] = {
    name: [arguments_of(example) for example in prior.examples(HEADS)] for name, prior in CATALOGUE.items()
}
"""Arguments of each class's examples, by name. The simplest example comes first."""


def make(name: str, arguments: dict[str, Any], num_heads: int = HEADS) -> Prior:
    return CATALOGUE[name](**{"num_heads": num_heads, **arguments})


def randomise(prior: AnyPrior, seed: int = 0, scale: float = 0.5) -> AnyPrior:
    """Fill every parameter with N(0, scale²), so that no parameter is zero or equal in two heads."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in prior.parameters():
            parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))
    return prior


def _cases(*, with_parameters: bool) -> list[Any]:
    return [
        pytest.param(name, arguments, id=f"{name}-{number}")
        for name in CATALOGUE
        for number, arguments in enumerate(SAMPLES[name])
        if not with_parameters or any(True for _ in make(name, arguments).parameters())
    ]


every_prior = pytest.mark.parametrize(("name", "arguments"), _cases(with_parameters=False))
every_prior_with_parameters = pytest.mark.parametrize(("name", "arguments"), _cases(with_parameters=True))
