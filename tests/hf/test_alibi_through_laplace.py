"""BLOOM and MPT with priors against transformers' own code: float32 logits of the order of 10 agree within 1e-4."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from alibi_models import MODELS, TOLERANCE, VOCABULARY, bloom, difference, logits, mpt, padded, tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch.nn.functional import cross_entropy
from transformers import BloomForSequenceClassification, DynamicCache, StaticCache
from transformers.models.bloom.modeling_bloom import BloomAttention
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from attention_priors.hf import mpt_slopes, restore_attention, use_priors
from attention_priors.hf.alibi import prior_for
from attention_priors.hf.loading import check_positions
from thoroughness import each_once, every_other_deep, examples

Make = Callable[..., Any]
every_model = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
both_families = pytest.mark.parametrize("make", [bloom, mpt])


def twins(make: Make, **changes: object) -> tuple[Any, Any]:
    """Return transformers' model, and ours with equal weights."""
    model = make(**changes)
    return model, use_priors(copy.deepcopy(model))


@every_model
def test_logits_match_transformers(make: Make) -> None:
    theirs, ours = twins(make)
    assert difference(logits(theirs, tokens()), logits(ours, tokens())) < TOLERANCE
    mask = padded()
    expected = logits(theirs, tokens(), attention_mask=mask)
    assert difference(expected, logits(theirs, tokens()), mask) > 0.1  # the mask has an effect
    assert difference(expected, logits(ours, tokens(), attention_mask=mask), mask) < TOLERANCE


@both_families
@given(heads=st.integers(1, 7), length=st.integers(1, 12), hidden=st.lists(st.integers(0, 11), max_size=6))
@settings(max_examples=examples(5))
def test_any_number_of_heads_and_any_padding_match(make: Make, heads: int, length: int, hidden: list[int]) -> None:
    theirs, ours = twins(make, heads=heads)
    mask = torch.ones(2, length, dtype=torch.long)
    mask[0, [place for place in hidden if place < length]] = (
        0  # also in the middle of a text, where BLOOM counts tokens, not slots
    )
    ids = tokens(2, length)
    a, b = (logits(model, ids, attention_mask=mask) for model in (theirs, ours))
    assert difference(a, b, mask) < TOLERANCE


@given(heads=st.integers(1, 80), alibi_bias_max=st.integers(1, 20))
def test_slopes_match_mpt(heads: int, alibi_bias_max: int) -> None:
    published = build_mpt_alibi_tensor(heads, 2, alibi_bias_max)[:, 0]
    torch.testing.assert_close(-torch.tensor(mpt_slopes(heads, alibi_bias_max)), published[:, 0])


@both_families
def test_loss_and_gradients_match_transformers(make: Make) -> None:
    theirs, ours = twins(make)
    ids, mask = tokens(), padded()
    first = mask.cumsum(-1) == 1  # padding predicts it but sees no key: transformers then averages all values
    labels = ids.masked_fill((mask == 0) | first, -100)
    for model in (theirs, ours):
        model(ids, attention_mask=mask, labels=labels).loss.backward()
    for (name, a), (also, b) in zip(theirs.named_parameters(), ours.named_parameters(), strict=True):
        assert name == also
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5)


@both_families
def test_dropout_draws_equal_weights(make: Make) -> None:
    theirs: Any = bloom(attention_dropout=0.4) if make is bloom else mpt()
    if make is mpt:  # its config accepts integers only
        for block in theirs.transformer.blocks:
            block.attn.attn_dropout_p = 0.4
    ours = use_priors(copy.deepcopy(theirs))
    results = []
    for model in (theirs, ours):
        model.train()
        torch.manual_seed(1)
        results.append(logits(model, tokens()))
    assert difference(results[0], logits(theirs.eval(), tokens())) > 0.1
    assert difference(*results) < TOLERANCE


@both_families
def test_gradient_checkpointing_keeps_gradients(make: Make) -> None:
    model = use_priors(make()).train()
    ids = tokens()
    gradients = []
    for checkpointing in (False, True):
        model.zero_grad()
        if checkpointing:
            model.activation_checkpointing_enable()
        model(ids, labels=ids).loss.backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize(("beams", "make"), each_once([1, 3], [bloom, mpt]))
@pytest.mark.parametrize("cache", ["dynamic", "static", None])
def test_generated_tokens_match(make: Make, beams: int, cache: str | None) -> None:
    theirs, ours = twins(make)
    mask = torch.ones(3, 9, dtype=torch.long)
    mask[0, :4] = 0
    options = {"attention_mask": mask, "max_new_tokens": 8, "num_beams": beams, "do_sample": False, "pad_token_id": 0}
    options |= {"use_cache": False} if cache is None else {"cache_implementation": cache}
    options |= {"output_scores": True, "return_dict_in_generate": True, "eos_token_id": None}
    expected, got = (model.generate(tokens(), **options) for model in (theirs, ours))
    assert torch.equal(expected.sequences, got.sequences)
    assert difference(torch.stack(expected.scores)[:1], torch.stack(got.scores)[:1]) < TOLERANCE


@both_families
def test_chunks_over_a_cache_match(make: Make) -> None:
    theirs, ours = twins(make)
    ids, mask = tokens(), torch.ones(3, 9, dtype=torch.long)
    mask[0, :2] = 0
    mask[1, 5] = 0  # in the middle of a text, where BLOOM counts tokens and MPT slots
    whole = logits(theirs, ids, attention_mask=mask)
    for cache in (DynamicCache(config=ours.config), StaticCache(config=ours.config, max_cache_len=16)):
        parts = []
        for start, stop in ((0, 4), (4, 7), (7, 8), (8, 9)):
            parts.append(logits(ours, ids[:, start:stop], attention_mask=mask[:, :stop], cache=cache))
        assert difference(whole, torch.cat(parts, 1), mask) < TOLERANCE


@both_families
def test_a_cached_prefix_can_be_reused(make: Make) -> None:
    theirs, ours = twins(make)
    prefix, rest = tokens(1, 5), tokens(2, 4, seed=1)
    cache = DynamicCache(config=ours.config)
    logits(ours, prefix, cache=cache)
    cache.batch_repeat_interleave(2)
    got = logits(ours, rest, cache=cache)
    assert difference(logits(theirs, torch.cat([prefix.expand(2, -1), rest], 1))[:, 5:], got) < TOLERANCE


@both_families
def test_bfloat16_errors_are_no_larger_than_in_transformers(make: Make) -> None:
    theirs, ours = twins(make)
    exact = logits(theirs, tokens(4, 48))
    errors = []
    for model in (theirs, ours):
        rounded = logits(model.to(torch.bfloat16), tokens(4, 48))
        assert rounded.dtype == torch.bfloat16
        errors.append((rounded.float() - exact).abs().mean())
    assert errors[1] < 1.1 * errors[0]


@both_families
def test_autocast_errors_are_no_larger_than_in_transformers(make: Make) -> None:
    theirs, ours = twins(make)
    exact = logits(theirs, tokens(4, 48))
    errors = []
    for model in (theirs, ours):
        with torch.autocast("cpu", torch.bfloat16):
            cache = DynamicCache(config=model.config)
            parts = [logits(model, part, cache=cache) for part in tokens(4, 48).split(16, dim=1)]
        errors.append((torch.cat(parts, 1).float() - exact).abs().mean())
    assert errors[1] < 1.1 * errors[0]


def test_fixed_slopes_move_to_the_needed_device() -> None:
    model: Any = use_priors(bloom())
    first, second = (block.self_attention for block in model.transformer.h)
    assert first.prior is second.prior
    moved = prior_for(second, torch.device("meta"))
    assert moved is second.prior
    assert next(moved.parameters()).is_meta
    assert not next(first.prior.parameters()).is_meta
    assert prior_for(first, torch.device("cpu")) is first.prior


def test_mpt_continues_beyond_the_length_of_its_table() -> None:
    ours = use_priors(mpt(max_seq_len=8))
    assert difference(logits(mpt(max_seq_len=64), tokens(2, 20)), logits(ours, tokens(2, 20))) < TOLERANCE


@pytest.mark.parametrize("settings_of_mpt", [{"alibi": False}, {"alibi_bias_max": 16}])
def test_options_that_transformers_ignores_raise_a_warning(settings_of_mpt: dict[str, object]) -> None:
    theirs = mpt(attn_config=settings_of_mpt)
    with pytest.warns(UserWarning, match="transformers ignores"):
        ours = use_priors(copy.deepcopy(theirs))
    assert difference(logits(theirs, tokens()), logits(ours, tokens())) < TOLERANCE


def test_slopes_follow_the_config() -> None:
    theirs: Any = mpt(attn_config={"alibi_bias_max": 16})
    ours = use_priors(copy.deepcopy(theirs), slopes=mpt_slopes(4, 16))
    theirs.transformer.build_mpt_alibi_tensor = lambda heads, length, device: build_mpt_alibi_tensor(heads, length, 16)
    assert difference(logits(theirs, tokens()), logits(ours, tokens())) < TOLERANCE
    assert difference(logits(mpt(), tokens()), logits(ours, tokens())) > 0.01


def test_mpt_accepts_dense_masks() -> None:
    theirs, ours = twins(mpt)
    hidden = torch.ones(9, 9).triu(1).expand(3, 1, 9, 9).clone()
    hidden[:, :, 5:, :5] = 1  # two documents
    expected = logits(theirs, tokens(), attention_mask=hidden)
    assert difference(expected, logits(theirs, tokens())) > 0.1
    assert difference(expected, logits(ours, tokens(), attention_mask=hidden)) < TOLERANCE
    with pytest.raises(ValueError, match="must not let a token see a later position"):
        logits(ours, tokens(), attention_mask=torch.zeros(3, 1, 9, 9))


@both_families
def test_restoring_gives_the_original_model(make: Make) -> None:
    model = make()
    before, keys = logits(model, tokens(), attention_mask=padded()), list(model.state_dict())
    kinds, modules = [type(module) for module in model.modules()], [id(module) for module in model.modules()]
    assert use_priors(model) is model
    assert list(model.state_dict()) == keys
    assert [type(module) for module in model.modules()] != kinds
    assert restore_attention(model) is model
    assert [type(module) for module in model.modules()] == kinds
    assert [id(module) for module in model.modules()] == modules
    assert torch.equal(logits(model, tokens(), attention_mask=padded()), before)


def test_other_model_heads_are_supported() -> None:
    torch.manual_seed(0)
    theirs = BloomForSequenceClassification(bloom().config).eval()
    theirs.config.pad_token_id = 0
    ours = use_priors(copy.deepcopy(theirs))
    assert difference(logits(theirs, tokens()), logits(ours, tokens())) < TOLERANCE


@pytest.mark.parametrize("learn", every_other_deep([False, True], [True]))
def test_compiles_without_a_graph_break(learn: bool) -> None:
    model = use_priors(bloom(), learn=learn)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for mask in (None, padded()):
        got = compiled(tokens(), attention_mask=mask, use_cache=False).logits
        expected = model(tokens(), attention_mask=mask, use_cache=False).logits
        assert difference(expected, got, mask) < TOLERANCE


@both_families
def test_decoding_compiles_over_a_static_cache(make: Make) -> None:
    theirs, ours = twins(make)
    ids = tokens(1, 7)
    mask = torch.ones(1, 12, dtype=torch.long)  # as long as the cache, as generate makes it
    mask[:, :2] = 0
    mask[:, 7:] = 0
    cache = StaticCache(config=ours.config, max_cache_len=12)
    logits(ours, ids[:, :5], attention_mask=mask.clone(), cache=cache)
    step = torch.compile(ours, backend="eager", fullgraph=True)
    got = [logits(step, ids[:, i : i + 1], attention_mask=mask, cache=cache) for i in (5, 6)]
    expected = logits(theirs, ids, attention_mask=mask[:, :7])
    assert difference(expected[:, 5:], torch.cat(got, 1)) < TOLERANCE


@both_families
def test_embeddings_replace_tokens(make: Make) -> None:
    theirs, ours = twins(make)
    embeddings = theirs.get_input_embeddings()(tokens()).detach()
    with torch.no_grad():
        expected, got = (m(inputs_embeds=embeddings, attention_mask=padded()).logits for m in (theirs, ours))
    assert difference(expected, got, padded()) < TOLERANCE


def test_training_matches_transformers() -> None:
    theirs, ours = twins(bloom)
    losses, last = [], 0.0
    for model in (theirs, ours):
        optimizer = torch.optim.SGD(model.train().parameters(), lr=0.05)
        for _ in range(3):
            scores = model(tokens()).logits[:, :-1]
            loss = cross_entropy(scores.reshape(-1, VOCABULARY), tokens()[:, 1:].reshape(-1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            last = float(loss.detach())
        losses.append(last)
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


# ---- errors


def test_unknown_models_are_refused() -> None:
    with pytest.raises(ValueError, match="expected BLOOM, MPT, or a model with T5's relative bias"):
        use_priors(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="does not use priors"):
        restore_attention(bloom())
    with pytest.raises(ValueError, match="model must be a transformers model, or a module that contains one, got str"):
        use_priors("bigscience/bloom")  # pyright: ignore[reportArgumentType]
    model = use_priors(bloom())
    with pytest.raises(ValueError, match="already uses priors"):
        use_priors(model)


def test_wrapped_forwards_are_refused() -> None:
    model: Any = bloom()
    attention = model.transformer.h[1].self_attention
    attention.forward = attention.forward
    before = [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match=r"forward of a .* is wrapped"):
        use_priors(model)
    assert [type(module) for module in model.modules()] == before
    del attention.forward
    use_priors(model)
    attention.forward = attention.forward
    with pytest.raises(ValueError, match=r"forward of a .* is wrapped"):
        restore_attention(model)


def test_offloading_works_after_the_change() -> None:
    model = use_priors(bloom())
    expected = logits(model, tokens())
    cpu_offload(model, execution_device=torch.device("cpu"))
    assert torch.equal(logits(model, tokens()), expected)


def test_custom_attention_code_is_refused() -> None:
    class OwnAttention(BloomAttention):
        pass

    model: Any = bloom()
    model.transformer.h[1].self_attention.__class__ = OwnAttention
    with pytest.raises(ValueError, match="OwnAttention, which does not run transformers' own"):
        use_priors(model)


@pytest.mark.parametrize(("make", "target"), [(bloom, "query_key_value"), (mpt, "Wqkv")])
def test_lora_trains_beside_priors(make: Make, target: str) -> None:
    config = LoraConfig(target_modules=[target], init_lora_weights=False)
    theirs = get_peft_model(make(), config).eval()
    ours = use_priors(copy.deepcopy(theirs))
    expected = logits(theirs, tokens())
    assert difference(expected, logits(make(), tokens())) > 0.1
    assert difference(expected, logits(ours, tokens())) < TOLERANCE
    merged = restore_attention(ours).merge_and_unload()
    assert difference(expected, logits(use_priors(merged), tokens())) < TOLERANCE


def test_nested_models_are_supported() -> None:
    parts: Any = [bloom(4), bloom(6), mpt(6), mpt(5)]
    expected = [logits(part, tokens()) for part in parts]
    use_priors(torch.nn.ModuleList(parts))
    for part, before in zip(parts, expected, strict=True):
        assert difference(logits(part, tokens()), before) < TOLERANCE


def test_bloom_refuses_dense_masks() -> None:
    model = use_priors(bloom())
    with pytest.raises(ValueError, match=r"attention_mask must have shape \(batch, length\), got \(3, 1, 9, 9\)"):
        model(tokens(), attention_mask=torch.ones(3, 1, 9, 9).tril())


@both_families
def test_attention_weights_and_wrong_masks_are_refused(make: Make) -> None:
    model = use_priors(make())
    with pytest.raises(ValueError, match="output_attentions=True"):
        model(tokens(), output_attentions=True)
    with pytest.raises(ValueError, match=r"attention_mask must have shape \(3, 9\)"):
        model(tokens(), attention_mask=torch.ones(2, 9))
    cache = DynamicCache(config=model.config)
    logits(model, tokens(), cache=cache)
    with pytest.raises(ValueError, match=r"attention_mask must have shape \(3, 10\), .* got \(3, 1\)"):
        model(tokens(3, 1), attention_mask=torch.zeros(3, 1), cache=cache)


def test_priors_continue_beyond_mpts_table() -> None:
    model = mpt(max_seq_len=32)
    check_positions(model, 32)
    with pytest.raises(ValueError, match="has a table of 32 positions and cannot read rows of 33 tokens"):
        check_positions(model, 33)
    with pytest.raises(RuntimeError, match="must match the size"):
        model(tokens(1, 33))
    use_priors(model)
    check_positions(model, 33)
    assert model(tokens(1, 33)).logits.isfinite().all()
