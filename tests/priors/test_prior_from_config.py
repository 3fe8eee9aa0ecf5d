import re

import pytest
import torch

from attention_priors.config import COMMON_NAMES
from attention_priors.encodings.catalogue import ENCODINGS, encoding_from_config
from attention_priors.priors import (
    CATALOGUE,
    KeySink,
    Laplace,
    Spectral,
    Window,
    prior_from_config,
)
from attention_priors.priors.sum import Sum


def test_a_name_is_a_config():
    assert prior_from_config("laplace", 4).to_config() == Laplace(4).to_config()


def test_a_list_is_a_sum():
    prior = prior_from_config([{"name": "laplace"}, {"name": "window", "size": 3}], 2)
    assert isinstance(prior, Sum)
    assert prior.to_config() == (Laplace(2) + Window(2, 3)).to_config()


def test_lists_may_hold_names():
    prior = prior_from_config(["laplace", "spectral"], 2)  # pyright: ignore[reportArgumentType]
    assert [type(term) for term in prior.terms()] == [Laplace, Spectral]


def test_sums_survive_their_config():
    prior = Laplace(2, slopes=[1.0, 0.1]) + KeySink(2, 16, init="recency") + Window(2, 5)
    again = prior_from_config(prior.to_config())
    assert again.to_config() == prior.to_config()
    positions = torch.arange(8)
    torch.testing.assert_close(again.log_prior(positions, positions), prior.log_prior(positions, positions))
    assert prior_from_config(prior.to_config(), 2).to_config() == prior.to_config()


def test_sums_may_nest_in_configs():
    inner = {"name": "sum", "priors": [{"name": "laplace"}, {"name": "uniform"}]}
    prior = prior_from_config([inner, {"name": "window", "size": 2}], 3)
    assert [term.name for term in prior.terms()] == ["laplace", "uniform", "window"]
    assert [part["name"] for part in prior.to_config()["priors"]] == ["laplace", "uniform", "window"]


@pytest.mark.parametrize("config", ["lapalce", {"name": "lapalce"}, [{"name": "lapalce"}]])
def test_unknown_names_raise_an_error_that_lists_known_names(config: object):
    with pytest.raises(ValueError, match="unknown prior 'lapalce'") as error:
        prior_from_config(config, 2)  # pyright: ignore[reportArgumentType]
    for name in CATALOGUE:
        assert name in str(error.value)


@pytest.mark.parametrize("name", ["ALiBi", *COMMON_NAMES])
def test_names_of_the_literature_raise_an_error_with_the_catalogues_name(name: str):
    with pytest.raises(ValueError, match=f"unknown prior '{name}'; expected one of") as error:
        prior_from_config(name, 2)
    answer = str(error.value).rsplit("; ", 1)[1]
    assert set(re.findall(r" '(\w+)'", answer)) & {*CATALOGUE, *ENCODINGS}


def test_a_prior_named_as_an_encoding_raises_a_helpful_error():
    with pytest.raises(ValueError, match=r"unknown encoding 't5'; .*; T5's bias is the prior 'relative_buckets'"):
        encoding_from_config("t5")


def test_unknown_arguments_raise_an_error_that_lists_known_arguments():
    with pytest.raises(ValueError, match=r"'laplace' has no argument 'slope'.*num_heads, slopes, learn"):
        prior_from_config({"name": "laplace", "slope": 1.0}, 2)


def test_missing_arguments_are_refused():
    with pytest.raises(ValueError, match="'window' needs the argument 'size'"):
        prior_from_config("window", 2)
    with pytest.raises(ValueError, match="'laplace' needs the argument 'num_heads'"):
        prior_from_config("laplace")


def test_conflicting_numbers_of_heads_are_refused():
    with pytest.raises(ValueError, match=r"num_heads=3.*the model has num_heads=4"):
        prior_from_config({"name": "laplace", "num_heads": 3}, 4)
    with pytest.raises(ValueError, match=r"num_heads=3.*the model has num_heads=4"):
        prior_from_config((Laplace(3) + Window(3, 2)).to_config(), 4)


def test_a_config_without_a_name_is_refused():
    with pytest.raises(ValueError, match="description of a prior needs a name, one of uniform"):
        prior_from_config({"num_heads": 3})
    with pytest.raises(ValueError, match="needs a name"):
        prior_from_config(3)  # pyright: ignore[reportArgumentType]


def test_unknown_keys_of_a_sum_are_refused():
    with pytest.raises(ValueError, match=r"the keys 'name' and 'priors'.*num_heads"):
        prior_from_config({"name": "sum", "priors": [{"name": "laplace"}], "num_heads": 2})
    with pytest.raises(ValueError, match=r"the keys 'name' and 'priors'"):
        prior_from_config({"name": "sum"})


@pytest.mark.parametrize("priors", [None, 3, "laplace", {"name": "laplace"}])
def test_a_sum_without_a_list_is_refused(priors: object):
    with pytest.raises(ValueError, match=re.escape(f"priors must be a list of descriptions, got {priors!r}")):
        prior_from_config({"name": "sum", "priors": priors}, 2)


def test_empty_lists_are_refused():
    with pytest.raises(ValueError, match="at least one prior"):
        prior_from_config([], 2)
