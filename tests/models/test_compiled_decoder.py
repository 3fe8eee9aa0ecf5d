"""A compiled decoder: one graph, and the logits and gradients of the one that is not compiled."""

from typing import Any

import pytest
import torch
from tiny_decoders import FAMILIES, VARIANTS, tiny_decoder, tokens
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import StaticCache

from attention_priors.models import PriorDecoderForCausalLM
from thoroughness import every_other_deep

LENGTH = 12
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 7, [0] * 12])
MASK = torch.tensor([[0] * 3 + [1] * 9, [1] * 12])

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "documents": {"document_ids": DOCUMENTS},
    "padding": {"attention_mask": MASK},
}


def small_decoder(variant: str) -> PriorDecoderForCausalLM:
    """Return a decoder of one layer, or of two that share a prior."""
    options = VARIANTS[variant]
    return tiny_decoder(**options, num_hidden_layers=2 if options.get("share_prior") else 1)


PAIRS = [(variant, option) for variant in VARIANTS for option in OPTIONS]
# What a decoder does with priors, encodings and scales; tests of attention compile each prior alone.
DISTINCT = [
    ("prior and shaw", "plain"),
    ("prior and rotary", "padding"),
    ("encoding learned", "documents"),
    ("ssmax beside a prior", "documents"),
    ("shared prior", "padding"),
    ("sum", "padding"),
]


@pytest.mark.parametrize("pair", every_other_deep(PAIRS, DISTINCT), ids="-".join)
def test_no_graph_break(pair: tuple[str, str]) -> None:
    variant, options = pair[0], OPTIONS[pair[1]]
    model, ids = small_decoder(variant), tokens(2, LENGTH)
    torch._dynamo.reset()

    def logits() -> Tensor:
        return model(ids, use_cache=False, **options).logits

    found = torch.compile(logits, fullgraph=True, backend="aot_eager")()
    expected = logits()
    # What padding gives has no meaning.
    meant = options.get("attention_mask", torch.ones_like(ids)).bool()
    torch.testing.assert_close(found[meant], expected[meant])
    learned = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    compiled, eager = (
        torch.autograd.grad(x[meant].square().sum(), list(learned.values()), allow_unused=True)
        for x in (found, expected)
    )
    for name, one, other in zip(learned, compiled, eager, strict=True):
        if other is not None:
            assert one is not None
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("variant", every_other_deep(VARIANTS, ["prior key_sink", "ssmax and a prior"]))
@torch.no_grad()
def test_decoding_with_a_static_cache_compiles_once(variant: str) -> None:
    """There are two graphs, for the prompt and for the tokens after it, however many tokens follow."""
    model, ids = small_decoder(variant), tokens(2, LENGTH)
    expected = model(ids, use_cache=False).logits
    cache = StaticCache(config=model.config, max_cache_len=LENGTH + 7)
    torch._dynamo.reset()
    before = counters["stats"]["unique_graphs"]
    compiled = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
    parts: list[Any] = [
        compiled(part, past_key_values=cache, use_cache=True).logits for part in ids.split([7] + [1] * (LENGTH - 7), 1)
    ]
    torch.testing.assert_close(torch.cat(parts, 1), expected)
    assert counters["stats"]["unique_graphs"] == before + 2


@pytest.mark.parametrize("family", every_other_deep(["BAM", "rotary"], ["BAM"]))
def test_one_graph_for_all_lengths(family: str) -> None:
    model = tiny_decoder(**FAMILIES[family], num_hidden_layers=1).train()
    torch._dynamo.reset()
    before = counters["stats"]["unique_graphs"]
    compiled: Any = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for batch, length in ((2, 9), (3, 17)):
        ids = tokens(batch, length)
        loss, expected = (f(ids, labels=ids).loss for f in (compiled, model))
        torch.testing.assert_close(loss, expected)
        found = torch.autograd.grad(loss, model.model.layers[0].get_parameter("self_attn.q_proj.weight"))
        wanted = torch.autograd.grad(expected, model.model.layers[0].get_parameter("self_attn.q_proj.weight"))
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    assert counters["stats"]["unique_graphs"] == before + 1
