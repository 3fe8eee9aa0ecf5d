"""Properties of every prior in the catalogue."""

import copy
import inspect
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from prior_samples import HEADS, SAMPLES, every_prior, every_prior_with_parameters, make, randomise
from safetensors.torch import load, save
from torch import nn

from attention_priors import NullKey, ResidualSSMax, SSMax
from attention_priors.priors import (
    CATALOGUE,
    ClippedOffsets,
    GeneralizedGaussian,
    Laplace,
    Prior,
    Structure,
    prior_from_config,
)

POSITIONS = torch.arange(9)


@pytest.mark.parametrize("name", list(CATALOGUE))
def test_examples_together_use_every_argument(name: str):
    parameters = inspect.signature(CATALOGUE[name]).parameters.values()
    defaults = {each.name: each.default for each in parameters if each.default is not inspect.Parameter.empty}
    plain = json.loads(json.dumps(defaults))
    unused = [key for key, value in plain.items() if all(sample[key] == value for sample in SAMPLES[name])]
    assert not unused, f"{CATALOGUE[name].__name__}.examples() leaves {unused} at the default"


# ---- configs


@every_prior
def test_config_states_name_and_every_argument(name: str, arguments: dict[str, Any]):
    config = make(name, arguments).to_config()

    assert config["name"] == name
    assert config["num_heads"] == HEADS
    assert {key: config[key] for key in arguments} == arguments
    assert set(config) == {"name", *inspect.signature(CATALOGUE[name]).parameters}


@every_prior
def test_configs_survive_json(name: str, arguments: dict[str, Any]):
    torch.manual_seed(0)
    prior = make(name, arguments)
    torch.manual_seed(0)
    again = prior_from_config(json.loads(json.dumps(prior.to_config())))

    assert type(again) is type(prior)
    assert again.to_config() == prior.to_config()
    torch.testing.assert_close(
        again.log_prior(POSITIONS, POSITIONS), prior.log_prior(POSITIONS, POSITIONS), rtol=0, atol=0
    )
    trains = [parameter.requires_grad for parameter in prior.parameters()]
    assert [parameter.requires_grad for parameter in again.parameters()] == trains


@every_prior
def test_configs_hold_arguments_and_no_learned_values(name: str, arguments: dict[str, Any]):
    prior = make(name, arguments)
    before = prior.to_config()
    assert randomise(prior).to_config() == before


@every_prior
def test_the_model_may_supply_num_heads(name: str, arguments: dict[str, Any]):
    prior = prior_from_config({"name": name, **arguments}, num_heads=HEADS)
    assert prior.num_heads == HEADS
    assert prior.to_config() == make(name, arguments).to_config()


@every_prior
def test_repr_states_the_arguments(name: str, arguments: dict[str, Any]):
    printed = repr(make(name, arguments))
    for argument, value in arguments.items():
        assert f"{argument}={value!r}" in printed


def test_repr_shows_the_current_parameters():
    prior = GeneralizedGaussian(2, init="laplace")
    with torch.no_grad():
        prior.theta_beta.copy_(torch.tensor([-0.5, 0.25]))
    assert "init='laplace'" in repr(prior)
    assert repr(prior).endswith("; now alpha=[0.00391, 4.29e+09], beta=[-0.5, 0.25], mu=0, theta_alpha=[-2.77, -5.55])")
    assert repr(Laplace(2) + prior).count("now alpha=") == 1  # the term prints its parameters, the sum does not


@pytest.mark.parametrize(
    ("make_part", "attribute"),
    [(SSMax, "s"), (ResidualSSMax, "s"), (NullKey, "logit")],
)
def test_repr_of_logit_scales_and_null_keys_shows_the_learned_numbers(make_part: Any, attribute: str):
    part = make_part(2, init=0.5)
    assert "init=0.5" in repr(part)
    assert repr(part).endswith("; now s=0.5)")
    with torch.no_grad():
        getattr(part, attribute).copy_(torch.tensor([0.25, -1.0]))
    assert repr(part).endswith("; now s=[0.25, -1])")


def test_repr_is_short_for_many_heads_and_for_tables():
    many = GeneralizedGaussian(64, init="spread")
    assert "beta=[-0.5, -0.476, -0.452, -0.429, ..., 0.929, 0.952, 0.976, 1]" in repr(many)
    assert (
        repr(ClippedOffsets(2, max_offset=1000))
        == "ClippedOffsets(num_heads=2, max_offset=1000, init='uniform', learn=['bias'])"
    )


def test_repr_works_on_meta():
    with torch.device("meta"):
        prior = GeneralizedGaussian(2)
    assert repr(prior).endswith("keep_sign=False)")


# ---- shapes and positions


@every_prior
def test_log_prior_has_a_table_per_head(name: str, arguments: dict[str, Any]):
    prior = randomise(make(name, arguments))
    log_prior = prior.log_prior(torch.arange(4, 8), torch.arange(6))
    assert log_prior.shape == (HEADS, 4, 6)
    assert log_prior.dtype == torch.float32
    assert prior.log_prior(torch.arange(4, 8), torch.arange(6), torch.float64).dtype == torch.float64


@every_prior
def test_batched_positions_give_a_table_per_element(name: str, arguments: dict[str, Any]):
    prior = randomise(make(name, arguments))
    queries = torch.tensor([[3, 4, 5], [10, 11, 12]])
    keys = torch.tensor([[0, 1, 2, 3, 4], [8, 9, 10, 11, 12]])

    batched = prior.log_prior(queries, keys)

    assert batched.shape == (2, HEADS, 3, 5)
    for element in range(2):
        torch.testing.assert_close(batched[element], prior.log_prior(queries[element], keys[element]))


@every_prior
def test_one_side_of_the_positions_may_be_batched(name: str, arguments: dict[str, Any]):
    prior = randomise(make(name, arguments))
    positions, row = torch.tensor([[0, 1, 2, 3], [5, 6, 7, 8]]), torch.tensor([2, 9, 4])

    torch.testing.assert_close(
        prior.log_prior(positions, row), prior.log_prior(positions, row.expand(2, -1).contiguous())
    )
    torch.testing.assert_close(
        prior.log_prior(row, positions), prior.log_prior(row.expand(2, -1).contiguous(), positions)
    )


@every_prior
def test_stationary_priors_depend_on_distance_only(name: str, arguments: dict[str, Any]):
    prior = randomise(make(name, arguments))
    here = prior.log_prior(POSITIONS, POSITIONS, torch.float64)
    there = prior.log_prior(POSITIONS + 1000, POSITIONS + 1000, torch.float64)
    if Structure.STATIONARY in prior.structure:
        torch.testing.assert_close(here, there, rtol=0, atol=0)
    else:
        assert not torch.allclose(here, there)


@every_prior
def test_distances_may_have_any_shape(name: str, arguments: dict[str, Any]):
    prior = randomise(make(name, arguments))
    if Structure.STATIONARY not in prior.structure:
        with pytest.raises(TypeError, match="has no log_prior_at"):
            prior.log_prior_at(POSITIONS)
        return
    distance = torch.tensor([[-5, 0, 7], [300, -300, 1]])
    table = prior.log_prior_at(distance)
    assert table.shape == (HEADS, 2, 3)
    for row, column in ((0, 0), (1, 2)):
        torch.testing.assert_close(table[:, row, column], prior.log_prior_at(distance[row, column]))


@every_prior
def test_lanes_reproduce_the_log_prior(name: str, arguments: dict[str, Any]):
    prior = randomise(make(name, arguments))
    queries, keys = torch.tensor([[3, 4, 9], [7, 8, 10]]), torch.tensor([[0, 1, 2, 3], [4, 5, 6, 7]])
    if not prior.structure & Structure.FACTORED:
        with pytest.raises(TypeError, match="not factored"):
            prior.lanes(queries, keys)
        return

    lanes = prior.lanes(queries, keys, dtype=torch.float64)

    whole = torch.einsum("bhir,bjr->bhij", lanes.query, lanes.key)
    torch.testing.assert_close(whole, prior.log_prior(queries, keys, torch.float64))


@every_prior
def test_log_priors_of_keys_are_equal_for_every_query(name: str, arguments: dict[str, Any]):
    prior = randomise(make(name, arguments))
    if Structure.OF_KEYS not in prior.structure:
        with pytest.raises(TypeError, match="does not depend on the key alone"):
            prior.log_prior_of_key(POSITIONS)
        return
    keys = torch.tensor([[0, 1, 2, 3], [4, 5, 6, 7]])
    found = prior.log_prior_of_key(keys, torch.float64)
    assert found.shape == (HEADS, 2, 4)
    expected = prior.log_prior(torch.tensor([[3, 9], [7, 8]]), keys, torch.float64)
    torch.testing.assert_close(found.transpose(0, 1).unsqueeze(-2).expand_as(expected), expected)


@every_prior
@pytest.mark.parametrize(
    ("positions", "message"),
    [
        (torch.tensor(3), "tensor of integers"),
        ([0, 1, 2], "tensor of integers"),
        (torch.arange(3.0), "float32"),
        (torch.tensor([True, False]), "bool"),
    ],
    ids=["scalar", "list", "float", "bool"],
)
def test_positions_must_be_integer_tensors(name: str, arguments: dict[str, Any], positions: Any, message: str):
    prior = make(name, arguments)
    with pytest.raises(ValueError, match=rf"query_positions .*{message}"):
        prior.log_prior(positions, POSITIONS)
    with pytest.raises(ValueError, match=rf"key_positions .*{message}"):
        prior.log_prior(POSITIONS, positions)


# ---- parameters


@every_prior
def test_state_survives_safetensors(name: str, arguments: dict[str, Any]):
    prior = randomise(make(name, arguments))
    again = make(name, arguments)

    again.load_state_dict(load(save(prior.state_dict())), strict=True)

    assert set(again.state_dict()) == {key for key, _ in again.named_parameters()}
    torch.testing.assert_close(
        again.log_prior(POSITIONS, POSITIONS), prior.log_prior(POSITIONS, POSITIONS), rtol=0, atol=0
    )


@pytest.mark.parametrize("inside", [False, True], ids=["alone", "inside-a-model"])
@pytest.mark.parametrize(
    "cast",
    [
        lambda m: m.to(torch.bfloat16),
        lambda m: m.half(),
        lambda m: m.bfloat16(),
        lambda m: m.double(),
        lambda m: m.to("cpu", torch.float16),
    ],
    ids=["to", "half", "bfloat16", "double", "device-and-dtype"],
)
@every_prior_with_parameters
def test_parameters_stay_in_float32_when_the_model_is_cast(
    name: str, arguments: dict[str, Any], cast: Any, inside: bool
):
    prior = randomise(make(name, arguments))
    before = copy.deepcopy(prior.state_dict())

    model = cast(nn.ModuleDict({"prior": prior, "other": nn.Linear(2, 2)}) if inside else prior)

    if inside:
        assert model["other"].weight.dtype != torch.float32
    for key, value in prior.state_dict().items():
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, before[key], rtol=0, atol=0)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("inside", [False, True], ids=["alone", "inside-a-model"])
@every_prior_with_parameters
def test_parameters_stay_in_float32_when_a_state_dict_is_assigned(
    name: str, arguments: dict[str, Any], inside: bool, device: str
):
    """``device`` is the module's device. A module on the meta device can be loaded by assignment only."""
    with torch.device(device):
        prior = make(name, arguments)
    module = nn.ModuleDict({"prior": prior}) if inside else prior
    trains = [parameter.requires_grad for parameter in prior.parameters()]
    saved = {
        f"prior.{key}" if inside else key: value for key, value in randomise(make(name, arguments)).state_dict().items()
    }
    rounded = {key: value.bfloat16() for key, value in saved.items()}
    module.load_state_dict(rounded, assign=True)

    assert {value.dtype for value in rounded.values()} == {torch.bfloat16}
    assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}
    assert [parameter.requires_grad for parameter in prior.parameters()] == trains
    for key, parameter in module.named_parameters():
        assert torch.equal(parameter, rounded[key].float())
    module.load_state_dict(saved, assign=True)
    assert all(torch.equal(parameter, saved[key]) for key, parameter in module.named_parameters())


@every_prior_with_parameters
def test_parameters_move_to_another_device(name: str, arguments: dict[str, Any]):
    for moved in (make(name, arguments).to("meta"), make(name, arguments).to("meta", torch.bfloat16)):
        for parameter in moved.parameters():
            assert parameter.device.type == "meta"
            assert parameter.dtype == torch.float32


@every_prior
def test_priors_may_be_built_on_meta_and_filled_later(name: str, arguments: dict[str, Any]):
    with torch.device("meta"):
        prior = make(name, arguments)
    assert all(parameter.device.type == "meta" for parameter in prior.parameters())
    usual = make(name, arguments)

    prior.to_empty(device="cpu")
    for filled in (prior, usual):
        torch.manual_seed(1)
        filled.reset_parameters()

    for (key, parameter), (_, expected) in zip(prior.named_parameters(), usual.named_parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=0, atol=0, msg=key)
        assert parameter.requires_grad == expected.requires_grad
    torch.testing.assert_close(prior.log_prior(POSITIONS, POSITIONS), usual.log_prior(POSITIONS, POSITIONS))


@every_prior
def test_default_device_does_not_change_an_existing_prior(name: str, arguments: dict[str, Any]):
    prior = make(name, arguments)
    torch.manual_seed(5)
    prior.reset_parameters()
    usual = prior.log_prior(POSITIONS, POSITIONS)
    with torch.device("meta"):
        torch.manual_seed(5)
        prior.reset_parameters()
        found = prior.log_prior(POSITIONS, POSITIONS)
    assert found.device.type == "cpu"
    torch.testing.assert_close(found, usual, rtol=0, atol=0)


@pytest.fixture
def default_bfloat16() -> Iterator[None]:
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(usual)


@pytest.mark.usefixtures("default_bfloat16")
@every_prior
def test_default_dtype_does_not_change_the_prior(name: str, arguments: dict[str, Any]):
    torch.manual_seed(2)
    prior = make(name, arguments)
    below = prior.log_prior(POSITIONS, POSITIONS)
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(2)
    usual = make(name, arguments)

    assert below.dtype == torch.float32
    for parameter, expected in zip(prior.parameters(), usual.parameters(), strict=True):
        assert parameter.dtype == torch.float32
        torch.testing.assert_close(parameter, expected, rtol=0, atol=0)
    torch.testing.assert_close(below, usual.log_prior(POSITIONS, POSITIONS), rtol=0, atol=0)


@every_prior_with_parameters
def test_reset_parameters_restores_the_initial_ones(name: str, arguments: dict[str, Any]):
    prior = make(name, arguments)
    torch.manual_seed(3)
    prior.reset_parameters()
    start = copy.deepcopy(prior.state_dict())
    randomise(prior, seed=4)
    torch.manual_seed(3)
    prior.reset_parameters()
    for key, value in prior.state_dict().items():
        torch.testing.assert_close(value, start[key], rtol=0, atol=0)


@every_prior
def test_natural_parameters_are_per_head(name: str, arguments: dict[str, Any]):
    prior = randomise(make(name, arguments))
    natural = prior.natural_parameters()
    assert bool(natural) == any(True for _ in prior.parameters())
    for value in natural.values():
        assert value.shape[0] == HEADS


def test_every_prior_is_its_only_term():
    for name, samples in SAMPLES.items():
        prior: Prior = make(name, samples[0])
        assert list(prior.terms()) == [prior]


# ---- natural parameters


@every_prior_with_parameters
def test_natural_parameters_are_detached_copies(name: str, arguments: dict[str, Any]):
    prior = make(name, arguments)
    before = prior.natural_parameters()
    kept = {key: value.clone() for key, value in before.items()}

    randomise(prior)

    for key, value in before.items():
        assert not value.requires_grad
        torch.testing.assert_close(value, kept[key], equal_nan=True)
