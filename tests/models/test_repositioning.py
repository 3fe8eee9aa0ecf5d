"""New positions for a trained decoder: kept weights, new weights, and results."""

from typing import Any

import pytest
import torch
from tiny_decoders import VARIANTS, VOCABULARY, tiny_config

from attention_priors.models import PriorDecoderForCausalLM
from attention_priors.models.repositioning import with_positions
from attention_priors.priors import GeneralizedGaussian

GGD = {"name": "generalized_gaussian", "init": "uniform"}
YARN = {"name": "rotary", "scaling": "yarn", "factor": 4.0, "original_length": 16}


def _trained(**positions: Any) -> PriorDecoderForCausalLM:
    """Return a decoder all of whose weights differ from their initial values."""
    torch.manual_seed(0)
    model = PriorDecoderForCausalLM(tiny_config(**positions))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return model.eval()


@torch.no_grad()
def _logits(model: PriorDecoderForCausalLM) -> torch.Tensor:
    tokens = torch.randint(VOCABULARY, (2, 40), generator=torch.Generator().manual_seed(1))
    return model(tokens).logits


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_no_change_gives_an_equal_model(variant):
    model = _trained(**VARIANTS[variant])
    made = with_positions(model, {})
    assert made is not model
    assert torch.equal(_logits(made), _logits(model))
    assert all(a is not b for a, b in zip(made.parameters(), model.parameters(), strict=True))
    assert [p.requires_grad for p in made.parameters()] == [p.requires_grad for p in model.parameters()]


@pytest.mark.parametrize(
    "changes",
    [
        {"prior": GGD},
        {"prior": GGD, "share_prior": True},
        {"prior": [GGD, {"name": "spectral"}], "logit_scale": "residual_ssmax"},
        {"prior": "relative_buckets", "logit_scale": "residual_ssmax"},
        {"logit_scale": "residual_ssmax"},
    ],
)
def test_a_uniform_prior_equals_the_model_without_rotary_positions(changes):
    model = _trained(encoding="rotary")
    dropped = with_positions(model, {"encoding": None})
    attached = with_positions(model, {"encoding": None, **changes})
    new = {name for name, _ in attached.named_parameters()} - {name for name, _ in dropped.named_parameters()}
    assert new
    expected = _logits(dropped)
    rounding = 64 * torch.finfo(torch.float32).eps * float(expected.abs().max())
    assert torch.allclose(_logits(attached), expected, rtol=0, atol=rounding)
    assert not torch.allclose(_logits(dropped), _logits(model), rtol=0, atol=1e-2)
    # The prior learns.
    with torch.no_grad():
        for name, parameter in attached.named_parameters():
            if name in new:
                parameter += 0.5
    assert not torch.allclose(_logits(attached), _logits(dropped), rtol=0, atol=1e-3)


def test_dropped_positions_equal_a_model_built_without_them():
    model = _trained(encoding="rotary")
    bare = PriorDecoderForCausalLM(tiny_config()).eval()
    bare.load_state_dict(model.state_dict())
    assert torch.equal(_logits(with_positions(model, {"encoding": None})), _logits(bare))


@pytest.mark.parametrize("encoding", [YARN, {"name": "rotary", "scaling": "linear", "factor": 4.0}])
def test_scaled_positions_equal_a_model_with_that_config(encoding):
    model = _trained(encoding="rotary")
    scaled = PriorDecoderForCausalLM(tiny_config(encoding=encoding)).eval()
    scaled.load_state_dict(model.state_dict())
    made = with_positions(model, {"encoding": encoding})
    assert torch.equal(_logits(made), _logits(scaled))
    assert made.config.encoding == encoding
    assert not torch.allclose(_logits(made), _logits(model), rtol=0, atol=1e-2)


def test_changed_parts_are_new_and_seeded_and_others_are_kept():
    model = _trained(prior={"name": "generalized_gaussian", "init": "laplace"}, logit_scale="ssmax", encoding="rotary")
    changes = {"prior": {"name": "generalized_gaussian", "init": "sampled"}, "encoding": None}
    made = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        made.append(with_positions(model, changes).state_dict())
    old = model.state_dict()
    for name, weight in made[0].items():
        same_seed, other_seed = (torch.equal(weight, other[name]) for other in made[1:])
        assert same_seed
        if ".prior." in name and "theta_mu" not in name:
            assert not other_seed
            assert not torch.equal(weight, old[name])
        elif ".prior." not in name:
            assert torch.equal(weight, old[name])


def test_equivalent_configs_change_nothing():
    model = _trained(prior={"name": "laplace", "learn": True}, logit_scale="ssmax", encoding="rotary")
    heads = model.config.num_attention_heads
    made = with_positions(
        model,
        {
            "prior": {"name": "laplace", "learn": True, "num_heads": heads},
            "logit_scale": {"name": "ssmax", "init": 1.0},
            "encoding": {"name": "rotary", "base": 10000},
        },
    )
    assert torch.equal(_logits(made), _logits(model))


def test_a_shared_prior_becomes_one_per_layer():
    model = _trained(prior="relative_buckets", share_prior=True)
    made = with_positions(model, {"share_prior": False})
    assert made.model.prior is None
    own = [name for name in made.state_dict() if ".prior." in name]
    assert [name.split(".self_attn.")[0] for name in own] == ["model.layers.0", "model.layers.1"]
    # Without a prior, nothing changes.
    assert torch.equal(_logits(with_positions(_trained(), {"share_prior": True})), _logits(_trained()))


def test_learned_tables_can_be_removed_and_added():
    model = _trained(encoding={"name": "learned", "max_length": 64})
    dropped = with_positions(model, {"encoding": None})
    assert not any("encoding" in name for name in dropped.state_dict())
    longer = with_positions(model, {"encoding": {"name": "learned", "max_length": 128}})
    assert longer.model.encoding is not None
    assert torch.equal(longer.model.embed_tokens.weight, model.model.embed_tokens.weight)


def test_dtype_mode_and_frozen_parameters_are_kept():
    model = _trained(encoding="rotary").to(dtype=torch.bfloat16)  # pyright: ignore[reportCallIssue]
    model.model.embed_tokens.weight.requires_grad_(False)
    made = with_positions(model, {"prior": GGD | {"learn": ["beta"]}})
    assert not made.training
    assert made.model.norm.weight.dtype == torch.bfloat16
    assert not made.model.embed_tokens.weight.requires_grad
    prior, _ = (module for module in made.modules() if isinstance(module, GeneralizedGaussian))
    assert {name: p.requires_grad for name, p in prior.named_parameters()} == {
        "theta_alpha": False, "theta_beta": True, "theta_mu": False,
    }  # fmt: skip
    assert {p.dtype for p in prior.parameters()} == {torch.float32}


def test_repositioned_models_can_be_saved(tmp_path):
    made = with_positions(_trained(encoding="rotary"), {"encoding": None, "prior": GGD})
    made.save_pretrained(tmp_path)
    assert torch.equal(_logits(PriorDecoderForCausalLM.from_pretrained(tmp_path).eval()), _logits(made))


def test_incompatible_changes_are_refused():
    model = _trained(encoding="rotary")
    with pytest.raises(ValueError, match=r"changes must set only prior, .*; got 'hidden_size'"):
        with_positions(model, {"hidden_size": 64})
    with pytest.raises(ValueError, match="unknown encoding 'rope'"):
        with_positions(model, {"encoding": "rope"})
    model.config.intermediate_size += 1
    with pytest.raises(
        ValueError, match=r"6 weights of model do not fit .*mlp\.down_proj\.weight \(torch.float32 \(32, 48\), now"
    ):
        with_positions(model, {"encoding": None})
    model.config.intermediate_size -= 1
    model.model.register_parameter("extra", torch.nn.Parameter(torch.zeros(1)))
    with pytest.raises(ValueError, match=r"1 weights of model .*: model\.extra \(torch.float32 \(1,\), now missing\)"):
        with_positions(model, {"encoding": None})
