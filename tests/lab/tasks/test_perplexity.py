"""Losses of tokens by position, and the texts of each perplexity task."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from known_models import SCHEMES, random_text, tiny_decoder
from torch.nn.functional import cross_entropy

from attention_priors.lab.tasks.generation import token_losses
from attention_priors.lab.tasks.perplexity import binned, position_bins


@given(length=st.integers(2, 5000))
def test_bins_cover_every_position_except_the_first_once(length: int):
    bins = position_bins(length)
    assert [p for first, last in bins for p in range(first, last + 1)] == list(range(1, length))
    assert [first for first, _ in bins] == [2**k for k in range(len(bins))]


def test_short_texts_have_bins():
    assert position_bins(1) == []
    assert position_bins(2) == [(1, 1)]
    assert position_bins(8) == [(1, 1), (2, 3), (4, 7)]
    assert position_bins(10) == [(1, 1), (2, 3), (4, 7), (8, 9)]


@pytest.mark.parametrize("name", SCHEMES)
def test_losses_are_cross_entropies_for_any_chunk(name: str):
    model, text = tiny_decoder(3, **SCHEMES[name]), random_text(0, 22)
    with torch.no_grad():
        logits = model(text[None], use_cache=False).logits[0, :-1].double()
    expected = cross_entropy(logits, text[1:], reduction="none")
    for chunk in (1, 6, 100):
        (losses,) = token_losses(model, text[None], chunk=chunk)
        torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-6)
    # The token at position p is predicted from the tokens before it.
    sums = [(first, last, pytest.approx(expected[first - 1 : last].sum().item(), rel=1e-4))
            for first, last in ((1, 1), (2, 3), (4, 7), (8, 15), (16, 21))]  # fmt: skip
    assert binned(losses) == sums
