"""transformers' own tests of generation (GenerationTesterMixin), for every family of priors."""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_decoders import FAMILIES, VOCABULARY, logits_of, tiny_decoder, tokens
from torch import Tensor
from transformers import (
    CompileConfig,
    DynamicCache,
    GenerationConfig,
    MaxLengthCriteria,
    StaticCache,
    StoppingCriteriaList,
    TextIteratorStreamer,
)
from transformers.generation.utils import GENERATION_MODES_MAPPING

from thoroughness import each_once, every_other_deep

NEW, PROMPT = 6, 5
every_family = pytest.mark.parametrize("family", FAMILIES)


def decoder(family: str, **changes: Any) -> Any:
    """Return a decoder with wide embeddings, so that the next token depends on the tokens."""
    return tiny_decoder(**FAMILIES[family], initializer_range=1.0, **changes)


def generate(model: Any, ids: Tensor | None = None, **options: Any) -> Any:
    return model.generate(ids, **{"max_new_tokens": NEW, "pad_token_id": 0, "do_sample": False} | options)


def sample(model: Any, ids: Tensor, **options: Any) -> Tensor:
    torch.manual_seed(3)
    return generate(model, ids, do_sample=True, **options)


# ---- search


@every_family
def test_greedy_outputs_match_one_pass(family: str) -> None:
    """Scores, logits, attentions and hidden states of each step equal those of one pass over the whole text."""
    model, ids = decoder(family), tokens(2, PROMPT)
    flags = {"output_scores": True, "output_logits": True, "output_attentions": True, "output_hidden_states": True}
    found = generate(model, ids, return_dict_in_generate=True, **flags)
    assert found.sequences.shape == (2, PROMPT + NEW)
    with torch.no_grad():
        whole = model(found.sequences, output_attentions=True, output_hidden_states=True)
    for step in range(NEW):
        last = PROMPT + step
        for kind in (found.scores, found.logits):
            torch.testing.assert_close(kind[step].double(), whole.logits[:, last - 1], rtol=1e-5, atol=1e-5)
        rows = slice(0, last) if step == 0 else slice(last - 1, last)
        assert len(found.attentions[step]) == 2
        for weights, all_weights in zip(found.attentions[step], whole.attentions, strict=True):
            # A layer with a window keeps only the keys in it.
            dropped, kept = all_weights[:, :, rows, :last].tensor_split([last - weights.shape[-1]], -1)
            torch.testing.assert_close(weights, kept)
            assert (dropped == 0).all()
        for states, all_states in zip(found.hidden_states[step], whole.hidden_states, strict=True):
            torch.testing.assert_close(states, all_states[:, rows])
    assert found.cache.get_seq_length() == PROMPT + NEW - 1
    for layer, kind in zip(found.cache.layers, model.config.layer_types, strict=True):
        held = model.config.sliding_window - 1 if kind == "sliding_attention" else PROMPT + NEW - 1
        assert layer.keys.shape == layer.values.shape == (2, 2, held, 8)


@every_family
def test_sampling_is_equal_with_and_without_cache(family: str) -> None:
    model, ids = decoder(family), tokens(2, PROMPT)
    found = sample(model, ids, temperature=2.0)
    assert torch.equal(found, sample(model, ids, temperature=2.0, use_cache=False))
    assert not torch.equal(found, generate(model, ids))
    several = sample(model, ids, num_return_sequences=3, temperature=2.0)
    assert several.shape == (6, PROMPT + NEW)
    assert torch.equal(several[:, :PROMPT], ids.repeat_interleave(3, 0))


@pytest.mark.parametrize(("family", "how"), each_once(FAMILIES, ["search", "sample"]))
def test_beam_scores_are_mean_log_likelihoods(family: str, how: str) -> None:
    model, ids = decoder(family), tokens(2, PROMPT)
    search = generate if how == "search" else sample
    options: dict[str, Any] = {"num_beams": 3, "num_return_sequences": 2, "return_dict_in_generate": True}
    flags = {"output_scores": True, "output_attentions": True}
    found: Any = search(model, ids, **options, **flags)
    without: Any = search(model, ids, use_cache=False, **options)
    static: Any = search(model, ids, cache_implementation="static", **options)
    assert torch.equal(found.sequences, without.sequences)
    assert torch.equal(found.sequences, static.sequences)
    assert found.attentions[0][0].shape == (6, 4, PROMPT, PROMPT)
    if how == "search":
        # The score of a beam is the mean log-likelihood of its tokens.
        logs = logits_of(model, found.sequences).log_softmax(-1)[:, PROMPT - 1 : -1]
        total = logs.gather(-1, found.sequences[:, PROMPT:, None]).sum((1, 2))
        torch.testing.assert_close(found.sequences_scores.double(), total / NEW, rtol=1e-4, atol=1e-4)
        greedy = generate(model, ids)
        gain = logits_of(model, greedy).log_softmax(-1)[:, PROMPT - 1 : -1].gather(-1, greedy[:, PROMPT:, None])
        assert (total.view(2, 2).amax(-1) >= gain.sum((1, 2)) - 1e-6).all()


@pytest.mark.parametrize(
    ("family", "helper"),
    each_once(FAMILIES, ["another model", "the model itself", "its first layer", "the prompt"]),
)
def test_drafts_change_no_token(family: str, helper: str) -> None:
    model, ids = decoder(family), tokens(1, PROMPT)
    expected = generate(model, ids, max_new_tokens=12)
    options: dict[str, Any] = {
        "another model": {"assistant_model": decoder("BAM", num_hidden_layers=1)},
        "the model itself": {"assistant_model": model},
        "its first layer": {"assistant_early_exit": 1},
        "the prompt": {"prompt_lookup_num_tokens": 3},
    }[helper]
    found = generate(model, ids, max_new_tokens=12, return_dict_in_generate=True, output_attentions=True, **options)
    assert torch.equal(found.sequences, expected)
    assert model.config.num_hidden_layers == 2


def test_sampling_works_with_drafts() -> None:
    model, ids = decoder("GOAT"), tokens(1, PROMPT)
    found = sample(model, ids, assistant_model=decoder("BAM", num_hidden_layers=1))
    assert found.shape[1] <= PROMPT + NEW
    assert torch.equal(found[:, :PROMPT], ids)


def test_every_search_of_transformers_is_tested() -> None:
    """Searches outside of transformers itself are not tested. A new search in transformers fails this test."""
    methods = {method for method in GENERATION_MODES_MAPPING.values() if "/" not in method}
    assert methods == {"_sample", "_beam_search", "_assisted_decoding"}


# ---- input of generation


@every_family
def test_generation_from_embeddings(family: str) -> None:
    model, ids = decoder(family), tokens(2, PROMPT)
    embedded = model.get_input_embeddings()(ids)
    expected = generate(model, ids)
    assert torch.equal(generate(model, inputs_embeds=embedded), expected[:, PROMPT:])
    assert torch.equal(generate(model, ids, inputs_embeds=embedded), expected)
    static = generate(model, inputs_embeds=embedded, cache_implementation="static")
    assert torch.equal(static, expected[:, PROMPT:])
    beams = generate(model, ids, num_beams=2)
    assert torch.equal(generate(model, inputs_embeds=embedded, num_beams=2), beams[:, PROMPT:])


@every_family
def test_generation_from_embeddings_with_left_padding(family: str) -> None:
    model, ids = decoder(family), tokens(2, PROMPT)
    mask = torch.tensor([[0, 0, 1, 1, 1], [1] * 5])
    embedded = model.get_input_embeddings()(ids)
    found = generate(model, inputs_embeds=embedded, attention_mask=mask)
    assert torch.equal(found[:1], generate(model, ids[:1, 2:])[:, 3:])
    assert torch.equal(found[1:], generate(model, ids[1:])[:, PROMPT:])


@pytest.mark.parametrize("start", [{}, {"bos_token_id": 7}])
def test_generation_without_a_prompt(start: dict[str, int]) -> None:
    model = decoder("BAM")
    if not start:
        with pytest.raises(ValueError, match="bos_token_id"):
            generate(model)
        return
    assert torch.equal(generate(model, None, **start), generate(model, torch.tensor([[7]])))


@pytest.mark.parametrize(("family", "given"), each_once(FAMILIES, ["all tokens", "new tokens"]))
def test_generation_continues_from_a_cache(family: str, given: str) -> None:
    """Generation stops, more tokens are appended, and generation continues from the cache."""
    model, ids, more = decoder(family), tokens(2, PROMPT), tokens(2, 3, 1)
    for padding in (0, 2):
        mask = torch.ones(2, PROMPT, dtype=torch.int64)
        mask[0, :padding] = 0
        first = generate(model, ids, attention_mask=mask, return_dict_in_generate=True)
        text = torch.cat([first.sequences, more], 1)
        mask = torch.cat([mask, torch.ones(2, NEW + 3, dtype=torch.int64)], 1)
        expected = generate(model, text, attention_mask=mask)
        length = first.cache.get_seq_length()
        fed = text if given == "all tokens" else text[:, length:]
        found = generate(model, fed, attention_mask=mask, cache=first.cache)
        assert torch.equal(found[:, -NEW:], expected[:, -NEW:])


@pytest.mark.parametrize("family", every_other_deep(FAMILIES, ["ALiBi and SSMax", "GOAT", "FoX", "SWAN"]))
def test_generation_continues_the_last_document(family: str) -> None:
    """Generated tokens continue the last document, with or without gaps before it."""
    model = decoder(family)
    first, last = tokens(2, 3, 1), tokens(2, PROMPT, 2)
    ids = torch.cat([first, last], 1)
    expected = generate(model, last)[:, PROMPT:]
    documents = torch.tensor([[0] * 3 + [1] * PROMPT] * 2)
    positions = torch.tensor([[*range(3), *range(PROMPT)]] * 2)
    given: list[dict[str, Any]] = [{"document_ids": documents}, {"position_ids": positions}]
    searches: list[dict[str, Any]] = [{"num_beams": 2}, {"cache_implementation": "static"}]
    for options in given:
        assert torch.equal(generate(model, ids, **options)[:, 3 + PROMPT :], expected)
        for search in searches:
            found = generate(model, ids, **options, **search)[:, 3 + PROMPT :]
            assert torch.equal(found, generate(model, last, **search)[:, PROMPT:])
    gaps = torch.tensor([[0, 1, 4, 5, 9]] * 2)
    text, at = last, gaps
    for _ in range(NEW):
        following = logits_of(model, text, position_ids=at)[:, -1:].argmax(-1)
        text, at = torch.cat([text, following], 1), torch.cat([at, at[:, -1:] + 1], 1)
    assert torch.equal(generate(model, last, position_ids=gaps), text)


def test_documents_with_drafts_and_chunked_prefill() -> None:
    model, ids = decoder("BAM"), torch.cat([tokens(1, 3, 1), tokens(1, PROMPT, 2)], 1)
    documents = torch.tensor([[0] * 3 + [1] * PROMPT])
    expected = generate(model, ids, document_ids=documents)
    for options in ({"prompt_lookup_num_tokens": 3}, {"prefill_chunk_size": 2}):
        assert torch.equal(generate(model, ids, document_ids=documents, **options), expected), options
    with pytest.raises(ValueError, match="position_ids"):  # transformers cuts the prompt into chunks
        generate(model, ids, position_ids=2 * torch.arange(8)[None], prefill_chunk_size=2)


# ---- caches


@pytest.mark.parametrize(("family", "padded"), each_once(FAMILIES, [False, True]))
def test_caches_change_no_token(family: str, padded: bool) -> None:
    model, ids = decoder(family), tokens(2, PROMPT)
    mask = torch.ones_like(ids)
    mask[0, : 3 * padded] = 0
    expected = generate(model, ids, attention_mask=mask)
    for options in (
        {"use_cache": False},
        {"cache_implementation": "static"},
        {"cache_implementation": "static", "max_cache_len": 30},
        {"prefill_chunk_size": 2},
        {"prefill_chunk_size": 2, "cache_implementation": "static"},
        {"cache": DynamicCache(config=model.config)},
        {"cache": StaticCache(config=model.config, max_cache_len=20)},
    ):
        assert torch.equal(generate(model, ids, attention_mask=mask, **options), expected), options


@every_family
def test_generation_amid_training_with_gradient_checkpointing(family: str) -> None:
    model, ids = decoder(family), tokens(2, PROMPT)
    expected = generate(model, ids)
    model.train().activation_checkpointing_enable()
    assert torch.equal(generate(model, ids), expected)


def test_quantised_cache_changes_no_token() -> None:
    pytest.importorskip("optimum.quanto")
    model, ids = decoder("BAM", hidden_size=64), tokens(2, PROMPT)
    exact = generate(model, ids)
    found = generate(model, ids, cache_implementation="quantized", cache_config={"nbits": 4, "residual_length": 128})
    assert torch.equal(found, exact)  # the cache keeps all of these tokens unquantised


@pytest.mark.skipif(not torch.cuda.is_available(), reason="transformers offloads caches from CUDA alone")
def test_offloaded_cache_changes_no_token() -> None:
    model, ids = decoder("GOAT").cuda(), tokens(2, PROMPT).cuda()
    for implementation in ("offloaded", "offloaded_static"):
        assert torch.equal(generate(model, ids, cache_implementation=implementation), generate(model, ids))


def test_generate_compiles_the_model() -> None:
    """Accelerators compile with a static cache: one graph for each token, with padding."""
    model, ids = decoder("GOAT", num_hidden_layers=1), tokens(2, PROMPT)
    mask = torch.tensor([[0, 0, 1, 1, 1], [1] * 5])
    compilation: Any = CompileConfig(backend="aot_eager", fullgraph=True)
    compilation._compile_all_devices = True
    expected = generate(model, ids, attention_mask=mask)
    torch._dynamo.reset()
    found = generate(model, ids, attention_mask=mask, cache_implementation="static", compile_config=compilation)
    assert hasattr(model, "_compiled_call")
    assert torch.equal(found, expected)


# ---- options


def test_unknown_arguments_are_refused() -> None:
    model, ids = decoder("BAM"), tokens(1, PROMPT)
    with pytest.raises(ValueError, match="not used by the model"):
        generate(model, ids, documents=torch.zeros(1, PROMPT))
    assert "logits_to_keep" in inspect.signature(model.forward).parameters


def test_generate_accepts_logits_to_keep() -> None:
    model, ids = decoder("BAM"), tokens(2, PROMPT)
    assert torch.equal(generate(model, ids, logits_to_keep=0), generate(model, ids))


def test_transition_scores_match_the_logits() -> None:
    model, ids = decoder("GOAT"), tokens(2, PROMPT)
    found = generate(model, ids, num_beams=2, return_dict_in_generate=True, output_scores=True, length_penalty=1.0)
    scores = model.compute_transition_scores(found.sequences, found.scores, found.beam_indices)
    torch.testing.assert_close(scores.sum(-1) / NEW, found.sequences_scores, rtol=1e-4, atol=1e-4)


def test_stopping_criteria_are_applied() -> None:
    model, ids = decoder("BAM"), tokens(1, PROMPT)
    whole = generate(model, ids)
    limit: Any = StoppingCriteriaList([MaxLengthCriteria(PROMPT + 2)])
    assert torch.equal(generate(model, ids, stopping_criteria=limit), whole[:, : PROMPT + 2])
    end = int(whole[0, PROMPT + 1])
    first = PROMPT + whole[0, PROMPT:].tolist().index(end)
    assert torch.equal(generate(model, ids, eos_token_id=end), whole[:, : first + 1])


def test_streamed_tokens_match_the_output() -> None:
    class Words:
        def decode(self, ids: Any, **options: Any) -> str:
            return "".join(f"{int(i)} " for i in ids)

    model, ids = decoder("BAM"), tokens(1, PROMPT)
    streamer: Any = TextIteratorStreamer(Words(), skip_prompt=True)  # pyright: ignore[reportArgumentType]
    found = generate(model, ids, streamer=streamer)
    assert "".join(streamer).split() == [str(int(i)) for i in found[0, PROMPT:]]


def test_generation_configs_are_saved(tmp_path: Path) -> None:
    model = tiny_decoder(torch.float32, **FAMILIES["BAM"])
    assert model.generation_config is not None
    model.generation_config.update(max_new_tokens=3, pad_token_id=0, eos_token_id=VOCABULARY - 1)
    model.save_pretrained(tmp_path)
    loaded: Any = type(model).from_pretrained(tmp_path)
    assert GenerationConfig.from_pretrained(tmp_path).max_new_tokens == 3
    assert loaded.generate(tokens(1, PROMPT), do_sample=False).shape[1] <= PROMPT + 3


def test_continuous_batching_is_refused_with_the_reason() -> None:
    """It stores keys and values in pages for transformers' own attention functions, which have no prior."""
    model = decoder("BAM")
    with pytest.raises(NotImplementedError, match="continuous batching"):
        model.generate_batch([tokens(1, PROMPT)[0].tolist()])
