"""Forget gates: their sums, documents, padding and starts, and attention with gates as defined in the papers."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus

from attention_priors import Cable, ForgetGate, Laplace, SSMax, attend
from attention_priors.attention.forget_gate import FORGET_FLOOR, KEY_BIASES, last_of_documents
from attention_priors.config import build
from attention_priors.models import PriorDecoderConfig

HEADS, WIDTH = 2, 6


def a_gate(kind: type[ForgetGate] = ForgetGate, **options: Any) -> ForgetGate:
    gate = kind(HEADS, WIDTH, **options).double()
    with torch.no_grad():
        gate.weight.copy_(torch.randn(HEADS, WIDTH, generator=torch.Generator().manual_seed(1)))
    return gate


def hidden_states(batch: int, length: int, seed: int = 0) -> Tensor:
    return torch.randn(batch, length, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def forgetting_attention(query: Tensor, key: Tensor, value: Tensor, log_forget: Tensor) -> Tensor:
    """Compute the equation of section 3 in the Forgetting Transformer paper: ``d_ij = Σ_{l=j+1..i} ln f_l``, pair
    by pair.
    """
    length = query.shape[2]
    rows = []
    for i in range(length):
        sums = torch.stack([log_forget[:, j + 1 : i + 1].sum(1) for j in range(i + 1)], -1)
        logits = torch.einsum("bhd,bhjd->bhj", query[:, :, i], key[:, :, : i + 1]) * query.shape[-1] ** -0.5 + sums
        rows.append(torch.einsum("bhj,bhjd->bhd", logits.softmax(-1), value[:, :, : i + 1]))
    return torch.stack(rows, 2)


@pytest.mark.parametrize(("kind", "log_forget"), [(ForgetGate, logsigmoid), (Cable, lambda x: -softplus(x))])
def test_attention_and_gradients_match_the_papers(kind: type[ForgetGate], log_forget: Any) -> None:
    gate, hidden = a_gate(kind, init=[1.0, -0.5]), hidden_states(2, 9).requires_grad_(True)
    query, key, value = (
        hidden_states(2, HEADS * 9, seed).view(2, HEADS, 9, WIDTH).requires_grad_(True) for seed in (1, 2, 3)
    )
    learned = [hidden, gate.weight, gate.bias, query, key, value]
    steps = log_forget(torch.einsum("blw,hw->blh", hidden, gate.weight) + gate.bias)
    expected = forgetting_attention(query, key, value, steps)
    found = attend(query, key, value, key_bias=gate(hidden))
    # Gates are float32, as in the papers' code.
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    weights = torch.randn_like(expected)
    for one, other in zip(
        torch.autograd.grad(found, learned, weights), torch.autograd.grad(expected, learned, weights), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_cable_is_a_forget_gate_with_negated_weights() -> None:
    cable, gate, hidden = a_gate(Cable, init=0.7), a_gate(init=-0.7), hidden_states(2, 7)
    with torch.no_grad():
        gate.weight.neg_()
    torch.testing.assert_close(cable(hidden), gate(hidden), rtol=1e-6, atol=1e-6)


@given(owners=st.lists(st.integers(0, 3), min_size=1, max_size=12), seed=st.integers(0, 99))
def test_each_document_has_its_own_sum(owners: list[int], seed: int) -> None:
    """Sums do not depend on the places of tokens or on the number of tokens per call."""
    gate, hidden, documents = a_gate(), hidden_states(1, len(owners), seed), torch.tensor([owners])
    whole = gate(hidden, document_ids=documents)
    for owner in set(owners):
        mine = documents[0] == owner
        torch.testing.assert_close(whole[:, :, mine], gate(hidden[:, mine]), rtol=1e-12, atol=1e-12)
    cut = seed % len(owners)
    before = last_of_documents(whole[..., :cut], documents[:, :cut], documents[:, cut:]) if cut else None
    rest = gate(hidden[:, cut:], document_ids=documents[:, cut:], before=before)
    torch.testing.assert_close(rest, whole[..., cut:], rtol=1e-12, atol=1e-12)


def test_a_sum_continues_from_before() -> None:
    gate, hidden = a_gate(), hidden_states(2, 9)
    whole = gate(hidden)
    torch.testing.assert_close(gate(hidden[:, 4:], before=whole[..., 3:4]), whole[..., 4:], rtol=1e-12, atol=1e-12)


def test_padding_does_not_change_the_sum() -> None:
    gate, hidden = a_gate(), hidden_states(2, 9)
    padding = torch.zeros(2, 9, dtype=torch.bool)
    padding[0, [0, 3, 4]] = True
    found = gate(hidden, key_padding_mask=padding)
    torch.testing.assert_close(found[:1, :, ~padding[0]], gate(hidden[:1, ~padding[0]]), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found[1], gate(hidden)[1])


def test_a_gate_of_0_forgets_all_and_later_sums_stay_exact() -> None:
    gate, hidden = a_gate(init=30.0), hidden_states(1, 2000) * 0.01
    hidden[:, 1000] = -1e8 * gate.weight.detach().sum(0)
    found = gate(hidden)
    assert float((found[..., 1000] - found[..., 999]).min()) == -FORGET_FLOOR
    later = gate(hidden[:, 1001:])
    torch.testing.assert_close(found[..., 1001:] - found[..., 1000:1001], later, rtol=0, atol=1e-9)
    value = hidden_states(1, HEADS * 2000).view(1, HEADS, 2000, WIDTH)
    seen = attend(value[:, :, -1:], value, value, key_bias=found)
    alone = attend(value[:, :, -1:], value[:, :, 1000:], value[:, :, 1000:], key_bias=found[..., 1000:])
    torch.testing.assert_close(seen, alone, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("logit_scale", [None, SSMax(HEADS), SSMax(HEADS, include_prior=False)])
def test_gates_combine_with_prior_and_logit_scale(logit_scale: SSMax | None) -> None:
    gate, hidden = a_gate(init=2.0), hidden_states(1, 30)
    query, key, value = (hidden_states(1, HEADS * 30, seed).view(1, HEADS, 30, WIDTH) for seed in (1, 2, 3))
    options: dict[str, Any] = {"logit_scale": logit_scale, "key_bias": gate(hidden)}
    found, expected = (
        attend(query, key, value, Laplace(HEADS), backend=name, **options) for name in ("auto", "reference")
    )
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_configs_round_trip() -> None:
    gate = Cable(HEADS, WIDTH, init=[0.5, 1.0])
    assert gate.to_config() == {"name": "cable", "num_heads": HEADS, "width": WIDTH, "init": [0.5, 1.0], "std": 0.02}
    assert gate.bias.tolist() == [0.5, 1.0]
    assert build("key bias", KEY_BIASES, gate.to_config()).to_config() == gate.to_config()
    with pytest.raises(ValueError, match="unknown key bias 'gate'; expected one of forget_gate, cable"):
        PriorDecoderConfig(key_bias="gate")


@pytest.mark.parametrize("init", [float("nan"), [1.0], "fast", [0.0, None]])
def test_invalid_starts_are_refused(init: Any) -> None:
    with pytest.raises(ValueError, match="init must be a finite number, or a list of 2, got"):
        ForgetGate(HEADS, WIDTH, init)


def test_std_is_that_of_the_initial_weights() -> None:
    torch.manual_seed(0)
    assert float(ForgetGate(8, 512, std=0.3).weight.std()) == pytest.approx(0.3, rel=0.1)
    assert not ForgetGate(8, 512, std=0.0).weight.any()
    with pytest.raises(ValueError, match="std must be a finite number of at least 0, got -1"):
        ForgetGate(8, 512, std=-1)
