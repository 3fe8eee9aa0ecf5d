import math

import pytest
import torch
from evaluation_cases import SCHEMES, random_text, tiny_decoder
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

from attention_priors.lab.evaluate import perplexity_rows, position_bins


@given(length=st.integers(2, 5000))
def test_bins_cover_every_position_but_the_first_once(length):
    bins = position_bins(length)
    assert [p for first, last in bins for p in range(first, last + 1)] == list(range(1, length))
    assert [first for first, _ in bins] == [2**k for k in range(len(bins))]


def test_bins_of_a_short_text():
    assert position_bins(1) == []
    assert position_bins(2) == [(1, 1)]
    assert position_bins(8) == [(1, 1), (2, 3), (4, 7)]
    assert position_bins(10) == [(1, 1), (2, 3), (4, 7), (8, 9)]


@pytest.mark.parametrize("chunk", [1, 6, 100])
@pytest.mark.parametrize("name", SCHEMES)
def test_rows_are_mean_cross_entropies(name, chunk):
    model = tiny_decoder(3, **SCHEMES[name])
    texts = [random_text(seed, 22) for seed in range(3)]
    with torch.no_grad():
        logits = model(torch.stack(texts), use_cache=False).logits
    losses = torch.stack([cross_entropy(logits[i, :-1].double(), texts[i][1:], reduction="none") for i in range(3)])
    rows = perplexity_rows(model, texts, chunk=chunk)
    assert len(rows) == 5
    for row, (first, last) in zip(rows, [(1, 1), (2, 3), (4, 7), (8, 15), (16, 21)], strict=True):
        # The token at position p is predicted from those before it.
        expected = losses[:, first - 1 : last].mean().item()
        assert row == {
            "position": pytest.approx(math.sqrt(first * last)),
            "nll": pytest.approx(expected, rel=1e-4),
            "tokens": 3 * (last - first + 1),
        }


def test_each_text_is_reported_when_it_is_done():
    counts: list[int] = []
    texts = [random_text(seed, 9) for seed in range(3)]
    perplexity_rows(tiny_decoder(), texts, chunk=4, on_text=counts.append)
    assert counts == [1, 2, 3]


def test_texts_are_needed():
    with pytest.raises(ValueError, match="at least one text"):
        perplexity_rows(tiny_decoder(), [], chunk=4)
