"""The mask read from transformers' mask functions equals their matrices."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import masking_utils as masks

from attention_priors.models.masks import Keys, KeysMask, keys_mask


def matrix_of(keys: Keys) -> Tensor:
    """Return the matrix ``(B, Lq, Lk)`` from the parsed mask only."""
    assert keys.forbidden is None
    slots = torch.arange(keys.num_keys).unsqueeze(0) + keys.key_offset
    queries = torch.arange(keys.num_queries).unsqueeze(-1) + keys.query_offset
    seen = torch.ones(1, keys.num_queries, keys.num_keys, dtype=torch.bool)
    if keys.causal:
        seen = seen & (slots <= queries)
    if keys.window is not None:
        seen = seen & (slots > queries - keys.window)
    if keys.documents is not None:
        seen = seen & (keys.documents.unsqueeze(-1) == keys.documents.unsqueeze(-2))
    if keys.padding is not None:
        seen = seen & ~keys.padding[:, None]
    return seen


@given(st.data())
def test_parsed_masks_match_the_matrices(data: st.DataObject) -> None:
    batch, length = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 9))
    window = data.draw(st.none() | st.integers(1, 12))
    function = masks.causal_mask_function if window is None else masks.sliding_window_causal_mask_function(window)
    arguments: dict[str, Any] = {"q_length": length, "kv_length": length, "q_offset": 0, "kv_offset": 0}
    if data.draw(st.booleans()):
        documents = torch.randint(0, 2, (batch, length)).cumsum(-1)
        positions = torch.arange(length).expand(batch, -1).contiguous()
        within = masks.remap_positions_for_packed_sequence(function, positions)
        function = masks.and_masks(within, masks.packed_sequence_mask_function(documents))
    else:
        before, dropped = data.draw(st.integers(0, 9)), data.draw(st.integers(0, 4))
        dropped = min(dropped, before)
        arguments |= {"q_offset": before, "kv_offset": dropped}
        arguments["kv_length"] = before - dropped + length + data.draw(st.integers(0, 5))
    if data.draw(st.booleans()):
        mask = torch.rand(batch, arguments["q_offset"] + length) < 0.7
        arguments["attention_mask"] = mask
    mask = keys_mask(batch, "cpu", mask_function=function, **arguments)
    expected = masks.sdpa_mask(batch, mask_function=function, **arguments, allow_is_causal_skip=False)
    assert expected is not None
    assert torch.equal(matrix_of(mask.keys).expand(batch, -1, -1), expected[:, 0])
    assert torch.equal(mask.matrix(skip=False), expected)  # pyright: ignore[reportArgumentType]


@given(st.data())
def test_masks_of_the_last_queries_match(data: st.DataObject) -> None:
    """Gemma 4 computes only the last queries in layers that borrow keys."""
    length, before = data.draw(st.integers(1, 9)), data.draw(st.integers(0, 5))
    mask = keys_mask(
        2,
        "cpu",
        q_length=length,
        kv_length=before + length,
        q_offset=before,
        attention_mask=torch.rand(2, before + length) < 0.7,
    )
    whole = mask.matrix(skip=False)
    assert whole is not None
    start = data.draw(st.integers(-length, length - 1))
    last = mask[:, :, start:, :]
    expected = whole[:, :, start:]
    assert isinstance(last, KeysMask)
    assert last.shape == expected.shape
    assert torch.equal(matrix_of(last.keys).expand(2, -1, -1), expected[:, 0])
    assert torch.equal(last.matrix(skip=False), expected)  # pyright: ignore[reportArgumentType]
    for other in ((slice(None), 0, slice(start, None)), (slice(None), slice(None), slice(0, length, 2))):
        assert torch.equal(mask[other], whole[other])
    assert not isinstance(mask[:, :, : length - 1], KeysMask)
    assert not isinstance(mask[:, :, :, : before + length - 1], KeysMask)


@pytest.mark.parametrize("name", ["chunked", "or", "custom", "vmapped"])
def test_other_mask_functions_stay_matrices(name: str) -> None:
    function = {
        "chunked": masks.chunked_causal_mask_function(4, torch.zeros(2, dtype=torch.long)),
        "or": masks.or_masks(masks.causal_mask_function, masks.sliding_window_overlay(2)),
        "custom": lambda b, h, q, k: (q + k) % 3 > 0,
        "vmapped": masks.causal_mask_function,
    }[name]
    options: dict[str, Any] = {"q_length": 9, "kv_length": 9, "mask_function": function, "use_vmap": name == "vmapped"}
    mask = keys_mask(2, "cpu", **options)
    assert mask.is_dense
    expected = masks.sdpa_mask(2, **options, allow_is_causal_skip=False)
    assert torch.equal(mask.matrix(skip=False), expected)  # pyright: ignore[reportArgumentType]
    assert torch.equal(mask.keys.forbidden, ~expected)  # pyright: ignore[reportArgumentType, reportOptionalOperand]


def test_the_mask_allocates_no_matrix() -> None:
    mask = keys_mask(2, "cpu", q_length=5, kv_length=7, q_offset=2)
    assert mask.keys == Keys(torch.device("cpu"), 2, 5, 7)
    assert mask.shape == (2, 1, 5, 7)
    assert mask.dim() == mask.ndim == 4
    assert len(mask) == 2
    assert mask.dtype == torch.bool
    assert mask.untyped_storage().nbytes() == 1
    cropped = mask[:, :, :, :7]  # up to the number of keys, as in Pix2Struct
    copies = (mask.detach(), mask.clone(), mask.contiguous(), mask.to("cpu"), mask.to(torch.device("cpu")))
    for same in (cropped, mask.to(torch.bool), *copies):
        assert isinstance(same, KeysMask)
        assert same.keys.num_keys == 7
    moved = mask.to("meta")
    assert isinstance(moved, KeysMask)
    assert moved.device.type == "meta"


def test_operations_on_the_mask_return_the_matrix() -> None:
    mask = keys_mask(1, "cpu", q_length=4, kv_length=4)
    expected = torch.ones(4, 4, dtype=torch.bool).tril()
    assert torch.equal(mask[0, 0], expected)
    assert torch.equal((~mask)[0, 0], ~expected)
    assert torch.equal(mask[..., :2][0, 0], expected[:, :2])
    added = torch.zeros(4, 4).masked_fill(~mask[0, 0], -1.0)
    assert torch.equal(added, torch.zeros(4, 4).masked_fill(~expected, -1.0))
    assert not isinstance(mask.float(), KeysMask)
    assert torch.equal(torch.cat([mask, mask])[1, 0], expected)
