"""Logits of a sequence are equal in chunks, packed and padded."""

from typing import Any

import pytest
import torch
from tiny_decoders import DISTINCT, VARIANTS, logits_of, tiny_decoder, tokens
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

from attention_priors import attend, explain
from attention_priors.attention.pruning import certificate
from attention_priors.models import PriorDecoderConfig, PriorDecoderForCausalLM
from thoroughness import each_once, every_other_deep

LENGTH = 11


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert float(expected.abs().max()) > 0.1
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-9)


@torch.no_grad()
def in_chunks(model: PriorDecoderForCausalLM, ids: Tensor, chunks: list[int], cache: Any, **whole: Any) -> Tensor:
    """Return the logits of a sequence fed in chunks. ``whole`` holds arguments over all keys so far."""
    parts, start = [], 0
    for size in chunks:
        stop = start + size
        options = {name: value[:, :stop] for name, value in whole.items()}
        outputs = model(ids[:, start:stop], cache=cache, use_cache=True, **options)
        assert outputs.cache is cache
        parts.append(outputs.logits)
        start = stop
    assert start == ids.shape[1]
    return torch.cat(parts, 1)


@pytest.mark.parametrize(("variant", "chunks"), each_once(VARIANTS, [[4, 1, 3, 1, 1, 1], [1] * LENGTH, [LENGTH]]))
def test_chunks_over_a_cache_match_one_pass(variant: str, chunks: list[int]) -> None:
    model, ids = tiny_decoder(**VARIANTS[variant]), tokens(2, LENGTH)
    whole = logits_of(model, ids)
    assert_close(in_chunks(model, ids, chunks, DynamicCache(config=model.config)), whole)


def test_a_tolerance_bounds_the_error_and_skips_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of a long text use a cache. The step over a single token reads every key."""
    model, ids = tiny_decoder(prior="laplace"), tokens(1, 1800)
    exact = in_chunks(model, ids, [900, 899, 1], DynamicCache(config=model.config))
    pruned = tiny_decoder(prior="laplace", tolerance=0.2)
    pruned.load_state_dict(model.state_dict())
    seen: list[tuple[int, bool]] = []

    def watched(query: Tensor, key: Tensor, *arguments: Any, **options: Any) -> Tensor:
        told = explain(query, key, *arguments, **options)
        seen.append((query.shape[-2], "are pruned" in told))
        return attend(query, key, *arguments, **options)

    monkeypatch.setattr("attention_priors.models.pretrained.attend", watched)
    monkeypatch.setattr(certificate, "FEWEST_KEYS", 512)
    found = in_chunks(pruned, ids, [900, 899, 1], DynamicCache(config=pruned.config))
    error = float((found - exact).abs().max())
    assert 1e-10 < error < 0.4 * float(exact.abs().max())
    assert set(seen) == {(900, True), (899, True), (1, False)}


@pytest.mark.parametrize("tolerance", [-1e-6, 1.0])
def test_a_tolerance_must_be_a_share(tolerance: float) -> None:
    with pytest.raises(ValueError, match=r"tolerance must be in \[0, 1\), got"):
        PriorDecoderConfig(tolerance=tolerance)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_static_cache_matches_one_pass(variant: str) -> None:
    """A cache with free slots, whose empty keys are hidden."""
    model, ids = tiny_decoder(**VARIANTS[variant]), tokens(2, LENGTH)
    cache = StaticCache(config=model.config, max_cache_len=LENGTH + 6)
    assert_close(in_chunks(model, ids, [5, 1, 4, 1], cache), logits_of(model, ids))


@pytest.mark.parametrize("variant", every_other_deep(VARIANTS, DISTINCT))
def test_packed_documents_match_separate_ones(variant: str) -> None:
    model = tiny_decoder(**VARIANTS[variant])
    lengths = [3, 6, 1, 4]
    documents = [tokens(1, length, seed) for seed, length in enumerate(lengths)]
    packed = torch.cat(documents, 1)
    ids = torch.cat([torch.full((1, n), index) for index, n in enumerate(lengths)], 1)
    alone = torch.cat([logits_of(model, document) for document in documents], 1)
    found = logits_of(model, packed, document_ids=ids)
    assert_close(found, alone)
    assert float((logits_of(model, packed) - alone).abs().max()) > 1e-3
    assert_close(in_chunks(model, packed, [5, 1, 8], DynamicCache(config=model.config), document_ids=ids), alone)


@pytest.mark.parametrize("variant", VARIANTS)
def test_interleaved_documents_match_separate_ones(variant: str) -> None:
    """Tokens of two documents alternate. Positions count within each document."""
    model = tiny_decoder(**VARIANTS[variant])
    ids, owners = tokens(1, 9), torch.tensor([[0, 1, 0, 0, 1, 0, 1, 1, 0]])
    found = logits_of(model, ids, document_ids=owners)
    for owner in (0, 1):
        mine = owners[0] == owner
        assert_close(found[:, mine], logits_of(model, ids[:, mine]))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("variant", every_other_deep(VARIANTS, DISTINCT))
def test_padding_changes_no_logits(variant: str, side: str) -> None:
    model = tiny_decoder(**VARIANTS[variant])
    lengths = [LENGTH, 4, 7]
    ids, mask = tokens(3, LENGTH), torch.ones(3, LENGTH, dtype=torch.int64)
    for row, length in enumerate(lengths):
        padding = slice(0, LENGTH - length) if side == "left" else slice(length, LENGTH)
        ids[row, padding], mask[row, padding] = 0, 0
    found = logits_of(model, ids, attention_mask=mask)
    assert torch.isfinite(found).all()
    chunked = in_chunks(model, ids, [3, 6, 1, 1], DynamicCache(config=model.config), attention_mask=mask)
    static = StaticCache(config=model.config, max_cache_len=LENGTH + 3)
    in_static = in_chunks(model, ids, [3, 6, 1, 1], static, attention_mask=mask)
    for row in range(3):
        real = mask[row].bool()
        alone = logits_of(model, ids[row : row + 1, real])[0]
        for logits in (found, chunked, in_static):
            assert_close(logits[row, real], alone)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_do_not_depend_on_later_tokens(variant: str) -> None:
    model, ids = tiny_decoder(**VARIANTS[variant]), tokens(1, LENGTH)
    changed = ids.clone()
    changed[0, 6] = (ids[0, 6] + 1) % 50
    before, after = logits_of(model, ids), logits_of(model, changed)
    torch.testing.assert_close(before[:, :6], after[:, :6], rtol=1e-12, atol=1e-12)
    assert float((before[:, 6:] - after[:, 6:]).abs().amax(-1).min()) > 1e-6 or "window" in variant or variant == "sum"


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v not in ("nothing", "prior uniform", "ssmax")])
def test_logits_depend_on_the_order_of_tokens(variant: str) -> None:
    """Each prior and encoding has an effect: the last logits depend on the order of earlier tokens."""
    model, ids = tiny_decoder(**VARIANTS[variant]), tokens(1, LENGTH)
    swapped = ids.clone()
    swapped[0, [1, 7]] = ids[0, [7, 1]]
    assert ids[0, 1] != ids[0, 7]
    moved = (logits_of(model, ids) - logits_of(model, swapped))[:, -1].abs().max()
    assert float(moved) > 1e-5


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)])
def test_grouped_queries_match_repeated_keys(heads: tuple[int, int]) -> None:
    """With repeated key and value heads, a grouped model equals a model with one key head per query head."""
    sizes = {"num_attention_heads": heads[0], "prior": "laplace", "encoding": "rotary"}
    grouped = tiny_decoder(**sizes, num_key_value_heads=heads[1])
    full = tiny_decoder(**sizes, num_key_value_heads=heads[0])
    state = grouped.state_dict()
    for name, tensor in state.items():
        if "k_proj" in name or "v_proj" in name:
            by_head = tensor.unflatten(0, (heads[1], -1))
            state[name] = by_head.repeat_interleave(heads[0] // heads[1], 0).flatten(0, 1)
    full.load_state_dict(state)
    ids = tokens(2, LENGTH)
    assert_close(logits_of(grouped, ids), logits_of(full, ids))


def test_rotary_decoders_match_llama() -> None:
    sizes: dict[str, Any] = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3, "tie_word_embeddings": True}
    llama = LlamaForCausalLM(LlamaConfig(**sizes)).double()
    ours = PriorDecoderForCausalLM(PriorDecoderConfig(**sizes, encoding="rotary")).double()
    ours.load_state_dict(llama.state_dict())
    ids = tokens(2, LENGTH)
    # transformers rotates in float32.
    torch.testing.assert_close(logits_of(ours, ids), logits_of(llama, ids), rtol=1e-4, atol=1e-5)


def test_embeddings_replace_tokens() -> None:
    model, ids = tiny_decoder(prior="laplace"), tokens(2, LENGTH)
    with torch.no_grad():
        embedded = model(inputs_embeds=model.model.embed_tokens(ids), use_cache=False).logits
    assert_close(embedded, logits_of(model, ids))
    with pytest.raises(ValueError, match="input_ids"):
        model(ids, inputs_embeds=model.model.embed_tokens(ids))
    with pytest.raises(ValueError, match="input_ids"):
        model()


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_to_keep_selects_the_last_logits(variant: str) -> None:
    model, ids = tiny_decoder(**VARIANTS[variant]), tokens(2, LENGTH)
    whole = logits_of(model, ids)
    assert_close(logits_of(model, ids, logits_to_keep=3), whole[:, -3:])
    chosen = torch.tensor([0, 5])
    assert_close(logits_of(model, ids, logits_to_keep=chosen), whole[:, chosen])


@pytest.mark.parametrize("variant", VARIANTS)
def test_tokens_without_logits_are_cached(variant: str) -> None:
    """The last layer computes fewer queries of a chunk, but caches all of its keys."""
    model, ids = tiny_decoder(**VARIANTS[variant]), tokens(2, LENGTH)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :6], cache=cache, use_cache=True, logits_to_keep=1)
    found = logits_of(model, ids[:, 6:], cache=cache, logits_to_keep=2)
    assert_close(found, logits_of(model, ids)[:, -2:])


def test_loss_is_the_mean_over_next_tokens() -> None:
    model, ids = tiny_decoder(prior="laplace"), tokens(2, LENGTH)
    labels = ids.clone()
    labels[0, :4] = -100
    logits = logits_of(model, ids)
    with torch.no_grad():
        loss = model(ids, labels=labels).loss
    expected = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("document_ids", {"document_ids": torch.zeros(2, LENGTH - 1, dtype=torch.int64)}),
        ("document_ids", {"document_ids": torch.zeros(1, LENGTH, dtype=torch.int64)}),
        ("attention_mask", {"attention_mask": torch.ones(2, LENGTH + 1)}),
        ("attention_mask", {"attention_mask": torch.ones(1, LENGTH)}),
        ("attention_mask", {"attention_mask": torch.ones(2, 1, LENGTH, LENGTH)}),
    ],
)
def test_invalid_masks_are_refused(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=name):
        tiny_decoder()(tokens(2, LENGTH), **options)


def test_positions_past_the_learned_table_are_refused() -> None:
    model = tiny_decoder(encoding={"name": "learned", "max_length": LENGTH - 1})
    with pytest.raises(ValueError, match="learned table"):
        model(tokens(1, LENGTH))
