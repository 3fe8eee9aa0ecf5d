"""transformers' own tests of models (ModelTesterMixin), for every family of priors."""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_decoders import FAMILIES, VARIANTS, VOCABULARY, logits_of, tiny_config, tiny_decoder, tokens
from torch import Tensor, nn
from transformers import DynamicCache

from attention_priors.models import PriorDecoderConfig, PriorDecoderForCausalLM, PriorDecoderModel
from attention_priors.priors import Prior
from thoroughness import each_once

LENGTH = 7
every_family = pytest.mark.parametrize("family", FAMILIES)


def assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-9)


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}


# ---- outputs


@every_family
def test_outputs_are_deterministic(family: str) -> None:
    model, ids = tiny_decoder(**FAMILIES[family]).train(), tokens(2, LENGTH)
    assert torch.equal(logits_of(model, ids), logits_of(model, ids))


@every_family
def test_rows_of_a_batch_are_independent(family: str) -> None:
    model, ids = tiny_decoder(**FAMILIES[family]), tokens(3, LENGTH)
    whole = logits_of(model, ids)
    for row in range(3):
        assert_close(logits_of(model, ids[row : row + 1]), whole[row : row + 1])


def test_arguments_have_the_order_of_transformers() -> None:
    names = list(inspect.signature(PriorDecoderForCausalLM.forward).parameters)
    theirs = ["input_ids", "attention_mask", "position_ids", "cache", "inputs_embeds", "labels", "use_cache"]
    assert names[1:9] == [*theirs, "logits_to_keep"]
    assert "attention_mask" in inspect.signature(PriorDecoderModel.forward).parameters


@every_family
def test_attentions_are_the_weights_by_the_formula(family: str) -> None:
    model, ids = tiny_decoder(**FAMILIES[family]), tokens(2, LENGTH)
    with torch.no_grad():
        outputs = model(ids, output_attentions=True)
    assert_close(outputs.logits, logits_of(model, ids))
    assert len(outputs.attentions) == 2
    for weights in outputs.attentions:
        assert weights.shape == (2, 4, LENGTH, LENGTH)
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, LENGTH, dtype=torch.float64))
        assert not weights.triu(1).any()
    # The returned weights are the applied weights: mixing the values by them gives the input of the output projection.
    inputs: list[Any] = []
    attention = model.model.layers[0].get_submodule("self_attn")
    hooks = [
        attention.get_submodule("v_proj").register_forward_hook(lambda module, args, output: inputs.append(output)),
        attention.get_submodule("o_proj").register_forward_hook(lambda module, args, output: inputs.append(args[0])),
    ]
    logits_of(model, ids)
    for hook in hooks:
        hook.remove()
    if family != "Shaw":  # its values also depend on the distance
        values = inputs[0].unflatten(-1, (2, -1)).transpose(1, 2).repeat_interleave(2, 1)
        mixed = (outputs.attentions[0] @ values).transpose(1, 2).flatten(-2)
        torch.testing.assert_close(mixed, inputs[1], rtol=1e-6, atol=1e-7)


def test_attentions_with_padding_and_a_cache() -> None:
    model, ids = tiny_decoder(**FAMILIES["BAM"]), tokens(2, LENGTH)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7])
    with torch.no_grad():
        whole = model(ids, attention_mask=mask, output_attentions=True).attentions
        cache = DynamicCache(config=model.config)
        model(ids[:, :5], attention_mask=mask[:, :5], cache=cache)
        later = model(ids[:, 5:], attention_mask=mask, cache=cache, output_attentions=True).attentions
    assert not whole[0][0, :, :, :2].any()
    for one, other in zip(whole, later, strict=True):
        assert_close(other, one[:, :, 5:])


@every_family
def test_hidden_states_are_returned(family: str) -> None:
    model, ids = tiny_decoder(**FAMILIES[family]), tokens(2, LENGTH)
    with torch.no_grad():
        outputs = model(ids, output_hidden_states=True, logits_to_keep=1)
        states = outputs.hidden_states
        assert [tuple(state.shape) for state in states] == [(2, LENGTH, 32)] * 3
        assert_close(model.lm_head(states[-1]), logits_of(model, ids))
        assert_close(states[0], model.model.embed_tokens(ids))
        assert outputs.logits.shape == (2, 1, VOCABULARY)
        seen: list[Any] = []
        by_layer = model.model.layers[0].register_forward_hook(lambda module, args, output: seen.append(output))
        model(ids)
        by_layer.remove()
    assert torch.equal(seen[0], states[1])


def test_the_config_may_request_outputs() -> None:
    model, ids = tiny_decoder(), tokens(2, LENGTH)
    model.config.output_hidden_states = model.config.output_attentions = True
    outputs = model(ids)
    assert len(outputs.hidden_states) == 3
    assert len(outputs.attentions) == 2
    refused = model(ids, output_hidden_states=False, output_attentions=False)
    assert refused.hidden_states is None
    assert refused.attentions is None


@every_family
def test_hidden_states_and_attentions_have_gradients(family: str) -> None:
    model, ids = tiny_decoder(**FAMILIES[family]), tokens(2, LENGTH)
    outputs = model(ids, output_hidden_states=True, output_attentions=True)
    kept = [outputs.hidden_states[0], outputs.attentions[0]]
    for tensor in kept:
        tensor.retain_grad()
    outputs.logits[0, -1].sum().backward()
    assert all(tensor.grad is not None and tensor.grad.any() for tensor in kept)


@pytest.mark.parametrize("where", ["argument", "config"])
def test_return_dict_false_returns_tuples(where: str) -> None:
    model, ids = tiny_decoder(**FAMILIES["BAM"]), tokens(2, LENGTH)
    flags: dict[str, Any] = {"output_hidden_states": True, "output_attentions": True, "labels": ids}
    with torch.no_grad():
        named = model(ids, **flags)
        if where == "config":
            model.config.return_dict = False
        else:
            flags["return_dict"] = False
        found = model(ids, **flags)
    assert isinstance(found, tuple)
    expected = (named.loss, named.logits, named.cache, named.hidden_states, named.attentions)
    assert len(found) == len(expected)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    assert all(torch.equal(a, b) for a, b in zip(found[3] + found[4], expected[3] + expected[4], strict=True))
    base = model.model(ids, return_dict=False)
    assert isinstance(base, tuple)


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("is_causal", {"is_causal": False}),
        ("cu_seq_lens_q", {"cu_seq_lens_q": torch.tensor([0, 3, 7])}),
        ("seq_idx", {"seq_idx": torch.zeros(1, LENGTH)}),
        ("atention_mask", {"atention_mask": torch.ones(2, LENGTH)}),
        ("cache must be a transformers Cache", {"cache": ((torch.zeros(1), torch.zeros(1)),)}),
        ("labels", {"labels": torch.zeros(2, LENGTH, dtype=torch.int64), "logits_to_keep": 2}),
        ("labels", {"labels": torch.zeros(2, LENGTH - 1, dtype=torch.int64)}),
    ],
)
def test_unsupported_arguments_are_refused(message: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_decoder()(tokens(2, LENGTH), **options)


def test_tokens_without_a_batch_are_refused() -> None:
    with pytest.raises(ValueError, match=r"input_ids must have shape \(B, L\)"):
        tiny_decoder()(tokens(1, LENGTH)[0])


def test_losses_ignore_masked_labels() -> None:
    model, ids = tiny_decoder(), tokens(2, LENGTH)
    logits = logits_of(model, ids)
    with torch.no_grad():
        found = model(ids, labels=ids[:, -3:], logits_to_keep=3).loss
        number = model(ids, labels=ids, num_items_in_batch=5).loss
        shifted = model(ids, labels=ids, shift_labels=nn.functional.pad(ids[:, 1:], (0, 1), value=-100)).loss
    each = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    torch.testing.assert_close(found.double(), each.view(2, -1)[:, -2:].mean(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(number.double(), each.sum() / 5, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(shifted.double(), each.mean(), rtol=1e-5, atol=1e-6)


# ---- embeddings


@every_family
def test_embeddings_replace_tokens(family: str) -> None:
    model, ids = tiny_decoder(**FAMILIES[family]), tokens(2, LENGTH)
    embedded = model.model.embed_tokens(ids)
    with torch.no_grad():
        assert torch.equal(model(inputs_embeds=embedded).logits, logits_of(model, ids))


def test_embeddings_can_be_replaced() -> None:
    model: Any = tiny_decoder(tie_word_embeddings=False)
    assert isinstance(model.get_input_embeddings(), nn.Embedding)
    assert isinstance(model.get_output_embeddings(), nn.Linear)
    table, head = nn.Embedding(9, 32, dtype=torch.float64), nn.Linear(32, 9, bias=False, dtype=torch.float64)
    model.set_input_embeddings(table)
    model.set_output_embeddings(head)
    assert model.model.embed_tokens is table
    assert model.lm_head is head
    assert model.base_model.get_input_embeddings() is table


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("size", [VOCABULARY + 10, VOCABULARY - 15])
def test_token_embeddings_can_be_resized(tied: bool, size: int, tmp_path: Path) -> None:
    model, ids = tiny_decoder(torch.float32, tie_word_embeddings=tied), tokens(2, LENGTH) % 30
    before = logits_of(model, ids)
    resized: Any = model.resize_token_embeddings(size)
    assert resized is model.get_input_embeddings()
    assert resized.weight.shape == (size, 32)
    assert model.lm_head.weight.shape == (size, 32)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert model.config.vocab_size == model.model.config.vocab_size == size
    common = min(size, VOCABULARY)
    after = logits_of(model, ids)
    torch.testing.assert_close(after[..., :common], before[..., :common], rtol=1e-5, atol=1e-5)
    loss = model(torch.full((1, 3), size - 1), labels=torch.full((1, 3), size - 1)).loss
    assert torch.isfinite(loss)
    model.save_pretrained(tmp_path)
    assert PriorDecoderForCausalLM.from_pretrained(tmp_path).config.vocab_size == size


def test_resizing_pads_to_a_multiple() -> None:
    model = tiny_decoder()
    model.resize_token_embeddings(VOCABULARY + 1, pad_to_multiple_of=16)
    assert model.config.vocab_size == 64


# ---- tied weights


@pytest.mark.parametrize("saved_tied", [True, False])
@pytest.mark.parametrize("loaded_tied", [True, False])
def test_tying_may_change_at_loading(saved_tied: bool, loaded_tied: bool, tmp_path: Path) -> None:
    model = tiny_decoder(torch.float32, tie_word_embeddings=saved_tied)
    model.save_pretrained(tmp_path)
    assert ("lm_head.weight" in load_file(tmp_path / "model.safetensors")) != saved_tied
    config = PriorDecoderConfig.from_pretrained(tmp_path, tie_word_embeddings=loaded_tied)
    found: Any = PriorDecoderForCausalLM.from_pretrained(tmp_path, config=config, output_loading_info=True)
    loaded, report = found
    assert torch.equal(loaded.model.embed_tokens.weight, model.model.embed_tokens.weight)
    if saved_tied and not loaded_tied:
        # The file does not contain the head, and the loading report lists it as missing.
        assert report["missing_keys"] == {"lm_head.weight"}
    else:
        assert not report["missing_keys"]
    if not saved_tied and not loaded_tied:
        assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
        assert not torch.equal(loaded.lm_head.weight, loaded.model.embed_tokens.weight)


def test_a_model_with_an_untied_head_is_saved_in_full(tmp_path: Path) -> None:
    model, ids = tiny_decoder(torch.float32, tie_word_embeddings=True), tokens(2, LENGTH)
    model.lm_head.weight = nn.Parameter(torch.randn_like(model.lm_head.weight))
    model.config.tie_word_embeddings = False
    model.save_pretrained(tmp_path)
    loaded = PriorDecoderForCausalLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(logits_of(loaded, ids), logits_of(model, ids), rtol=1e-5, atol=1e-5)


# ---- saving, loading, initialisation


@pytest.mark.parametrize(("family", "sharded"), each_once(FAMILIES, [True, False]))
def test_all_state_is_saved_and_initialised(family: str, sharded: bool, tmp_path: Path) -> None:
    model = tiny_decoder(torch.float32, **FAMILIES[family])
    # All state is in parameters and persistent buffers.
    state = model.state_dict()
    for module in model.modules():
        for name, value in vars(module).items():
            assert not isinstance(value, Tensor), f"{type(module).__name__}.{name}"
    model.save_pretrained(tmp_path, max_shard_size="10KB" if sharded else "5GB")
    shards = list(tmp_path.glob("model-*-of-*.safetensors"))
    assert (len(shards) > 2) == sharded
    assert (tmp_path / "model.safetensors.index.json").exists() == sharded
    loaded = PriorDecoderForCausalLM.from_pretrained(tmp_path)
    assert loaded.state_dict().keys() == state.keys()
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, state[name]), name


@every_family
def test_missing_weights_are_initialised(family: str, tmp_path: Path) -> None:
    """With an empty file, each parameter starts as in a new model."""
    from safetensors.torch import save_file

    config = tiny_config(**FAMILIES[family])
    config.save_pretrained(tmp_path)
    save_file({"unused": torch.zeros(1)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    found: Any = PriorDecoderForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    model, report = found
    assert report["unexpected_keys"] == {"unused"}
    fresh = dict(PriorDecoderForCausalLM(config).named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.isfinite(parameter).all(), name
        assert parameter.requires_grad == fresh[name].requires_grad, name
        if "prior" in name and ".mlp." in name:
            continue  # few numbers, drawn from a wide distribution
        if fresh[name].numel() > 8 and fresh[name].std() > 0:
            assert 0.5 < float(parameter.std() / fresh[name].std()) < 2, name
        else:
            torch.testing.assert_close(parameter, fresh[name], msg=lambda text, name=name: f"{name}: {text}")


@every_family
def test_models_may_be_built_on_meta(family: str) -> None:
    with torch.device("meta"):
        model = PriorDecoderForCausalLM(tiny_config(**FAMILIES[family]))
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert not [name for name, buffer in model.named_buffers() if buffer.device.type != "meta"]


def test_a_device_context_may_surround_loading(tmp_path: Path) -> None:
    model, ids = tiny_decoder(torch.float32, **FAMILIES["GOAT"]), tokens(1, LENGTH)
    model.save_pretrained(tmp_path)
    with torch.device("cpu"):
        loaded = PriorDecoderForCausalLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(logits_of(loaded, ids), logits_of(model, ids), rtol=1e-5, atol=1e-5)
    with torch.device("meta"), pytest.raises(RuntimeError, match="meta"):
        PriorDecoderForCausalLM.from_pretrained(tmp_path)


def test_weights_of_other_sizes_are_reinitialised(tmp_path: Path) -> None:
    tiny_decoder(torch.float32, **FAMILIES["BAM"]).save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="mismatch"):
        PriorDecoderForCausalLM.from_pretrained(tmp_path, vocab_size=60)
    model: Any = PriorDecoderForCausalLM.from_pretrained(tmp_path, vocab_size=60, ignore_mismatched_sizes=True)
    assert model.model.embed_tokens.weight.shape == (60, 32)
    assert 0.15 < float(model.model.embed_tokens.weight.std()) < 0.6  # about initializer_range
    assert torch.isfinite(logits_of(model.eval(), tokens(1, LENGTH))).all()


def test_models_survive_torch_save(tmp_path: Path) -> None:
    model, ids = tiny_decoder(torch.float32, **FAMILIES["GOAT"]), tokens(1, LENGTH)
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    other = PriorDecoderForCausalLM(model.config).eval()
    other.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))
    torch.testing.assert_close(logits_of(other, ids), logits_of(model, ids), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_config_determines_the_modules(variant: str, tmp_path: Path) -> None:
    """A config survives JSON, and builds equal modules."""
    config = tiny_config(**VARIANTS[variant])
    config.save_pretrained(tmp_path)
    back = PriorDecoderConfig.from_pretrained(tmp_path)
    assert {**back.to_dict(), "_name_or_path": ""} == {**config.to_dict(), "_name_or_path": ""}
    assert PriorDecoderConfig.from_dict(config.to_dict()).to_dict() == config.to_dict()
    parts = [
        [part.to_config() for part in PriorDecoderForCausalLM(c).modules() if isinstance(part, Prior)]
        for c in (config, back)
    ]
    assert parts[0] == parts[1]


def test_the_default_config_has_no_positions() -> None:
    config = PriorDecoderConfig()
    assert (config.prior, config.encoding, config.logit_scale) == (None, None, None)
    assert config.to_diff_dict()["model_type"] == "prior_decoder"


# ---- dtypes


@pytest.mark.parametrize(("family", "dtype"), each_once(FAMILIES, [torch.bfloat16, torch.float16]))
def test_half_precision_models_keep_float32_priors(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model, ids = tiny_decoder(torch.float32, **FAMILIES[family]), tokens(2, LENGTH)
    model.save_pretrained(tmp_path)
    half = PriorDecoderForCausalLM.from_pretrained(tmp_path, dtype=dtype).eval()
    assert half.dtype == dtype
    kept = [name for name, parameter in half.named_parameters() if parameter.dtype == torch.float32]
    assert all("prior." in name or "logit_scale." in name or "encoding." in name for name in kept)
    found, expected = logits_of(half, ids), logits_of(model, ids)
    assert found.dtype == dtype
    assert float((found - expected).abs().max()) < (0.1 if dtype == torch.bfloat16 else 0.02) * float(
        expected.abs().max()
    )
    # Saving and loading in half precision keeps dtypes: priors stay float32.
    half.save_pretrained(tmp_path / "half")
    again = PriorDecoderForCausalLM.from_pretrained(tmp_path / "half").eval()
    assert again.dtype == dtype
    for name, parameter in again.named_parameters():
        assert torch.equal(parameter, half.get_parameter(name)), name
        assert parameter.dtype == half.get_parameter(name).dtype, name


@every_family
def test_models_train_under_autocast(family: str) -> None:
    model, ids = tiny_decoder(torch.float32, **FAMILIES[family]).train(), tokens(2, LENGTH)
    grads = []
    for enabled in (False, True):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            model(ids, labels=ids, output_attentions=enabled).loss.backward()
        grads.append({name: grad.clone() for name, grad in gradients(model).items() if grad is not None})
    assert grads[0].keys() == grads[1].keys()
    for name, grad in grads[1].items():
        assert grad.dtype == torch.float32
        assert float((grad - grads[0][name]).norm()) < 0.2 * float(grads[0][name].norm()) + 1e-6, name


# ---- training


@pytest.mark.parametrize(("family", "reentrant"), each_once(FAMILIES, [None, True, False]))
def test_gradient_checkpointing_keeps_gradients(family: str, reentrant: bool | None) -> None:
    """Gradients are equal. A cache that is requested by mistake is neither filled twice nor kept."""
    ids, grads = tokens(2, LENGTH), []
    for checkpointing in (False, True):
        model: Any = tiny_decoder(**FAMILIES[family]).train()
        if checkpointing:
            options = None if reentrant is None else {"use_reentrant": reentrant}
            model.activation_checkpointing_enable(options)
        outputs = model(ids, labels=ids, use_cache=checkpointing)
        assert outputs.cache is None
        outputs.loss.backward()
        grads.append(gradients(model))
        if checkpointing:
            model.activation_checkpointing_disable()
            assert not any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    for name, expected in grads[0].items():
        assert expected is not None
        torch.testing.assert_close(grads[1][name], expected, rtol=1e-6, atol=1e-9)


def test_gradient_checkpointing_with_a_filled_cache_is_refused() -> None:
    model, ids = tiny_decoder().train(), tokens(2, LENGTH)
    model.activation_checkpointing_enable()
    cache: Any = DynamicCache(config=model.config)
    with torch.no_grad():
        model.eval()(ids, cache=cache, use_cache=True)
    with pytest.raises(ValueError, match="cache must be empty"):
        model.train()(ids, cache=cache)


def test_gradient_checkpointing_with_frozen_embeddings() -> None:
    """Adapters need inputs that require a gradient with the reentrant kind."""
    model: Any = tiny_decoder(**FAMILIES["BAM"]).train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("prior" in name and parameter.requires_grad)
    model.activation_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    ids = tokens(2, LENGTH)
    model(ids, labels=ids).loss.backward()
    assert all(grad is not None and grad.any() for grad in gradients(model).values())


@every_family
def test_class_flags_are_correct(family: str) -> None:
    model = tiny_decoder(**FAMILIES[family])
    assert model.can_generate()
    assert model.supports_gradient_checkpointing
    assert not model.supports_context_parallel
    assert model._can_compile_fullgraph
    with pytest.raises(ValueError, match=r"scaled_dot_product_attention|SDPA|sdpa"):
        PriorDecoderForCausalLM._from_config(model.config, attn_implementation="sdpa")
