from typing import Any

import pytest
import torch
from torch import nn
from training_cases import tiny_decoder, tiny_settings

from attention_priors import LearnedTable, RelativeBuckets, SSMax
from attention_priors.lab.train import make_optimizer, parameter_groups

MODELS: dict[str, dict[str, Any]] = {
    "a prior and a scale per layer": {},
    "one prior for all layers": {"share_prior": True},
    "a sum of priors": {"prior": [{"name": "laplace", "learn": True}, {"name": "clipped_offsets"}]},
    "a prior with matrices of its own": {"prior": {"name": "key_sink", "train_length": 8}},
    "a fixed prior": {"prior": "laplace"},
    "a learned table": {"prior": None, "encoding": {"name": "learned", "max_length": 20}},
    "nothing of the kind": {"prior": None, "logit_scale": None},
    "embeddings apart": {"tie_word_embeddings": False},
}


def _by_name(model: nn.Module, **settings: Any) -> dict[str, dict[str, Any]]:
    """Return the group of each parameter, by name."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = parameter_groups(model, tiny_settings(**settings))
    return {names[parameter]: group for group in groups for parameter in group["params"]}


@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS.keys())
def test_every_trainable_parameter_is_in_exactly_one_group(changes):
    model = tiny_decoder(**changes)
    grouped = [p for group in parameter_groups(model, tiny_settings()) for p in group["params"]]
    assert len(grouped) == len(set(grouped))
    assert set(grouped) == {parameter for parameter in model.parameters() if parameter.requires_grad}


@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS.keys())
def test_only_matrices_outside_of_priors_decay(changes):
    model = tiny_decoder(**changes)
    for name, group in _by_name(model, weight_decay=0.3).items():
        is_matrix = model.get_parameter(name).dim() > 1 and ".prior." not in f".{name}"
        assert group["weight_decay"] == (0.3 if is_matrix else 0.0), name


@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS.keys())
def test_priors_and_scales_have_multiples_of_the_learning_rate(changes):
    groups = _by_name(
        tiny_decoder(**changes),
        learning_rate=0.02,
        prior_learning_rate_multiplier=5.0,
        logit_scale_learning_rate_multiplier=0.5,
    )
    for name, group in groups.items():
        multiplier = 5.0 if ".prior." in f".{name}" else 0.5 if ".logit_scale." in name else 1.0
        assert group["lr"] == pytest.approx(0.02 * multiplier), name


def test_frozen_parameters_are_omitted():
    model = tiny_decoder()
    model.model.embed_tokens.requires_grad_(False)
    names = set(_by_name(model))
    assert "model.embed_tokens.weight" not in names
    assert not any("theta_mu" in name for name in names)  # frozen by the prior itself
    assert any("theta_alpha" in name for name in names)


def test_other_kinds_of_models_are_grouped():
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 4)
            self.bias_of_heads = RelativeBuckets(2)
            self.scale = SSMax(2)
            self.table = LearnedTable(3, 5)

    groups = {group["name"]: group["params"] for group in parameter_groups(Mixed(), tiny_settings())}
    sizes = {name: [tuple(p.shape) for p in parameters] for name, parameters in groups.items()}
    assert sizes == {
        "matrices": [(4, 3), (5, 3)],
        "vectors": [(4,)],
        "prior": [(2, 32)],
        "logit_scale": [(2,)],
    }


@pytest.mark.parametrize(("name", "kind"), [("radam", torch.optim.RAdam), ("adamw", torch.optim.AdamW)])
def test_weight_decay_is_decoupled_and_applies_to_matrices_only(name, kind):
    model = tiny_decoder()
    optimizer = make_optimizer(
        model, tiny_settings(optimizer=name, learning_rate=0.1, weight_decay=0.5, betas=(0.8, 0.9))
    )
    assert isinstance(optimizer, kind)
    assert all(group["betas"] == (0.8, 0.9) for group in optimizer.param_groups)
    before = {key: parameter.detach().clone() for key, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    # Several steps, because the first steps of RAdam do not distinguish the two kinds of decay.
    for _ in range(10):
        optimizer.step()
    for key, parameter in model.named_parameters():
        # Without a gradient, decoupled decay multiplies by 1 - lr * decay. Decay as a part of the gradient would move
        # every number by about lr.
        factor = 0.95**10 if parameter.dim() > 1 else 1.0
        torch.testing.assert_close(parameter.detach(), before[key] * factor, msg=key)
