"""Models and arguments that attach() refuses before any change."""

import re
import warnings
from typing import Any

import pytest
import torch
import transformers as hf
from tiny_models import LLAMA, YARN, tiny, tokens
from torch import nn

from attention_priors import GeneralizedGaussian, Window, prior_from_config
from attention_priors.hf import attach, attached_priors, detach
from attention_priors.models import PriorDecoderConfig, PriorDecoderForCausalLM

SIZES: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}


def refused(model: Any, match: str, **arguments: Any) -> None:
    before = model.config.to_dict() if isinstance(model, hf.PreTrainedModel) else None
    options: dict[str, Any] = {"prior": "laplace"} | arguments
    with pytest.raises(ValueError, match=match):
        attach(model, **options)
    if before is not None:
        assert model.config.to_dict() == before
        assert not attached_priors(model)
        assert not any("_unrotated" in str(hook) for m in model.modules() for hook in m._forward_pre_hooks.values())


def test_invalid_arguments_are_refused() -> None:
    model = tiny("llama")
    refused(nn.Linear(2, 2), "PreTrainedModel, got Linear$")
    refused(None, "PreTrainedModel, got NoneType$")
    refused(nn.DataParallel(tiny("llama")), "got DataParallel: pass the LlamaForCausalLM inside it, and wrap it after")
    refused(model, "nothing to attach: .* set one of them, such as prior='generalized_gaussian'", prior=None)
    refused(model, r"layers contains 2, expected indices of layers with attention: \[0, 1\]", layers=[0, 2])
    refused(model, "layers contains -3", layers=[-3])
    refused(model, "layers must hold at least one layer", layers=[])
    for given in (1, "all", ["0"], [0.5], [True]):
        match = re.escape(f"must be a list of integers such as [0, 1], or None for all; got {given!r}")
        refused(model, f"layers {match}", layers=given)
        refused(model, f"heads {match}", heads=given)
    refused(model, r"heads must be distinct integers from 0 to 3, got \[4\]", heads=[4])
    refused(model, "heads must be distinct", heads=[1, 1])
    refused(model, "heads must be distinct", heads=[])
    refused(model, r"layer 0 \(LlamaAttention\): unknown prior 'alibi'", prior="alibi")
    refused(model, r"layer 0 \(LlamaAttention\): prior has num_heads=8, expected 4", prior=GeneralizedGaussian(8))
    for name in ("share_prior", "drop_positions", "freeze_model"):
        refused(model, f"{name} must be True or False, got 'no'", **{name: "no"})
    refused(model, "for a Window, which hides keys from all heads", prior=Window(2, 4), heads=[0, 1])
    refused(model, "unknown logit scale 'softmax'", logit_scale="softmax")
    attach(model, "laplace")
    with pytest.raises(ValueError, match="detach"):
        attach(model, "laplace")
    with pytest.raises(ValueError, match="no attached priors"):
        detach(tiny("llama"))


@pytest.mark.parametrize("heads", [None, [0, 1, 2]])
@pytest.mark.parametrize("name", ["axial", "spectral_2d", "radial", "key_sink_2d"])
def test_priors_on_grids_are_refused(name: str, heads: list[int] | None) -> None:
    needed = {"axial": {"rows": "laplace"}, "radial": {"prior": "laplace"}, "key_sink_2d": {"rows": 4, "columns": 4}}
    prior = {"name": name} | needed.get(name, {})
    match = rf"layer 0 \(LlamaAttention\): prior must be over a line, got '{name}', which is over a grid: tokens"
    refused(tiny("llama"), match, prior=prior, heads=heads)
    refused(tiny("llama"), match, prior=["uniform", prior], heads=heads)
    refused(tiny("llama"), match, prior=prior_from_config(prior, 3 if heads else 4), heads=heads)


def everything_of(model: Any) -> dict[str, Any]:
    """Return everything of a model that attach() changes."""
    return {
        "parts": [name for name, module in model.named_modules() if "attached" in name],
        "hooks": [(name, [*m._forward_pre_hooks], [*m._forward_hooks]) for name, m in model.named_modules()],
        "learning": [name for name, parameter in model.named_parameters() if parameter.requires_grad],
        "configs": [id(module.config) for module in model.modules() if hasattr(module, "config")],
        "implementation": model.config._attn_implementation,
        "config": model.config.to_dict(),
    }


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("error", [ValueError("kernels"), KeyboardInterrupt()])
def test_an_error_in_attach_leaves_the_model_unchanged(
    family: str, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = tiny(family)
    next(model.parameters()).requires_grad_(False)
    before, logits = everything_of(model), model(tokens(1, 8)).logits
    plain = hf.PreTrainedModel.set_attn_implementation

    def broken(self: Any, name: str) -> None:
        plain(self, name)
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(hf.PreTrainedModel, "set_attn_implementation", broken)
        with pytest.raises(type(error)):
            attach(model, "laplace", drop_positions=True, freeze_model=True)
    assert everything_of(model) == before
    assert torch.equal(model(tokens(1, 8)).logits, logits)
    attach(model, "laplace", drop_positions=True, freeze_model=True)
    detach(model)
    assert everything_of(model) | {"configs": None} == before | {"configs": None}


def test_an_error_in_detach_leaves_all_attached(monkeypatch: pytest.MonkeyPatch) -> None:
    model = attach(tiny("gpt2"), "laplace", drop_positions=True, freeze_model=True)
    before = everything_of(model)

    def broken(self: Any, name: str) -> None:
        raise ValueError("kernels")

    with monkeypatch.context() as patch:
        patch.setattr(hf.PreTrainedModel, "set_attn_implementation", broken)
        with pytest.raises(ValueError, match="kernels"):
            detach(model)
    assert everything_of(model) == before
    detach(model)
    assert not attached_priors(model)


def test_detach_works_after_layers_were_removed() -> None:
    model: Any = attach(tiny("llama"), "laplace", freeze_model=True)
    model.model.layers = model.model.layers[:1]
    model.config.num_hidden_layers = 1
    detach(model)
    assert not attached_priors(model)
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert model.config._attn_implementation == "sdpa"
    assert len(attached_priors(attach(model, "laplace"))) == 1


def test_models_that_bypass_the_interface_are_refused() -> None:
    bloom = hf.BloomForCausalLM(hf.BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=4))
    refused(bloom, r"BloomAttention.*use_priors\(model\) computes its own bias as a prior")
    falcon: Any = hf.FalconConfig(**SIZES)
    refused(hf.FalconForCausalLM(falcon), r"attention modules: FalconAttention\)$")
    ours = PriorDecoderConfig(**SIZES, intermediate_size=48, prior="laplace")
    refused(PriorDecoderForCausalLM(ours), r"set its prior in its config instead, PriorDecoderConfig\(prior=\.\.\.\)")
    refused(hf.MambaForCausalLM(hf.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1)), "no attention")


def test_models_with_unsupported_attention_are_refused() -> None:
    config: Any = hf.Gemma2Config(**SIZES, intermediate_size=48, num_key_value_heads=2, head_dim=8)
    refused(hf.Gemma2ForCausalLM(config), r"layer 0 \(Gemma2Attention\): attend\(\) does not support capped logits")
    some = tiny("llama")  # like DeepSeek-V4, whose attention compresses keys
    some.model.layers[1].self_attn.sinks = nn.Parameter(torch.zeros(4))
    refused(
        some,
        r"layer 1 \(LlamaAttention\): sinks are supported for model types gpt_oss, granite_swa, mimo_v2_flash only",
    )
    refused(some, r"layer 1 \(LlamaAttention\), which is not in layers: sinks are supported", layers=[0])


def test_encoders_without_numbered_layers_are_refused() -> None:
    config: Any = hf.DistilBertConfig(vocab_size=64, dim=32, hidden_dim=48, n_layers=2, n_heads=4)
    refused(hf.DistilBertForMaskedLM(config), r"without an index \(layer None, DistilBertSelfAttention\)$")


def test_causal_priors_are_refused_in_encoders() -> None:
    config: Any = hf.BertConfig(**SIZES, intermediate_size=48)
    slope: dict[str, Any] = {"name": "key_sink", "train_length": 16, "init": "recency"}
    refused(hf.BertForMaskedLM(config), r"layer 0 \(BertSelfAttention\): .* needs a causal mask", prior=slope)


def test_positions_that_cannot_be_dropped_are_refused() -> None:
    refused(tiny("gpt2"), "apply it to all layers", drop_positions=True, layers=[0])
    attach(tiny("gpt2"), "laplace", drop_positions=True, layers=[0, 1])
    attach(tiny("llama"), "laplace", drop_positions=True, layers=[0])
    of_types = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}, "full_attention": YARN}
    refused(tiny("gemma3", rope_parameters=of_types), r"equal attention factor.* 1\.0, 1\.138", drop_positions=True)


def test_masks_without_query_positions_are_refused() -> None:
    model = attach(tiny("llama"), "laplace")
    module = model.model.layers[0].self_attn
    query, key = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 7, 8)
    from attention_priors.hf.interface import attention_forward

    with pytest.raises(ValueError, match="3 queries and 7 keys"):
        attention_forward(module, query, key, key, None)
    with pytest.raises(ValueError, match="passes indices"):
        attention_forward(module, query, key, key, None, indices=torch.zeros(1, 3, 2, dtype=torch.long))
    with pytest.raises(ValueError, match="passes softcap"):
        attention_forward(module, query, key, key, None, softcap=30.0)
    with pytest.raises(ValueError, match="attention_mask must have shape"):
        attention_forward(module, query, key, key, torch.ones(1, 7))
    assert model(tokens(1, 4)).logits.shape == (1, 4, 64)


def test_masks_without_text_starts_are_refused_for_absolute_priors() -> None:
    """Such a mask determines distances, but not a key's position, which counts from the first token after padding."""
    ids = tokens(1, 6)
    seen = torch.ones(6, 6, dtype=torch.bool).tril().expand(1, 1, 6, 6).clone()
    padded = seen.clone()
    padded[..., 0] = False
    places = torch.tensor([[0, 0, 1, 2, 3, 4]])
    near = attach(tiny("llama"), "laplace")
    alone = near(ids[:, 1:]).logits
    found = near(ids, attention_mask=padded, position_ids=places).logits[:, 1:]
    torch.testing.assert_close(found, alone, rtol=0, atol=1e-5)
    absolute = attach(tiny("llama"), {"name": "key_sink", "train_length": 16})
    torch.testing.assert_close(absolute(ids, attention_mask=seen).logits, absolute(ids).logits, rtol=0, atol=1e-5)
    for mask in (padded, torch.zeros(1, 1, 6, 6).masked_fill(~padded, torch.finfo(torch.float32).min)):
        with pytest.raises(ValueError, match=r"hides a row's first key from all queries"):
            absolute(ids, attention_mask=mask, position_ids=places)


def test_a_prompt_beyond_rotary_positions_raises_an_early_warning() -> None:
    model, long = attach(tiny("llama"), "laplace"), tokens(1, 256)
    with pytest.warns(UserWarning, match="the input has 256 positions, but the config of LlamaForCausalLM states 128"):
        model.generate(long, max_new_tokens=1)
    packed = torch.arange(256).remainder(128)[None]
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        model(long, position_ids=packed, use_cache=False)
        model(long[:, :128])
        attach(detach(model), "laplace", drop_positions=True)(long)


def test_a_prompt_beyond_learned_positions_is_refused() -> None:
    model, long = attach(tiny("gpt2"), "laplace"), tokens(1, 256)
    for call in (lambda: model(long), lambda: model.generate(long, max_new_tokens=1)):
        with pytest.raises(ValueError, match=r"256 positions, but GPT2LMHeadModel has a table of 128 .*drop_positions"):
            call()
    assert attach(detach(model), "laplace", drop_positions=True)(long).logits.shape == (1, 256, 64)


def test_cross_attention_is_unchanged() -> None:
    model = hf.MllamaForCausalLM(hf.MllamaTextConfig(**LLAMA, cross_attention_layers=[1]))
    assert sorted(attached_priors(attach(model, "laplace"))) == [0]
    refused(hf.MllamaForCausalLM(model.config), r"layers with attention: \[0\]", layers=[1])


@pytest.mark.parametrize("layers", [None, [1]])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_switching_the_attention_implementation_is_refused(family: str, layers: list[int] | None) -> None:
    model, ids = tiny(family), tokens(1, 8)
    with torch.no_grad():
        plain = model(ids).logits
        attached = attach(model, "laplace", layers=layers)(ids).logits
        assert not torch.equal(attached, plain)
        model.set_attn_implementation("sdpa")
        for call in (lambda: model(ids), lambda: model.base_model(ids), lambda: model.generate(ids, max_new_tokens=2)):
            with pytest.raises(
                RuntimeError, match=r"'sdpa'.*would ignore.*set_attn_implementation\('attention_priors'\)"
            ):
                call()
        model.set_attn_implementation("attention_priors")
        assert torch.equal(model(ids).logits, attached)
        model.set_attn_implementation("eager")
        detach(model)
        assert model.config._attn_implementation == "sdpa"
        assert torch.equal(model(ids).logits, plain)
        assert torch.equal(attach(model, "laplace", layers=layers)(ids).logits, attached)
