"""A compiled decoder is one graph, with the logits and gradients of the uncompiled decoder."""

import shutil
from typing import Any

import pytest
import torch
from tiny_decoders import VARIANTS, tiny_decoder, tokens
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from transformers import StaticCache

from attention_priors.models import PriorDecoderConfig, PriorDecoderForCausalLM
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
    """Return a decoder of one layer, or of two layers that share a prior."""
    options = VARIANTS[variant]
    return tiny_decoder(**options, num_hidden_layers=2 if options.get("share_prior") else 1)


PAIRS = [(variant, option) for variant in VARIANTS for option in OPTIONS]
# Variants of the decoder's use of priors, encodings and scales. Tests of attention compile each prior separately.
DISTINCT = [
    ("prior and shaw", "plain"),
    ("prior and rotary", "padding"),
    ("encoding learned", "documents"),
    ("shared prior", "padding"),
]


@pytest.mark.parametrize("pair", every_other_deep(PAIRS, DISTINCT), ids="-".join)
def test_decoder_compiles_without_a_graph_break(pair: tuple[str, str]) -> None:
    variant, options = pair[0], OPTIONS[pair[1]]
    model, ids = small_decoder(variant), tokens(2, LENGTH)
    torch._dynamo.reset()

    def logits() -> Tensor:
        return model(ids, use_cache=False, **options).logits

    found = torch.compile(logits, fullgraph=True, backend="aot_eager")()
    expected = logits()
    # Outputs of padding have no meaning.
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


@pytest.mark.parametrize("variant", every_other_deep(VARIANTS, ["ssmax and a prior"]))
@torch.no_grad()
def test_decoding_with_a_static_cache_compiles_once(variant: str) -> None:
    """There are two graphs, for the prompt and for later tokens, for any number of tokens."""
    model, ids = small_decoder(variant), tokens(2, LENGTH)
    expected = model(ids, use_cache=False).logits
    cache = StaticCache(config=model.config, max_cache_len=LENGTH + 7)
    torch._dynamo.reset()
    before = counters["stats"]["unique_graphs"]
    compiled = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
    parts: list[Any] = [
        compiled(part, cache=cache, use_cache=True).logits for part in ids.split([7] + [1] * (LENGTH - 7), 1)
    ]
    torch.testing.assert_close(torch.cat(parts, 1), expected)
    assert counters["stats"]["unique_graphs"] == before + 2


@pytest.mark.parametrize("variant", every_other_deep(VARIANTS, ["prior and rotary"]))
@torch.no_grad()
def test_documents_of_a_static_cache_in_compiled_code(variant: str) -> None:
    """Documents cover all slots, the empty ones included."""
    model, ids = small_decoder(variant), tokens(2, LENGTH)
    expected = model(ids, use_cache=False, document_ids=DOCUMENTS).logits
    cache = StaticCache(config=model.config, max_cache_len=LENGTH + 4)
    slots = torch.cat([DOCUMENTS, DOCUMENTS[:, -1:].expand(-1, 2), torch.full((2, 2), 9)], 1)
    torch._dynamo.reset()
    compiled = torch.compile(model.forward, fullgraph=True, backend="eager")
    parts: list[Any] = [compiled(part, cache=cache, document_ids=slots).logits for part in ids.split([4, 7, 1], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), expected)


# ---- lengths

SCHEMES: dict[str, dict[str, Any]] = {
    "nope": {"prior": None},
    "alibi": {"prior": "laplace"},
    "t5": {"prior": "relative_buckets"},
    "window": {"prior": {"name": "window", "size": 30}},
    "ggd": {"prior": "generalized_gaussian"},
    "ggd and ssmax": {"prior": "generalized_gaussian", "logit_scale": "ssmax"},
    "goat": {"prior": ["spectral", {"name": "key_sink", "train_length": 64}]},
    "rotary": {"prior": None, "encoding": "rotary"},
    "forget gate and null key": {"key_bias": "forget_gate", "null_logit": "null_key"},
}
SHAPES = ((2, 32), (3, 48), (2, 130), (3, 333))
"""Numbers of texts and tokens, for which attention uses one tile or several."""


def make(name: str) -> PriorDecoderForCausalLM:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    torch.manual_seed(0)
    return PriorDecoderForCausalLM(PriorDecoderConfig(vocab_size=50, **sizes, **SCHEMES[name]))


def step(model: Any, own: PriorDecoderForCausalLM, batch: int, length: int) -> list[Tensor]:
    """Return the loss and the gradients of all parameters."""
    text = torch.randint(0, 50, (batch, length), generator=torch.Generator().manual_seed(length))
    own.zero_grad()
    loss = model(input_ids=text, labels=text).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in own.parameters() if p.grad is not None)]


def check(name: str, backend: str) -> None:
    model = make(name)
    torch._dynamo.reset()
    counted = CompileCounterWithBackend(backend)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counted)
    for batch, length in SHAPES:
        found, expected = (step(each, model, batch, length) for each in (compiled, model))
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert counted.frame_count <= 2, "a graph for each length"


@pytest.mark.slow
@pytest.mark.parametrize("name", every_other_deep(SCHEMES, ["forget gate and null key"]))
def test_one_graph_serves_all_lengths(name: str) -> None:
    check(name, "aot_eager")


@pytest.mark.deep  # a test of attend() compiles attention alone
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("name", ["ggd and ssmax", "goat"])
def test_compiled_code_matches(name: str) -> None:
    check(name, "inductor")
