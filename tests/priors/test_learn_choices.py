"""``learn=`` chooses which parameters train."""

from typing import Any

import pytest
from prior_samples import SAMPLES, make

from attention_priors.priors import CATALOGUE, GeneralizedGaussian, KeySink, Laplace

PARAMETERS: dict[str, dict[str, tuple[str, ...]]] = {
    "laplace": {"slope": ("log_slope",)},
    "generalized_gaussian": {"alpha": ("theta_alpha",), "beta": ("theta_beta",), "mu": ("theta_mu",)},
    "spectral": {"alpha": ("alpha",), "beta": ("beta",)},
    "key_sink": {
        "slope": ("slope",),
        "gain": ("gain",),
        "bump": ("bump",),
        "mlp": ("mlp.0.weight", "mlp.0.bias", "mlp.2.weight", "mlp.2.bias"),
    },
    "key_sink_2d": {
        "gain": ("gain",),
        "bump": ("bump",),
        "mlp": ("mlp.0.weight", "mlp.0.bias", "mlp.2.weight", "mlp.2.bias"),
    },
    "fire": {"hidden": ("hidden",), "outer": ("outer",), "c": ("log_c",), "threshold": ("log_threshold",)},
    "relative_buckets": {"bias": ("bias",)},
    "clipped_offsets": {"bias": ("bias",)},
}
"""Parameters that train, by prior and names in ``learn=``."""

CHOICES = [(name, choice) for name, choices in PARAMETERS.items() for choice in choices]


def build(name: str, learn: Any):
    return make(name, SAMPLES[name][0] | {"learn": learn})


def training(prior: Any) -> set[str]:
    return {key for key, parameter in prior.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize("name", [name for name, prior in CATALOGUE.items() if prior.learnable])
def test_choices_partition_the_parameters(name: str):
    parts = [training(build(name, choice)) for choice in CATALOGUE[name].learnable]
    assert all(parts)
    assert sorted(key for part in parts for key in part) == sorted(training(build(name, True)))


@pytest.mark.parametrize("form", [str, lambda choice: [choice], lambda choice: {choice}])
@pytest.mark.parametrize(("name", "choice"), CHOICES)
def test_one_name_trains_only_its_parameters(name: str, choice: str, form: Any):
    prior = build(name, form(choice))
    assert training(prior) == set(PARAMETERS[name][choice])
    assert prior.to_config()["learn"] == [choice]


@pytest.mark.parametrize("name", list(PARAMETERS))
def test_true_trains_all_and_false_none(name: str):
    assert training(build(name, True)) == {key for keys in PARAMETERS[name].values() for key in keys}
    assert build(name, True).to_config()["learn"] == list(PARAMETERS[name])
    for none in (False, ()):
        assert training(build(name, none)) == set()
        assert build(name, none).to_config()["learn"] == []


@pytest.mark.parametrize("name", list(PARAMETERS))
def test_unknown_names_raise_an_error_that_lists_known_names(name: str):
    known = ", ".join(PARAMETERS[name])
    for learn in ("everything", [next(iter(PARAMETERS[name])), "everything"]):
        with pytest.raises(ValueError, match=rf"learn=.* can learn {known}, not 'everything'"):
            build(name, learn)


def test_choices_have_a_canonical_order():
    assert GeneralizedGaussian(2, learn=["mu", "alpha"]).to_config()["learn"] == ["alpha", "mu"]


def test_default_choices():
    assert training(Laplace(2)) == set()
    assert training(GeneralizedGaussian(2)) == {"theta_alpha", "theta_beta"}
    mlp = set(PARAMETERS["key_sink"]["mlp"])
    assert training(KeySink(2, 8)) == {"gain", "bump"} | mlp
    assert training(KeySink(2, 8, init="recency")) == {"slope", "gain", "bump"} | mlp
    assert training(build("relative_buckets", True)) == training(make("relative_buckets", {}))
    assert training(build("clipped_offsets", True)) == training(make("clipped_offsets", {}))
    assert training(make("spectral", {})) == {"alpha", "beta"}
