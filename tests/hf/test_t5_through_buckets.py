"""T5, and models with its relative bias, with priors, against transformers' own code.

Logits in float32 of the order of 10 agree within 1e-4.
"""

import copy
import pickle
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from accelerate import cpu_offload
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForSeq2SeqLM, DynamicCache, EncoderDecoderCache, StaticCache, T5EncoderModel

from attention_priors.hf import attach, restore_attention, use_priors
from thoroughness import each_once, every_other_deep, examples

VOCABULARY = 40
TOLERANCE = 1e-4
KINDS = {"t5": "T5", "mt5": "MT5", "umt5": "UMT5"}
RELATIVES = {"switch": "SwitchTransformers", "pop2piano": "Pop2Piano", "longt5": "LongT5", "udop": "Udop"}
RELATIVE_CHANGES: dict[str, dict[str, Any]] = {
    "switch": {"attention": "eager", "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
    "longt5": {"attention": "eager"},
    "udop": {"relative_attention_num_buckets": 32},
}
"""Settings that transformers' own code needs. Two models have no SDPA, and UDOP's encoder shares a table of 32 rows."""
every_kind = pytest.mark.parametrize("kind", KINDS)
every_relative = pytest.mark.parametrize("kind", RELATIVES)


def make(kind: str = "t5", attention: str = "sdpa", **changes: Any) -> Any:
    torch.manual_seed(0)
    name = (KINDS | RELATIVES)[kind]
    config, model = getattr(hf, f"{name}Config"), getattr(hf, f"{name}ForConditionalGeneration")
    sizes = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    sizes |= {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 20}
    sizes |= {"decoder_start_token_id": 0, "pad_token_id": 0, "dropout_rate": 0.0, "attn_implementation": attention}
    made = model(config(**sizes | changes)).eval()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "relative_attention_bias" in name:
                parameter.normal_(std=2)  # T5's own start has little effect
            elif ".q.weight" in name:
                parameter *= 3
    return made


def twins(*args: Any, **changes: Any) -> tuple[Any, Any]:
    model = make(*args, **changes)
    return model, use_priors(copy.deepcopy(model))


@every_kind
def test_hidden_states_match(kind: str) -> None:
    theirs, ours = (model(**inputs(), output_hidden_states=True) for model in twins(kind))
    for name in ("encoder_hidden_states", "decoder_hidden_states"):
        assert len(ours[name]) == len(theirs[name]) == 3
        for found, expected in zip(ours[name], theirs[name], strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)


def inputs(length: int = 24, target_length: int = 11, padded: bool = True) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, VOCABULARY, (3, length), generator=generator)
    decoder_ids = torch.randint(1, VOCABULARY, (3, target_length), generator=generator)
    mask = torch.ones_like(ids)
    if padded:
        mask[0, length // 2 :] = 0
        mask[1, :3] = 0
    return {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": decoder_ids}


def difference(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return float((a - b).detach().abs().max())


def logits(model: Any, **kwargs: Any) -> Tensor:
    with torch.no_grad():
        return model(**kwargs).logits


@every_kind
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_logits_match_transformers(kind: str, attention: str) -> None:
    theirs, ours = twins(kind, attention)
    given = inputs()
    decoder_mask = torch.ones_like(given["decoder_input_ids"])
    decoder_mask[2, 7:] = 0
    for kwargs in (given, given | {"decoder_attention_mask": decoder_mask}, inputs(padded=False)):
        assert difference(logits(theirs, **kwargs), logits(ours, **kwargs)) < TOLERANCE
    states = [model.encoder(given["input_ids"], given["attention_mask"]).last_hidden_state for model in (theirs, ours)]
    visible = given["attention_mask"].bool()
    assert difference(states[0][visible], states[1][visible]) < TOLERANCE


@given(
    heads=st.integers(1, 5),
    half=st.integers(2, 6),
    beyond=st.integers(1, 30),
    length=st.integers(1, 40),
    target_length=st.integers(1, 20),
)
@settings(max_examples=examples(8))
def test_any_buckets_and_lengths_match(heads: int, half: int, beyond: int, length: int, target_length: int) -> None:
    theirs, ours = twins(
        num_heads=heads, relative_attention_num_buckets=2 * half, relative_attention_max_distance=half + beyond
    )
    kwargs = inputs(length, target_length, padded=length > 3)
    assert difference(logits(theirs, **kwargs), logits(ours, **kwargs)) < TOLERANCE


def test_the_bias_changes_the_logits() -> None:
    """Without an effect of the bias, equal logits would prove little."""
    model = use_priors(make())
    before = logits(model, **inputs())
    with torch.no_grad():
        model.decoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight[1] += 1
    assert difference(before, logits(model, **inputs())) > 0.1


@pytest.mark.parametrize(("kind", "checkpointing"), each_once(KINDS, [None, "reentrant", "not reentrant"]))
def test_gradients_match_transformers(kind: str, checkpointing: str | None) -> None:
    theirs, ours = twins(kind)
    for model in (theirs, ours):
        if checkpointing:
            model.train().activation_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
        model(**inputs(), labels=inputs()["decoder_input_ids"]).loss.backward()
    biases = 0
    for (name, a), (also, b) in zip(theirs.named_parameters(), ours.named_parameters(), strict=True):
        assert name == also
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5)
        biases += "relative_attention_bias" in name
    assert biases == (4 if kind == "umt5" else 2)  # one table for all blocks of a stack, or one for each block


@pytest.mark.parametrize(("how", "kind"), each_once(product(["dynamic", "static", None], [1, 3]), [*KINDS]))
def test_generated_tokens_match(how: tuple[str | None, int], kind: str) -> None:
    cache, beams = how
    theirs, ours = twins(kind)
    options: dict[str, Any] = {"max_new_tokens": 8, "num_beams": beams, "do_sample": False, "eos_token_id": None}
    options |= {"use_cache": False} if cache is None else {"cache_implementation": cache}
    options |= {"output_scores": True, "return_dict_in_generate": True}
    given = inputs()
    del given["decoder_input_ids"]
    expected, got = (model.generate(**given, **options) for model in (theirs, ours))
    assert torch.equal(expected.sequences, got.sequences)
    assert difference(torch.stack(expected.scores)[:1], torch.stack(got.scores)[:1]) < TOLERANCE


@every_kind
@pytest.mark.parametrize("static", [False, True])
def test_chunked_decoding_matches(kind: str, static: bool) -> None:
    theirs, ours = twins(kind)
    given = inputs()
    decoder_ids = given.pop("decoder_input_ids")
    whole = logits(theirs, **given, decoder_input_ids=decoder_ids)
    parts, cache = [], None
    if static:
        config = ours.config
        cache = EncoderDecoderCache(StaticCache(config, max_cache_len=16), StaticCache(config, max_cache_len=24))
    for start, stop in ((0, 5), (5, 6), (6, 11)):
        out = ours(**given, decoder_input_ids=decoder_ids[:, start:stop], cache=cache, use_cache=True)
        cache = out.cache
        parts.append(out.logits)
    assert difference(whole, torch.cat(parts, 1)) < TOLERANCE


@pytest.mark.parametrize("kind", ["t5", "umt5"])
def test_dropout_draws_equal_weights(kind: str) -> None:
    """Runs each stack alone, so that its attention draws first. A mask's layout must not change the order of draws."""
    theirs, ours = twins(kind, "eager", dropout_rate=0.3)
    results = []
    for model in (theirs, ours):
        model.train()
        torch.manual_seed(2)
        results.append(model.encoder(inputs()["input_ids"]).last_hidden_state)
    assert difference(*results) < TOLERANCE


def test_bfloat16_errors_are_no_larger_than_in_transformers() -> None:
    theirs, ours = twins()
    exact = logits(theirs, **inputs(64, 48))
    errors = []
    for model in (theirs, ours):
        rounded = logits(model.to(torch.bfloat16), **inputs(64, 48))
        errors.append((rounded.float() - exact).abs().mean())
    assert errors[1] < 1.1 * errors[0]


def test_dense_masks_match() -> None:
    theirs, ours = twins()
    causal = torch.ones(11, 11, dtype=torch.bool).tril().expand(3, 1, 11, 11).clone()
    causal[:, :, 6:, :6] = False
    kwargs = inputs() | {"decoder_attention_mask": causal}
    expected = logits(theirs, **kwargs)
    assert difference(expected, logits(theirs, **inputs())) > 0.1
    assert difference(expected, logits(ours, **kwargs)) < TOLERANCE


def test_dense_masks_over_a_static_cache_match() -> None:
    """The last slots of the cache are empty. The layers supply the positions of queries."""
    theirs, ours = twins()
    given = inputs()
    ids = given.pop("decoder_input_ids")
    cache = EncoderDecoderCache(*(StaticCache(ours.config, max_cache_len=length) for length in (16, 24)))
    parts = []
    for start, stop in ((0, 5), (5, 11)):
        mask = torch.ones(16, 16, dtype=torch.bool).tril()[start:stop].expand(3, 1, -1, -1)
        given |= {"decoder_input_ids": ids[:, start:stop], "decoder_attention_mask": mask}
        parts.append(logits(ours, **given, cache=cache, use_cache=True))
    assert difference(logits(theirs, **inputs()), torch.cat(parts, 1)) < TOLERANCE


def test_the_least_finite_number_of_a_mask_hides_keys() -> None:
    """transformers writes this number for -inf. A query without keys gets zeros in either form."""
    model = use_priors(make())
    ids = inputs(8)["input_ids"]
    visible = torch.ones(3, 1, 8, 8, dtype=torch.bool).tril()
    visible[:, :, 3] = False
    added = torch.zeros(3, 1, 8, 8).masked_fill(~visible, torch.finfo(torch.float32).min)
    found, expected = (model.encoder(ids, attention_mask=mask).last_hidden_state for mask in (added, visible))
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)


def test_encoders_match() -> None:
    theirs = T5EncoderModel(make().config).eval()
    ours = use_priors(copy.deepcopy(theirs))
    ids = inputs()["input_ids"]
    assert difference(theirs(ids).last_hidden_state, ours(ids).last_hidden_state) < TOLERANCE


@every_kind
def test_state_dicts_and_files_stay_compatible_with_t5(kind: str, tmp_path: Path) -> None:
    model = make(kind)
    before, keys, types = logits(model, **inputs()), list(model.state_dict()), [type(m) for m in model.modules()]
    use_priors(model)
    assert list(model.state_dict()) == keys
    model.save_pretrained(tmp_path)
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert type(loaded) is type(model)
    assert torch.equal(logits(loaded, **inputs()), before)
    restore_attention(model)
    assert [type(module) for module in model.modules()] == types
    assert torch.equal(logits(model, **inputs()), before)


def test_training_changes_the_shared_scalars() -> None:
    theirs, ours = twins()
    for model in (theirs, ours):
        optimizer = torch.optim.SGD(model.train().parameters(), lr=0.01)
        for _ in range(3):
            optimizer.zero_grad()
            model(**inputs(), labels=inputs()["decoder_input_ids"]).loss.backward()
            optimizer.step()
    name = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    moved = theirs.get_parameter(name) - make().get_parameter(name)
    assert moved.abs().max() > 1e-4
    torch.testing.assert_close(ours.get_parameter(name), theirs.get_parameter(name), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", every_other_deep(["t5", "umt5"], ["t5"]))
def test_compiles_without_a_graph_break(kind: str) -> None:
    theirs, ours = twins(kind)
    compiled = torch.compile(ours, backend="eager", fullgraph=True)
    assert difference(logits(theirs, **inputs()), compiled(**inputs(), use_cache=False).logits) < TOLERANCE


def test_slopes_are_refused() -> None:
    with pytest.raises(ValueError, match="slopes and learn are for BLOOM and MPT"):
        use_priors(make(), learn=True)


@every_kind
def test_attention_weights_match(kind: str) -> None:
    theirs, ours = (model(**inputs(), output_attentions=True) for model in twins(kind, "eager"))
    for name in ("encoder_attentions", "decoder_attentions", "cross_attentions"):
        assert len(ours[name]) == len(theirs[name]) == 2
        for found, expected in zip(ours[name], theirs[name], strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


# ---- unchanged behaviour


def test_other_models_of_the_config_are_unchanged() -> None:
    config = make().config
    one, other = T5EncoderModel(config).eval(), T5EncoderModel(config).eval()
    other.load_state_dict(one.state_dict())
    assert other.config is one.config
    before, ids = config.to_dict(), inputs()["input_ids"]
    use_priors(one)
    assert (other.config.to_dict(), other.config._attn_implementation) == (before, "sdpa")
    assert one.config.to_dict() == before
    assert difference(one(ids).last_hidden_state, other(ids).last_hidden_state) < TOLERANCE


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_have_separate_tables(copied: Any) -> None:
    model = use_priors(make())
    other = copied(model)
    before = logits(model, **inputs())
    assert torch.equal(logits(other, **inputs()), before)
    with torch.no_grad():
        other.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight[1] += 1
    assert difference(logits(other, **inputs()), before) > 0.1
    assert torch.equal(logits(model, **inputs()), before)


def test_models_may_be_offloaded_before_or_after() -> None:
    theirs, ours = twins()
    other = copy.deepcopy(theirs)
    for model in (ours, other):
        cpu_offload(model, execution_device=torch.device("cpu"))
    use_priors(other)
    expected = logits(theirs, **inputs())
    assert difference(logits(ours, **inputs()), expected) < TOLERANCE
    assert difference(logits(other, **inputs()), expected) < TOLERANCE


def test_other_attention_implementations_are_refused() -> None:
    model = use_priors(make())
    model.set_attn_implementation("sdpa")
    with pytest.raises(RuntimeError, match=r"implementation 'sdpa' does not support the prior.*restore_attention"):
        model(**inputs())
    model.set_attn_implementation("attention_priors")
    expected = logits(model, **inputs())
    assert difference(logits(restore_attention(model), **inputs()), expected) < TOLERANCE


def test_attach_points_to_use_priors() -> None:
    with pytest.raises(
        ValueError, match=r"not one stack of layers: .*; use_priors\(model\) computes its own bias as a prior"
    ):
        attach(make(), "laplace")


# ---- models with T5's bias under other names


def inputs_of(kind: str) -> dict[str, Tensor]:
    """Return inputs with boxes on a page for UDOP, whose encoder has a dense bias of boxes."""
    given = inputs()
    if kind == "udop":
        given["bbox"] = torch.rand(*given["input_ids"].shape, 4, generator=torch.Generator().manual_seed(2))
    return given


@every_relative
def test_logits_and_gradients_of_related_models_match(kind: str) -> None:
    theirs, ours = twins(kind, **RELATIVE_CHANGES.get(kind, {}))
    results = []
    for model in (theirs, ours):
        results.append(model(**inputs_of(kind), labels=inputs()["decoder_input_ids"]))
        results[-1].loss.backward()
    assert difference(results[0].logits, results[1].logits) < TOLERANCE
    for (name, a), b in zip(theirs.named_parameters(), ours.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        if a.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5)
    name = "decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    assert ours.get_parameter(name).grad.abs().max() > 1e-4


@every_relative
def test_related_models_decode_with_a_cache(kind: str) -> None:
    theirs, ours = twins(kind, **RELATIVE_CHANGES.get(kind, {}))
    given = inputs_of(kind)
    ids = given.pop("decoder_input_ids")
    whole, cache, parts = logits(theirs, **given, decoder_input_ids=ids), None, []
    for part in (ids[:, :5], ids[:, 5:6], ids[:, 6:]):
        out = ours(**given, decoder_input_ids=part, cache=cache)
        cache = out.cache
        parts.append(out.logits)
    assert difference(whole, torch.cat(parts, 1)) < TOLERANCE


def test_pix2structs_decoder_matches() -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2}
    sizes |= {"num_heads": 4, "initializer_range": 0.2}
    config = hf.Pix2StructTextConfig(**sizes, relative_attention_num_buckets=8, relative_attention_max_distance=20)
    theirs: Any = hf.Pix2StructTextModel(config).eval()
    torch.nn.init.normal_(theirs.layer[0].self_attention.attention.relative_attention_bias.weight, std=2)
    ours: Any = use_priors(copy.deepcopy(theirs))
    ids, seen = inputs()["decoder_input_ids"], torch.randn(3, 7, 32)
    for mask in (None, torch.ones(3, 7)):
        given = {"encoder_hidden_states": seen, "encoder_attention_mask": mask}
        cache = EncoderDecoderCache(DynamicCache(config=config), DynamicCache(config=config))
        parts = [ours(part, cache=cache, **given).logits for part in (ids[:, :6], ids[:, 6:])]
        assert difference(logits(theirs, input_ids=ids, **given), torch.cat(parts, 1)) < TOLERANCE
