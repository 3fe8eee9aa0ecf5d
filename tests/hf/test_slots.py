"""What is read from transformers' mask functions is what their matrices say."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import masking_utils as masks

from attention_priors.hf.slots import SlotMask, Slots, Visibility, slot_mask


def matrix_of(slots: Slots) -> Tensor:
    """From what was read alone, ``(B, Lq, Lk)``."""
    visibility = slots.visibility
    assert visibility is not None
    queries = torch.arange(slots.num_queries).unsqueeze(-1) + slots.query_offset
    keys = torch.arange(slots.num_keys).unsqueeze(0) + slots.key_offset
    seen = torch.ones(1, slots.num_queries, slots.num_keys, dtype=torch.bool)
    if visibility.causal:
        seen = seen & (keys <= queries)
    if visibility.window is not None:
        seen = seen & (keys > queries - visibility.window)
    if visibility.documents is not None:
        seen = seen & (visibility.documents.unsqueeze(-1) == visibility.documents.unsqueeze(-2))
    if slots.attention_mask is not None:
        assert isinstance(slots.key_offset, int)
        padded = torch.nn.functional.pad(slots.attention_mask, (0, 1000))
        seen = seen & padded[:, None, slots.key_offset : slots.key_offset + slots.num_keys]
    return seen


@given(st.data())
def test_what_is_read(data: st.DataObject) -> None:
    batch, length = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 9))
    window = data.draw(st.none() | st.integers(1, 12))
    function = masks.causal_mask_function if window is None else masks.sliding_window_causal_mask_function(window)
    arguments: dict[str, Any] = {"q_length": length, "kv_length": length, "q_offset": 0, "kv_offset": 0}
    if data.draw(st.booleans()):
        documents = torch.randint(0, 2, (batch, length)).cumsum(-1)
        positions = torch.arange(length).expand(batch, -1).contiguous()
        function = masks.packed_sequence_compatibility_function(function, positions, documents)
    else:
        before, dropped = data.draw(st.integers(0, 9)), data.draw(st.integers(0, 4))
        dropped = min(dropped, before)
        arguments |= {"q_offset": before, "kv_offset": dropped}
        arguments["kv_length"] = before - dropped + length + data.draw(st.integers(0, 5))
    if data.draw(st.booleans()):
        mask = torch.rand(batch, arguments["q_offset"] + length) < 0.7
        arguments["attention_mask"] = mask
    mask = slot_mask(batch, "cpu", mask_function=function, **arguments)
    expected = masks.sdpa_mask(batch, mask_function=function, **arguments, allow_is_causal_skip=False)
    assert expected is not None
    assert torch.equal(matrix_of(mask.slots).expand(batch, -1, -1), expected[:, 0])
    assert torch.equal(mask.slots.matrix(skip=False), expected)  # pyright: ignore[reportArgumentType]


@given(st.data())
def test_the_last_queries_alone(data: st.DataObject) -> None:
    """Gemma 4 computes no more of them in layers that borrow their keys."""
    length, before = data.draw(st.integers(1, 9)), data.draw(st.integers(0, 5))
    mask = slot_mask(
        2,
        "cpu",
        q_length=length,
        kv_length=before + length,
        q_offset=before,
        attention_mask=torch.rand(2, before + length) < 0.7,
    )
    whole = mask.slots.matrix(skip=False)
    assert whole is not None
    start = data.draw(st.integers(-length, length - 1))
    last = mask[:, :, start:, :]
    expected = whole[:, :, start:]
    assert isinstance(last, SlotMask)
    assert last.shape == expected.shape
    assert torch.equal(matrix_of(last.slots), expected[:, 0])
    assert torch.equal(last.slots.matrix(skip=False), expected)  # pyright: ignore[reportArgumentType]
    for other in ((slice(None), 0, slice(start, None)), (slice(None), slice(None), slice(0, length, 2))):
        assert torch.equal(mask[other], whole[other])
    assert not isinstance(mask[:, :, : length - 1], SlotMask)


@pytest.mark.parametrize("name", ["chunked", "or", "of one's own", "vmapped"])
def test_other_functions_are_kept_as_matrices(name: str) -> None:
    function = {
        "chunked": masks.chunked_causal_mask_function(4, torch.zeros(2, dtype=torch.long)),
        "or": masks.or_masks(masks.causal_mask_function, masks.sliding_window_overlay(2)),
        "of one's own": lambda b, h, q, k: (q + k) % 3 > 0,
        "vmapped": masks.causal_mask_function,
    }[name]
    options: dict[str, Any] = {"q_length": 9, "kv_length": 9, "mask_function": function, "use_vmap": name == "vmapped"}
    mask = slot_mask(2, "cpu", **options)
    assert mask.slots.visibility is None
    expected = masks.sdpa_mask(2, **options, allow_is_causal_skip=False)
    assert torch.equal(mask.slots.matrix(skip=False), expected)  # pyright: ignore[reportArgumentType]


def test_the_mask_is_a_tensor_without_memory() -> None:
    mask = slot_mask(2, "cpu", q_length=5, kv_length=7, q_offset=2)
    assert mask.slots.visibility == Visibility()
    assert mask.shape == (2, 1, 5, 7)
    assert mask.dim() == mask.ndim == 4
    assert len(mask) == 2
    assert mask.dtype == torch.bool
    assert mask.untyped_storage().nbytes() == 1
    for same in (mask.detach(), mask.clone(), mask.contiguous(), mask.to("cpu"), mask.to(torch.device("cpu"))):
        assert isinstance(same, SlotMask)
        assert same.slots.num_keys == 7
    moved = mask.to("meta")
    assert isinstance(moved, SlotMask)
    assert moved.device.type == "meta"


def test_whoever_computes_with_it_gets_the_matrix() -> None:
    mask = slot_mask(1, "cpu", q_length=4, kv_length=4)
    expected = torch.ones(4, 4, dtype=torch.bool).tril()
    assert torch.equal(mask[0, 0], expected)
    assert torch.equal((~mask)[0, 0], ~expected)
    assert torch.equal(mask[..., :2][0, 0], expected[:, :2])
    added = torch.zeros(4, 4).masked_fill(~mask[0, 0], -1.0)
    assert torch.equal(added, torch.zeros(4, 4).masked_fill(~expected, -1.0))
    assert not isinstance(mask.float(), SlotMask)
    assert torch.equal(torch.cat([mask, mask])[1, 0], expected)
