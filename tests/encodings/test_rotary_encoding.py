import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from attention_priors.encodings import Rotary
from thoroughness import examples

FAR = 2**20
thorough = settings(max_examples=examples(25))

SCALINGS: list[dict[str, Any]] = [
    {},
    {"scaling": "linear", "factor": 4.0},
    {"scaling": "ntk", "factor": 4.0},
    {"scaling": "yarn", "factor": 4.0, "original_length": 128},
]
every_scaling = pytest.mark.parametrize("arguments", SCALINGS, ids=["default", "linear", "ntk", "yarn"])


@pytest.mark.parametrize(("head_dim", "base", "factor"), [(8, 10_000.0, 4.0), (64, 500_000.0, 1.5), (4, 100.0, 32.0)])
def test_ntk_multiplies_the_base(head_dim: int, base: float, factor: float):
    stretched = base * factor ** (head_dim / (head_dim - 2))
    expected = [stretched ** (-2 * r / head_dim) for r in range(head_dim // 2)]
    frequencies, magnitude = Rotary(head_dim, base, "ntk", factor).frequencies()
    assert frequencies.tolist() == pytest.approx(expected, rel=1e-5)
    assert magnitude == 1.0
    # The longest period is stretched by the factor, and the shortest stays.
    usual = Rotary(head_dim, base).frequencies()[0]
    assert (usual[-1] / frequencies[-1]).item() == pytest.approx(factor, rel=1e-5)


def test_frequencies_match_their_formulas():
    usual = Rotary(8, base=100.0).frequencies()
    assert usual[0].tolist() == pytest.approx([100 ** (-r / 4) for r in range(4)], rel=1e-6)
    assert usual[1] == 1.0
    linear = Rotary(8, base=100.0, scaling="linear", factor=5.0).frequencies()
    torch.testing.assert_close(linear[0] * 5, usual[0])
    yarn = Rotary(64, scaling="yarn", factor=16.0, original_length=2048).frequencies()
    assert yarn[1] == pytest.approx(0.1 * math.log(16) + 1)
    usual = Rotary(64).frequencies()
    ratio = usual[0] / yarn[0]  # high frequencies unchanged, low ones interpolated, a ramp between
    assert ratio[0].item() == pytest.approx(1)
    assert ratio[-1].item() == pytest.approx(16)
    assert (ratio.diff() >= -1e-4).all()


@every_scaling
@pytest.mark.parametrize("multiplier", [50.0, 0.5])
def test_base_multiplier_multiplies_the_base(arguments: dict[str, Any], multiplier: float):
    found, magnitude = Rotary(16, 2000.0, **arguments, base_multiplier=multiplier).frequencies()
    expected, as_before = Rotary(16, 2000.0 * multiplier, **arguments).frequencies()
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert magnitude == as_before
    assert not torch.allclose(found, Rotary(16, 2000.0, **arguments).frequencies()[0])


@every_scaling
@thorough
@given(st.integers(0, FAR), st.integers(0, FAR), st.integers(0, FAR), st.integers(0, 1000))
def test_products_depend_on_distance_only(arguments: dict[str, Any], i: int, j: int, shift: int, seed: int):
    generator = torch.Generator().manual_seed(seed)
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64, generator=generator)
    encoding = Rotary(8, **arguments)

    def product(i: int, j: int) -> float:
        return (encoding(q, torch.tensor([i])) * encoding(k, torch.tensor([j]))).sum().item()

    assert product(i + shift, j + shift) == pytest.approx(product(i, j), abs=1e-6)


@every_scaling
@thorough
@given(st.integers(0, FAR), st.integers(0, 1000))
def test_norms_change_only_by_yarns_factor(arguments: dict[str, Any], position: int, seed: int):
    x = torch.randn(1, 1, 1, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    encoding = Rotary(8, **arguments)
    magnitude = 0.1 * math.log(4) + 1 if arguments.get("scaling") == "yarn" else 1.0
    ratio = encoding(x, torch.tensor([position])).norm() / x.norm()
    assert ratio.item() == pytest.approx(magnitude, rel=1e-9)


def test_far_positions_keep_their_phases_in_float32():
    encoding = Rotary(8)
    x = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]).view(1, 1, 1, 8)
    phases = [frequency * FAR for frequency in encoding.frequencies()[0].tolist()]
    expected = [math.cos(phase) for phase in phases] + [math.sin(phase) for phase in phases]
    assert encoding(x, torch.tensor([FAR]))[0, 0, 0].tolist() == pytest.approx(expected, abs=1e-6)


def test_position_0_is_unchanged():
    x = torch.randn(1, 2, 1, 8)
    torch.testing.assert_close(Rotary(8)(x, torch.tensor([0])), x, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_result_has_the_dtype_of_the_vectors(dtype: torch.dtype):
    x = torch.randn(1, 2, 3, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    found = Rotary(8)(x, torch.arange(3))
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), Rotary(8)(x.double(), torch.arange(3)), rtol=1e-2, atol=1e-2)


def test_positions_may_be_shared_or_per_sequence():
    x = torch.randn(2, 3, 4, 8)
    positions = torch.arange(4)
    torch.testing.assert_close(Rotary(8)(x, positions), Rotary(8)(x, positions.expand(2, 4)))
    shifted = Rotary(8)(x, torch.stack([positions, positions + 9]))
    torch.testing.assert_close(shifted[1:], Rotary(8)(x[1:], positions + 9))


def test_rotary_may_be_built_on_meta():
    with torch.device("meta"):
        encoding = Rotary(8, scaling="yarn", factor=2.0, original_length=64)
        frequencies, _ = encoding.frequencies()
    assert frequencies.device.type == "cpu"
    assert not list(encoding.parameters())
    assert not encoding.state_dict()


@every_scaling
def test_fake_tensors_leave_nothing_in_the_cache(arguments: dict[str, Any]):
    x, positions, encoding = torch.randn(1, 1, 4, 8), torch.arange(4), Rotary(8, **arguments)
    for _ in range(2):
        with FakeTensorMode():
            assert encoding(torch.empty(1, 1, 4, 8), torch.arange(4)).shape == x.shape
        found = encoding(x, positions)
        assert type(found) is torch.Tensor
        torch.testing.assert_close(found, Rotary(8, **arguments)(x, positions))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"head_dim": 7}, "head_dim must be a positive even integer"),
        ({"head_dim": 0}, "head_dim must be"),
        ({"head_dim": 8.0}, "head_dim must be"),
        ({"scaling": "stretch"}, "scaling must be None or one of linear, ntk, yarn; got 'stretch'"),
        ({"base": 1.0}, "base must be a finite number above 1, got 1.0"),
        ({"base": math.nan}, "base must be a finite number above 1, got nan"),
        ({"base_multiplier": 0.0}, "base_multiplier must be a finite number above 0, got 0.0"),
        ({"scaling": "linear", "factor": 0.5}, "factor must be at least 1, got 0.5"),
        ({"scaling": "linear", "factor": math.nan}, "factor must be a finite number above 0, got nan"),
        ({"factor": 2.0}, "factor=2.0 needs a scaling"),
        ({"head_dim": 2, "scaling": "ntk", "factor": 2.0}, "scaling='ntk' needs head_dim of at least 4"),
        ({"scaling": "yarn", "factor": 2.0}, "original_length .* got original_length=None"),
        ({"original_length": 64}, "original_length .* got original_length=64"),
        (
            {"scaling": "linear", "factor": 2.0, "original_length": 64},
            "original_length .* got original_length=64 with scaling='linear'",
        ),
    ],
)
def test_invalid_arguments_are_named(arguments: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        Rotary(**{"head_dim": 8, **arguments})


def test_vectors_of_another_width_are_refused():
    with pytest.raises(ValueError, match=r"head dimension 8, got shape \(1, 2, 3, 4\)"):
        Rotary(8)(torch.zeros(1, 2, 3, 4), torch.arange(3))
