"""Positions, documents and masks from the user are applied exactly, or refused with an error that names them."""

from typing import Any

import pytest
import torch
from tiny_decoders import DISTINCT, FAMILIES, VARIANTS, logits_of, tiny_decoder, tokens
from torch import Tensor
from transformers import DataCollatorWithFlattening, DynamicCache, StaticCache

from attention_priors.models import PriorDecoderForCausalLM
from thoroughness import each_once, every_other_deep

LENGTH = 9
every_family = pytest.mark.parametrize("family", FAMILIES)


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert float(expected.abs().max()) > 0.1
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-9)


@torch.no_grad()
def step(model: PriorDecoderForCausalLM, ids: Tensor, cache: Any, **options: Any) -> Tensor:
    found = model(ids, cache=cache, use_cache=True, **options).logits
    assert found is not None
    return found


# ---- positions


@pytest.mark.parametrize("variant", VARIANTS)
def test_default_positions_may_be_explicit(variant: str) -> None:
    model, ids = tiny_decoder(**VARIANTS[variant]), tokens(2, LENGTH)
    expected = logits_of(model, ids)
    assert torch.equal(logits_of(model, ids, position_ids=torch.arange(LENGTH).expand(2, -1)), expected)
    assert torch.equal(logits_of(model, ids, position_ids=torch.arange(LENGTH)[None]), expected)


@pytest.mark.parametrize(
    "variant",
    every_other_deep(
        [name for name, parts in VARIANTS.items() if "key_bias" not in str(parts)],
        ["ssmax and a prior", "ssmax beside a prior", "null key", *DISTINCT],
    ),
)
def test_positions_with_gaps_match_a_longer_text(variant: str) -> None:
    """Tokens with gaps in their positions give the logits of the longer text with the other tokens masked."""
    model, ids = tiny_decoder(**VARIANTS[variant]), tokens(2, LENGTH)
    there = torch.tensor([0, 1, 4, 5, 8])
    positions = there.expand(2, -1)
    hidden = torch.ones(LENGTH, dtype=torch.bool)
    hidden[there] = False
    mask = (~hidden).expand(2, 1, LENGTH, -1) & torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    expected = logits_of(model, ids, attention_mask=mask)[:, there]
    assert_close(logits_of(model, ids[:, there], position_ids=positions), expected)
    # The equality holds in decoding too, where positions cover all tokens.
    for cache in (DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=LENGTH)):
        parts = [
            step(model, ids[:, there[a:b]], cache, position_ids=positions[:, :b]) for a, b in ((0, 3), (3, 4), (4, 5))
        ]
        assert_close(torch.cat(parts, 1), expected)


@every_family
def test_far_positions_affect_only_absolute_parts(family: str) -> None:
    model, ids = tiny_decoder(**FAMILIES[family]), tokens(1, LENGTH)
    shifted = logits_of(model, ids, position_ids=torch.arange(LENGTH)[None] + 20)
    absolute = "GOAT" in family
    assert torch.allclose(shifted, logits_of(model, ids), rtol=1e-7, atol=1e-8) != absolute


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_document_begins_where_positions_do_not_rise(variant: str) -> None:
    model = tiny_decoder(**VARIANTS[variant])
    documents = [tokens(1, length, seed) for seed, length in enumerate((3, 1, 5))]
    expected = torch.cat([logits_of(model, document) for document in documents], 1)
    packed = torch.cat(documents, 1)
    positions = torch.cat([torch.arange(d.shape[1]) for d in documents])[None]
    assert_close(logits_of(model, packed, position_ids=positions), expected)


def test_documents_may_start_above_0() -> None:
    """The second document is the end of a text whose beginning is in another row."""
    model = tiny_decoder(**FAMILIES["GOAT"])
    first, second = tokens(1, 4, 1), tokens(1, 5, 2)
    later = torch.arange(3, 8)[None]
    expected = torch.cat([logits_of(model, first), logits_of(model, second, position_ids=later)], 1)
    positions = torch.cat([torch.arange(4)[None], later], 1)
    assert_close(logits_of(model, torch.cat([first, second], 1), position_ids=positions), expected)


@every_family
def test_batches_packed_by_transformers_match(family: str) -> None:
    model = tiny_decoder(**FAMILIES[family])
    rows = [tokens(1, length, seed)[0].tolist() for seed, length in enumerate((4, 2, 6))]
    batch: dict[str, Any] = DataCollatorWithFlattening()([{"input_ids": row} for row in rows])
    expected = torch.cat([logits_of(model, torch.tensor([row])) for row in rows], 1)
    assert_close(logits_of(model, batch["input_ids"], position_ids=batch["position_ids"]), expected)
    with torch.no_grad():
        loss = model(**batch).loss
    logits = logits_of(model, batch["input_ids"], position_ids=batch["position_ids"])
    apart = torch.nn.functional.cross_entropy(logits[0, :-1], batch["labels"][0, 1:])
    torch.testing.assert_close(loss.double(), apart, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("family", "padding_value"), each_once(FAMILIES, [0, 1]))
def test_positions_made_by_generate_match(family: str, padding_value: int) -> None:
    """Positions of padding are arbitrary: 0 in transformers now, 1 in earlier versions."""
    model, ids = tiny_decoder(**FAMILIES[family]), tokens(2, LENGTH)
    mask = torch.tensor([[0] * 4 + [1] * 5, [1] * 9])
    positions = (mask.cumsum(-1) - 1).masked_fill(mask == 0, padding_value)
    found = logits_of(model, ids, attention_mask=mask, position_ids=positions)
    assert torch.equal(found, logits_of(model, ids, attention_mask=mask))
    cache, parts = DynamicCache(config=model.config), []
    for a, b in ((0, 6), (6, 7), (7, 9)):  # positions of new tokens only, as a loop over tokens would pass them
        parts.append(step(model, ids[:, a:b], cache, attention_mask=mask[:, :b], position_ids=positions[:, a:b]))
    assert_close(torch.cat(parts, 1)[mask.bool()], found[mask.bool()])


def test_packed_rows_may_have_padding() -> None:
    model = tiny_decoder(**FAMILIES["GOAT"])
    first, second = tokens(1, 4, 1), tokens(1, 3, 2)
    padding = torch.zeros(1, 2, dtype=torch.int64)
    ids = torch.cat([padding, first, padding, second], 1)
    mask = (ids != 0).long()
    positions = torch.tensor([[0, 0, 0, 1, 2, 3, 0, 0, 0, 1, 2]])
    found = logits_of(model, ids, attention_mask=mask, position_ids=positions)
    assert_close(found[:, mask[0].bool()], torch.cat([logits_of(model, first), logits_of(model, second)], 1))


def test_documents_and_positions_combine() -> None:
    model, ids = tiny_decoder(**FAMILIES["GOAT"]), tokens(1, 7)
    documents, positions = torch.tensor([[0, 0, 0, 1, 1, 1, 1]]), torch.tensor([[2, 3, 4, 5, 6, 9, 10]])
    found = logits_of(model, ids, document_ids=documents, position_ids=positions)
    alone = [logits_of(model, ids[:, part], position_ids=positions[:, part]) for part in (slice(3), slice(3, None))]
    assert_close(found, torch.cat(alone, 1))


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("shape", {"position_ids": torch.arange(LENGTH)}),
        ("shape", {"position_ids": torch.zeros(3, LENGTH, dtype=torch.int64)}),
        ("shape", {"position_ids": torch.zeros(2, LENGTH + 1, dtype=torch.int64)}),
        ("integers", {"position_ids": torch.zeros(2, LENGTH)}),
        ("negative", {"position_ids": torch.arange(LENGTH).expand(2, -1) - 3}),
        (
            "rise",
            {
                "position_ids": torch.tensor([[0, 1, 2, 3, 2, 5, 6, 7, 8]] * 2),
                "document_ids": torch.zeros(2, LENGTH, dtype=torch.int64),
            },
        ),
    ],
)
def test_invalid_positions_are_refused(message: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"position_ids.*{message}"):
        tiny_decoder()(tokens(2, LENGTH), **options)


def test_positions_of_new_tokens_must_continue_the_cache() -> None:
    model, ids = tiny_decoder(**FAMILIES["BAM"]), tokens(1, 6)
    cache = DynamicCache(config=model.config)
    step(model, ids[:, :4], cache, position_ids=torch.arange(100, 104)[None])
    with pytest.raises(ValueError, match=r"position_ids.*all tokens so far, shape \(1, 5\)"):
        step(model, ids[:, 4:5], cache, position_ids=torch.tensor([[104]]))
    step(model, ids[:, 4:5], cache, position_ids=torch.arange(100, 105)[None])


# ---- masks of four dimensions


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "FoX"])
def test_dense_causal_masks_change_nothing(family: str) -> None:
    model, ids = tiny_decoder(**FAMILIES[family]), tokens(2, LENGTH)
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()[None, None]
    expected = logits_of(model, ids)
    assert_close(logits_of(model, ids, attention_mask=causal), expected)
    for least in (float("-inf"), torch.finfo(torch.float32).min):
        added = torch.zeros(2, 1, LENGTH, LENGTH).masked_fill(~causal, least)
        assert_close(logits_of(model, ids, attention_mask=added), expected)


@every_family
def test_branches_share_their_beginning(family: str) -> None:
    """Three tokens with two continuations, in one row and one cache, give the logits of two texts."""
    model = tiny_decoder(**FAMILIES[family])
    start, one, other = tokens(1, 3, 0), tokens(1, 2, 1), tokens(1, 2, 2)
    if family == "FoX":
        with pytest.raises(ValueError, match="gates sum over all tokens"):
            model(start, attention_mask=torch.ones(1, 1, 3, 3, dtype=torch.bool).tril())
        return
    ids = torch.cat([start, one, other], 1)
    positions = torch.tensor([[0, 1, 2, 3, 4, 3, 4]])
    mask = torch.ones(7, 7, dtype=torch.bool).tril()
    mask[5:, 3:5] = False
    expected = torch.cat(
        [logits_of(model, torch.cat([start, one], 1)), logits_of(model, torch.cat([start, other], 1))[:, 3:]], 1
    )
    assert_close(logits_of(model, ids, attention_mask=mask[None, None], position_ids=positions), expected)
    cache = DynamicCache(config=model.config)
    step(model, start, cache)
    found = step(model, ids[:, 3:], cache, attention_mask=mask[None, None, 3:], position_ids=positions)
    assert_close(found, expected[:, 3:])


@pytest.mark.parametrize(
    ("message", "mask"),
    [
        ("later position", torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool)),
        ("shape", torch.ones(2, 1, LENGTH, LENGTH - 1, dtype=torch.bool).tril()),
        ("shape", torch.ones(3, 1, LENGTH, LENGTH, dtype=torch.bool).tril()),
        ("boolean", torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.int64).tril()),
        ("shape", torch.ones(2, LENGTH, LENGTH)),
    ],
)
def test_invalid_dense_masks_are_refused(message: str, mask: Tensor) -> None:
    with pytest.raises(ValueError, match=rf"attention_mask.*{message}"):
        tiny_decoder()(tokens(2, LENGTH), attention_mask=mask)


def test_a_mask_of_only_new_tokens_is_refused() -> None:
    """Such a mask says nothing about the tokens in the cache."""
    model, ids = tiny_decoder(), tokens(2, LENGTH)
    cache = DynamicCache(config=model.config)
    step(model, ids[:, :5], cache)
    with pytest.raises(ValueError, match=r"attention_mask must have shape \(2, 9\)"):
        step(model, ids[:, 5:], cache, attention_mask=torch.ones(2, 4))


# ---- compiled

BRANCHES = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).tril()
BRANCHES[:, :, 6:, 3:6] = False


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0, 1]])}, marks=pytest.mark.deep),
        pytest.param(
            {
                "position_ids": torch.tensor([[0, 0, 0, 1, 2, 3, 4, 5, 6]]),
                "attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1]]),
            },
            marks=pytest.mark.deep,
        ),
        {"position_ids": torch.tensor([[0, 1, 2, 3, 4, 5, 3, 4, 5]]), "attention_mask": BRANCHES},
    ],
)
def test_compiled_model_accepts_positions(options: dict[str, Any]) -> None:
    model, ids = tiny_decoder(**FAMILIES["GOAT"], num_hidden_layers=1), tokens(1, LENGTH)
    torch._dynamo.reset()

    @torch.no_grad()
    def logits() -> Tensor:
        return model(ids, use_cache=False, **options).logits

    found = torch.compile(logits, fullgraph=True, backend="eager")()
    seen = options.get("attention_mask", torch.ones(1, 1))
    real = seen[0].bool() if seen.dim() == 2 and seen.shape[1] == LENGTH else torch.ones(LENGTH, dtype=torch.bool)
    assert_close(found[:, real], logits()[:, real])


def test_compiled_model_accepts_gaps() -> None:
    """A compiled attend() builds its tables before it reads the positions."""
    model, ids = tiny_decoder(**FAMILIES["BAM"], num_hidden_layers=1), tokens(1, LENGTH)
    torch._dynamo.reset()
    compiled: Any = torch.compile(model, backend="eager")
    with pytest.raises(ValueError, match="compiled attend"):
        compiled(ids, use_cache=False, position_ids=2 * torch.arange(LENGTH)[None])


@torch.no_grad()
def test_compiled_decoding_accepts_positions() -> None:
    """With a static cache and all positions so far, gaps give the results without a cache. Wrong positions of new
    tokens raise an error.
    """
    model, ids = tiny_decoder(**FAMILIES["BAM"], num_hidden_layers=1), tokens(1, 6)
    positions = torch.tensor([[0, 1, 4, 5, 8, 9]])
    expected = logits_of(model, ids, position_ids=positions)
    cache: Any = StaticCache(config=model.config, max_cache_len=10)
    parts = [step(model, ids[:, :4], cache, position_ids=positions[:, :4])]
    torch._dynamo.reset()
    compiled: Any = torch.compile(model.forward, fullgraph=True, backend="eager")
    for n in (4, 5):
        outputs = compiled(ids[:, n : n + 1], cache=cache, use_cache=True, position_ids=positions[:, : n + 1])
        parts.append(outputs.logits)
    assert_close(torch.cat(parts, 1), expected)
    with pytest.raises(RuntimeError, match="position_ids"):
        compiled(ids[:, :1], cache=cache, use_cache=True, position_ids=torch.tensor([[17]]))
