"""Properties of every encoding in the catalogue."""

import inspect
import json
from typing import Any

import pytest
import torch
from safetensors.torch import load, save

from attention_priors.encodings import ENCODINGS, AdditiveEncoding, Encoding, encoding_from_config

SAMPLES: dict[str, list[dict[str, Any]]] = {
    "sinusoidal": [{"width": 6}, {"width": 8, "base": 77.0}],
    "learned": [{"width": 6, "max_length": 12}],
    "rotary": [
        {"head_dim": 8},
        {
            "head_dim": 4,
            "base": 500.0,
            "scaling": "yarn",
            "factor": 3.0,
            "original_length": 32,
            "base_multiplier": 2.0,
        },
    ],
    "shaw": [{"head_dim": 8}, {"head_dim": 4, "max_offset": 3, "values": False}],
    "linear": [{"width": 5}],
}
"""Constructor arguments by name of the encoding: first the required ones, then all."""

every_encoding = pytest.mark.parametrize(
    ("name", "arguments"),
    [
        pytest.param(name, arguments, id=f"{name}-{number}")
        for name in ENCODINGS
        for number, arguments in enumerate(SAMPLES.get(name, []))
    ],
)


def test_every_encoding_of_the_catalogue_has_a_sample():
    missing = set(ENCODINGS) - set(SAMPLES)
    assert not missing, f"add a sample of {', '.join(sorted(missing))} to SAMPLES in this file"
    for name, encoding in ENCODINGS.items():
        stated = {argument for sample in SAMPLES[name] for argument in sample}
        assert stated == set(inspect.signature(encoding).parameters), name


@every_encoding
def test_configs_survive_json(name: str, arguments: dict[str, Any]):
    torch.manual_seed(0)
    encoding = ENCODINGS[name](**arguments)
    config = encoding.to_config()
    torch.manual_seed(0)
    again = encoding_from_config(json.loads(json.dumps(config)))

    assert config["name"] == name
    assert {key: config[key] for key in arguments} == arguments
    assert again is not None
    assert type(again) is type(encoding)
    assert again.to_config() == config
    for key, value in encoding.state_dict().items():
        torch.testing.assert_close(again.state_dict()[key], value, rtol=0, atol=0)


@every_encoding
def test_the_model_may_supply_sizes(name: str, arguments: dict[str, Any]):
    known = {key: arguments[key] for key in ("width", "head_dim") if key in arguments}
    config = {"name": name} | {key: value for key, value in arguments.items() if key not in known}
    assert len(known) == 1
    encoding = encoding_from_config(config, **{"width": 99, "head_dim": 99, **known})
    assert encoding is not None
    assert encoding.to_config() == ENCODINGS[name](**arguments).to_config()


@every_encoding
def test_state_survives_safetensors(name: str, arguments: dict[str, Any]):
    torch.manual_seed(0)
    encoding, again = ENCODINGS[name](**arguments), ENCODINGS[name](**arguments)
    again.load_state_dict(load(save(encoding.state_dict())), strict=True)
    for key, value in encoding.state_dict().items():
        torch.testing.assert_close(again.state_dict()[key], value, rtol=0, atol=0)
    assert set(encoding.state_dict()) == {key for key, _ in encoding.named_parameters()}


@every_encoding
def test_printed_form_states_the_arguments(name: str, arguments: dict[str, Any]):
    printed = repr(ENCODINGS[name](**arguments))
    for argument, value in arguments.items():
        assert f"{argument}={value!r}" in printed


@every_encoding
def test_additive_encodings_give_a_vector_per_position(name: str, arguments: dict[str, Any]):
    encoding: Encoding = ENCODINGS[name](**arguments)
    if not isinstance(encoding, AdditiveEncoding):
        assert name in ("rotary", "shaw")
        return
    for shape in ((4,), (2, 4), (2, 1, 4)):
        positions = torch.arange(4).expand(shape)
        assert encoding(positions).shape == (*shape, arguments["width"])
        assert encoding(positions).dtype == torch.float32


@every_encoding
def test_encodings_may_be_built_on_meta_and_filled_later(name: str, arguments: dict[str, Any]):
    with torch.device("meta"):
        encoding = ENCODINGS[name](**arguments)
    assert all(parameter.device.type == "meta" for parameter in encoding.parameters())
    encoding.to_empty(device="cpu")
    usual = ENCODINGS[name](**arguments)
    for filled in (encoding, usual):
        torch.manual_seed(1)
        if reset := getattr(filled, "reset_parameters", None):
            reset()
    assert set(encoding.state_dict()) == set(usual.state_dict())
    for key, value in usual.state_dict().items():
        torch.testing.assert_close(encoding.state_dict()[key], value, rtol=0, atol=0)


def test_none_gives_no_encoding():
    assert encoding_from_config(None) is None
    assert encoding_from_config(None, width=4, head_dim=2) is None


def test_a_name_is_a_config():
    encoding = encoding_from_config("rotary", width=32, head_dim=8)
    assert encoding is not None
    assert encoding.to_config() == ENCODINGS["rotary"](head_dim=8).to_config()


def test_unknown_names_raise_an_error_that_lists_known_names():
    with pytest.raises(ValueError, match="unknown encoding 'rope'") as error:
        encoding_from_config("rope", head_dim=8)
    for name in ENCODINGS:
        assert name in str(error.value)


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="'linear' has no argument 'head_dim'; expected one of width"):
        encoding_from_config({"name": "linear", "head_dim": 8})
    with pytest.raises(ValueError, match="'learned' needs the argument 'max_length'"):
        encoding_from_config("learned", width=8)
    with pytest.raises(ValueError, match="head_dim=4, but the model has head_dim=8"):
        encoding_from_config({"name": "rotary", "head_dim": 4}, head_dim=8)
    with pytest.raises(ValueError, match="description of an encoding needs a name, one of sinusoidal"):
        encoding_from_config({"head_dim": 4})
