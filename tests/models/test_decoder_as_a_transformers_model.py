"""Features of transformers' models: generation, saving, loading, casting, gradient checkpointing, config checks."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_decoders import DISTINCT, VARIANTS, logits_of, tiny_config, tiny_decoder, tokens
from torch import Tensor

from attention_priors import alibi_slopes
from attention_priors.attention.logit_scale import LOGIT_SCALES
from attention_priors.models import PriorDecoderConfig, PriorDecoderForCausalLM, PriorDecoderModel
from attention_priors.priors import Laplace
from thoroughness import each_once, every_other_deep

NEW = 6


def greedy(model: PriorDecoderForCausalLM, ids: Tensor) -> Tensor:
    """Generate one token after the other, without a cache."""
    for _ in range(NEW):
        ids = torch.cat([ids, logits_of(model, ids)[:, -1:].argmax(-1)], 1)
    return ids


def generated(model: PriorDecoderForCausalLM, ids: Tensor, **options: Any) -> Tensor:
    found = model.generate(  # pyright: ignore[reportAttributeAccessIssue]
        ids,
        do_sample=False,
        max_new_tokens=NEW,
        pad_token_id=0,
        **{"attention_mask": torch.ones_like(ids)} | options,
    )
    assert isinstance(found, Tensor)
    return found


@pytest.mark.parametrize("variant", every_other_deep(VARIANTS, DISTINCT))
def test_generate_matches_a_loop_without_cache(variant: str) -> None:
    # With narrow embeddings, positions alone would decide the next token.
    model, ids = tiny_decoder(**VARIANTS[variant], initializer_range=1.0), tokens(2, 5)
    expected = greedy(model, ids)
    assert len(set(expected[:, 5:].flatten().tolist())) > 1
    assert torch.equal(generated(model, ids), expected)
    assert torch.equal(generated(model, ids, use_cache=False), expected)


@pytest.mark.parametrize("variant", every_other_deep(VARIANTS, DISTINCT))
def test_left_padding_changes_no_generated_token(variant: str) -> None:
    model = tiny_decoder(**VARIANTS[variant])
    sequences = [tokens(1, length, seed) for seed, length in enumerate((6, 2, 4))]
    ids = torch.cat([torch.nn.functional.pad(x, (6 - x.shape[1], 0)) for x in sequences])
    found = generated(model, ids, attention_mask=(ids != 0).long())
    for row, sequence in enumerate(sequences):
        assert torch.equal(found[row : row + 1, 6 - sequence.shape[1] :], greedy(model, sequence))


def test_beam_search_reorders_the_cache() -> None:
    model, ids = tiny_decoder(prior="laplace"), tokens(2, 5)
    flags: dict[str, Any] = {"num_beams": 3, "do_sample": False, "max_new_tokens": NEW, "pad_token_id": 0}
    with_cache = model.generate(ids, **flags)  # pyright: ignore[reportAttributeAccessIssue]
    without = model.generate(ids, use_cache=False, **flags)  # pyright: ignore[reportAttributeAccessIssue]
    assert torch.equal(with_cache, without)


def described(config: PriorDecoderConfig) -> dict[str, Any]:
    """Return a config's content, without the place that it was loaded from."""
    return {name: value for name, value in config.to_dict().items() if name != "_name_or_path"}


@pytest.mark.parametrize(("variant", "tied"), each_once(VARIANTS, [True, False]))
def test_saved_models_load_with_equal_logits(variant: str, tied: bool, tmp_path: Path) -> None:
    model, ids = tiny_decoder(torch.float32, **VARIANTS[variant], tie_word_embeddings=tied), tokens(2, 9)
    model.save_pretrained(tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert "model.safetensors" in names
    assert not any(name.endswith((".bin", ".pt", ".pth", ".pkl")) for name in names)
    found: Any = PriorDecoderForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    loaded, report = found
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert described(loaded.config) == described(model.config)
    for (name, saved), (same, tensor) in zip(model.named_parameters(), loaded.named_parameters(), strict=True):
        assert name == same
        assert torch.equal(saved, tensor), name
    # Not bitwise equal: weights in a mapped file have another alignment, which changes the order of sums.
    torch.testing.assert_close(logits_of(loaded.eval(), ids), logits_of(model, ids), rtol=1e-5, atol=1e-5)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == "prior_decoder"
    assert described(PriorDecoderConfig.from_pretrained(tmp_path)) == described(model.config)


@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_may_be_tied(tied: bool, tmp_path: Path) -> None:
    model = tiny_decoder(torch.float32, tie_word_embeddings=tied)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    model.save_pretrained(tmp_path)
    loaded = PriorDecoderForCausalLM.from_pretrained(tmp_path)
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    model(tokens(1, 5), labels=tokens(1, 5)).loss.backward()
    assert model.lm_head.weight.grad is not None


def test_layers_may_share_a_prior() -> None:
    shared = tiny_decoder(prior={"name": "laplace", "learn": True}, share_prior=True)
    apart = tiny_decoder(prior={"name": "laplace", "learn": True})
    count = {model: sum(isinstance(m, Laplace) for m in model.modules()) for model in (shared, apart)}
    assert count == {shared: 1, apart: 2}
    # One prior in all layers, against equal numbers in separate priors.
    state = {name: tensor for name, tensor in shared.state_dict().items() if "prior" not in name}
    slope = shared.state_dict()["model.prior.log_slope"]
    state |= {f"model.layers.{layer}.self_attn.prior.log_slope": slope for layer in (0, 1)}
    apart.load_state_dict(state)
    ids = tokens(2, 9)
    torch.testing.assert_close(logits_of(shared, ids), logits_of(apart, ids), rtol=1e-12, atol=1e-12)
    # The shared prior's gradient is the sum of the separate ones.
    for model in (shared, apart):
        model(ids, labels=ids).loss.backward()
    total = torch.stack([p.grad for n, p in apart.named_parameters() if "prior" in n and p.grad is not None]).sum(0)
    found = dict(shared.named_parameters())["model.prior.log_slope"].grad
    assert found is not None
    torch.testing.assert_close(found, total, rtol=1e-5, atol=1e-7)


LEARNING = {
    "prior": {"name": "generalized_gaussian", "init": "spread"},
    "encoding": {"name": "shaw", "max_offset": 3},
    "logit_scale": "ssmax",
}


def test_every_trainable_parameter_gets_a_gradient() -> None:
    model, ids = tiny_decoder(**LEARNING).train(), tokens(2, 9)
    model(ids, labels=ids).loss.backward()
    learning = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert any("theta_beta" in name for name in learning)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, name
            assert (parameter.grad != 0).any(), name


@pytest.mark.parametrize("cast", ["load", "to", "half", "bfloat16"])
def test_priors_stay_float32_in_half_precision_models(cast: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"prior": "generalized_gaussian", "logit_scale": "ssmax"}
    model = tiny_decoder(torch.float32, **changes)
    wanted = torch.float16 if cast == "half" else torch.bfloat16
    if cast == "load":
        model.save_pretrained(tmp_path)
        cast_model = PriorDecoderForCausalLM.from_pretrained(tmp_path, dtype=wanted)
    elif cast == "to":
        cast_model = model.to(wanted)  # pyright: ignore[reportArgumentType]
    else:
        cast_model = getattr(model, cast)()
    kept = tiny_decoder(torch.float32, **changes).state_dict()
    for name, parameter in cast_model.named_parameters():
        positional = "prior." in name or "logit_scale." in name
        assert parameter.dtype == (torch.float32 if positional else wanted), name
        if positional:
            assert torch.equal(parameter, kept[name]), name
    logits = logits_of(cast_model.eval(), tokens(2, 9))
    assert logits.dtype == wanted
    exact = logits_of(tiny_decoder(torch.float64, **changes), tokens(2, 9))
    assert float((logits.double() - exact).abs().max()) < 0.1 * float(exact.abs().max())


@pytest.mark.parametrize("scale", LOGIT_SCALES)
def test_priors_and_scales_stay_float32_when_a_state_dict_is_assigned(scale: str) -> None:
    model = tiny_decoder(torch.float32, prior="generalized_gaussian", logit_scale=scale)
    rounded = {name: tensor.bfloat16() for name, tensor in model.state_dict().items()}
    model.load_state_dict(rounded, assign=True)
    for name, parameter in model.named_parameters():
        positional = "prior." in name or "logit_scale." in name
        assert parameter.dtype == (torch.float32 if positional else torch.bfloat16), name
        assert torch.equal(parameter, rounded[name].to(parameter.dtype)), name
    assert logits_of(model.eval(), tokens(2, 9)).isfinite().all()


@pytest.mark.parametrize(
    "name", [n for n in VARIANTS if n.startswith("prior ") and n not in ("prior kerple", "prior fire")]
)
def test_initial_parameters_match_the_config(name: str) -> None:
    """Neither transformers' initialisation nor the model's may change a prior's start. Two priors start at random."""
    model = PriorDecoderForCausalLM(tiny_config(**VARIANTS[name]))
    torch.manual_seed(0)
    prior = model.config.make_prior()
    assert prior is not None
    expected = dict(prior.named_parameters())
    for layer in model.model.layers:
        for parameter, tensor in layer.get_submodule("self_attn.prior").named_parameters():
            if not parameter.startswith("mlp."):  # random from the start
                assert torch.equal(tensor, expected[parameter]), parameter


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_equal_projections_make_alike_tokens_attend_to_each_other(kv_heads: int, tmp_path: Path) -> None:
    """A key head starts as the first query head of its group, so that each token's own logit is the highest."""
    config = tiny_config(equal_projections=True, num_key_value_heads=kv_heads)
    width = config.hidden_size // 4
    model = PriorDecoderForCausalLM(config)
    for layer in model.model.layers:
        query, key = (layer.get_parameter(f"self_attn.{name}.weight") for name in ("q_proj", "k_proj"))
        heads = query.unflatten(0, (-1, width))
        assert torch.equal(heads[:: 4 // kv_heads], key.unflatten(0, (-1, width)))
        tokens_alike = torch.nn.functional.normalize(torch.randn(50, config.hidden_size), dim=-1)
        first = (tokens_alike @ heads[0].T) @ (tokens_alike @ heads[0].T).T
        assert float(first.diagonal().mean()) > 2 * float((first.sum() - first.trace()).abs() / (50 * 49))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.get_parameter("self_attn.k_proj.weight").add_(1)
    model.save_pretrained(tmp_path)
    loaded = PriorDecoderForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in model.state_dict().items())


def test_files_may_lack_a_parameter_of_a_prior(tmp_path: Path) -> None:
    """A missing parameter starts as the config says. The others are loaded."""
    model = tiny_decoder(torch.float32, prior={"name": "generalized_gaussian", "init": "laplace"})
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    missing = "model.layers.1.self_attn.prior.theta_alpha"
    kept = {name: tensor.clone() for name, tensor in load_file(file).items() if name != missing}
    save_file(kept, file, metadata={"format": "pt"})
    state = PriorDecoderForCausalLM.from_pretrained(tmp_path).state_dict()
    for name, tensor in kept.items():
        assert torch.equal(state[name], tensor), name
    torch.testing.assert_close(state[missing], alibi_slopes(4).log().float())


def test_base_model_loads_from_a_language_model(tmp_path: Path) -> None:
    model, ids = tiny_decoder(torch.float32, prior="laplace"), tokens(1, 5)
    model.save_pretrained(tmp_path)
    base = PriorDecoderModel.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        hidden = base(ids).last_hidden_state
        expected = model.model(ids).last_hidden_state
    assert torch.equal(hidden, expected)


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("unknown prior 'alibi'", {"prior": "alibi"}),
        ("unknown prior", {"prior": [{"name": "laplace"}, {"name": "nothing"}]}),
        ("no argument", {"prior": {"name": "laplace", "slope": 1.0}}),
        ("size", {"prior": "window"}),
        ("size", {"prior": {"name": "window", "size": 0}}),
        ("num_heads", {"prior": {"name": "laplace", "num_heads": 3}}),
        ("init", {"prior": {"name": "generalized_gaussian", "init": "gauss"}}),
        ("over a line, got 'axial'", {"prior": {"name": "axial", "rows": "laplace"}}),
        ("over a line, got 'spectral_2d'", {"prior": [{"name": "uniform"}, {"name": "spectral_2d"}]}),
        ("over a line, got 'radial'", {"prior": {"name": "radial", "prior": "laplace"}}),
        ("over a line, got 'key_sink_2d'", {"prior": {"name": "key_sink_2d", "rows": 4, "columns": 4}}),
        ("unknown encoding", {"encoding": "rope"}),
        ("max_length", {"encoding": "learned"}),
        ("head_dim", {"encoding": "rotary", "head_dim": 7}),
        ("head_dim", {"encoding": {"name": "rotary", "head_dim": 16}}),
        ("unknown logit scale", {"logit_scale": "yarn"}),
        ("num_attention_heads", {"num_attention_heads": 4, "num_key_value_heads": 3}),
        ("num_attention_heads", {"num_attention_heads": 0}),
        ("num_key_value_heads must be a positive integer, got 0", {"num_key_value_heads": 0}),
        ("num_key_value_heads must be a positive integer, got -1", {"num_key_value_heads": -1}),
        ("head_dim must be a positive integer, got 0", {"head_dim": 0}),
        ("hidden_size", {"hidden_size": 33}),
        ("share_prior must be True or False, got 'no'", {"share_prior": "no"}),
    ],
)
def test_invalid_configs_are_refused(message: str, changes: dict[str, Any]) -> None:
    with pytest.raises(Exception, match=message) as caught:
        tiny_config(**changes)
    assert isinstance(caught.value, ValueError)


def test_num_key_value_heads_defaults_to_num_heads() -> None:
    config = PriorDecoderConfig(hidden_size=32, num_attention_heads=4, vocab_size=50)
    assert (config.num_key_value_heads, config.head_dim) == (4, 8)
    wide = tiny_config(head_dim=16)
    weight = tiny_decoder(head_dim=16).get_parameter("model.layers.0.self_attn.q_proj.weight")
    assert weight.shape == (64, 32)
    assert wide.head_dim == 16
