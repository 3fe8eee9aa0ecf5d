"""Roles: the effect of a head's prior, in a word."""

import math

import pytest
import torch
from torch import Tensor

from attention_priors import GeneralizedGaussian, KeySink, Laplace, Prior, Uniform, Window
from attention_priors.lab.inspect import head_roles
from attention_priors.priors import Axial


def ggd(beta: float, theta_alpha: float = 0.0) -> Prior:
    prior = GeneralizedGaussian(1)
    with torch.no_grad():
        prior.theta_beta.fill_(beta)
        prior.theta_alpha.fill_(theta_alpha)
    return prior


def around(distance: float) -> Prior:
    """Build a bell-shaped prior, 500 tokens wide, that is smallest near the query and far away."""
    return GeneralizedGaussian(1, init={"beta": 2.0, "theta_alpha": -2 * math.log(500.0), "mu": -distance})


def bump(height: float) -> Prior:
    sink = KeySink(1, 128)
    with torch.no_grad():
        sink.bump.fill_(height)
    return sink


@pytest.mark.parametrize(
    ("prior", "role"),
    [
        (Uniform(1), "uniform"),
        (ggd(0.0), "uniform"),
        (ggd(0.01, -3.0), "uniform"),
        (ggd(-0.3), "retrieval"),
        (ggd(-3.0), "retrieval"),
        (ggd(1.0), "local"),
        (ggd(0.5), "local"),
        (ggd(0.15), "long-tailed"),
        (Laplace(1, slopes=[1.0]), "local"),
        (Laplace(1, slopes=[2.0**-12]), "long-tailed"),
        (bump(9.0), "sink"),
        (Window(1, 8), "local"),
        (Uniform(1) + Window(1, 2000), "long-tailed"),
        (around(1000.0), "in between"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_roles_of_known_priors(prior: Prior, role: str) -> None:
    assert head_roles(prior, 4096) == [role]


def test_roles_depend_on_the_length_of_the_text() -> None:
    prior = Laplace(1, slopes=[1 / 100])
    assert [head_roles(prior, length)[0] for length in (8, 128, 4096)] == ["uniform", "long-tailed", "local"]


def test_a_role_needs_two_keys() -> None:
    with pytest.raises(ValueError, match="length must be at least 2 tokens"):
        head_roles(Uniform(1), 1)


def test_priors_on_grids_have_no_role() -> None:
    with pytest.raises(ValueError, match="prior must be over a line, got 'axial'"):
        head_roles(Axial(1, "laplace"), 64)
    with pytest.raises(ValueError, match=r"length must be a positive integer, got 100\.0"):
        head_roles(Uniform(1), 100.0)  # pyright: ignore[reportArgumentType]


class Table(Laplace):
    """Build a prior whose last query has these weights."""

    def __init__(self, weights: list[float]) -> None:
        super().__init__(1)
        self.weights = weights

    def log_prior_at(self, distance: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        table = torch.tensor(self.weights[::-1], dtype=torch.float64).log()
        return table[distance.clamp(0, len(self.weights) - 1)].to(dtype).unsqueeze(0)


@pytest.mark.parametrize(
    ("weights", "role"),
    [
        ([1.0] * 15 + [math.exp(0.09)], "uniform"),
        ([1.0] * 15 + [math.exp(0.2)], "long-tailed"),
        ([0.2] + [0.05] * 14 + [0.06], "sink"),
        ([0.2, 0.1] + [0.05] * 14, "retrieval"),  # the sink has e times the weight of the second key
        ([0.02] * 12 + [0.16] * 2 + [0.22] * 2, "long-tailed"),  # 76 % in the nearest quarter
        ([0.004] * 12 + [0.2] * 2 + [0.276] * 2, "local"),  # 95 %
    ],
)
def test_roles_change_at_their_thresholds(weights: list[float], role: str) -> None:
    assert head_roles(Table(weights), 16) == [role]


def test_short_texts_have_roles() -> None:
    assert head_roles(Laplace(1, slopes=[0.3]), 4) == ["long-tailed"]
