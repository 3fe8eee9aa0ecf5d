import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from known_models import SCHEMES, random_text, tiny_decoder
from torch import Tensor

from attention_priors.lab.tasks.generation import chunked_logits
from thoroughness import examples

# Float64 leaves no rounding.
MODELS = {name: tiny_decoder(**scheme).double() for name, scheme in SCHEMES.items()}


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=examples(5))
@given(length=st.integers(1, 24), chunk=st.integers(1, 30), keep=st.integers(1, 30), seed=st.integers(0, 2**31))
def test_chunks_give_the_logits_of_one_pass(name, length, chunk, keep, seed):
    tokens = random_text(seed, 2 * length).view(2, length)
    with torch.no_grad():
        whole = MODELS[name](tokens, use_cache=False).logits[:, -keep:]
    parts = list(chunked_logits(MODELS[name], tokens, chunk=chunk, keep=keep))
    assert all(0 < part.shape[1] <= chunk for part in parts)
    assert sum(part.shape[1] for part in parts) == min(keep, length)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=1e-9, rtol=1e-9)


def test_only_kept_places_have_logits():
    model = tiny_decoder(prior="laplace")
    sizes: list[int] = []

    def count(module: torch.nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> None:
        sizes.append(out.shape[1])

    model.lm_head.register_forward_hook(count)
    list(chunked_logits(model, random_text(0, 50)[None], chunk=8, keep=5))
    # 45 tokens fill the cache in six chunks, each with one logit, because no model can compute none.
    assert sizes == [1] * 6 + [5]
    sizes.clear()
    list(chunked_logits(model, random_text(0, 20)[None], chunk=8, keep=20))
    assert sizes == [8, 8, 4]


def test_chunks_are_yielded_before_the_next_is_read():
    model = tiny_decoder()
    passes: list[int] = []
    model.register_forward_hook(lambda *args: passes.append(1))
    parts = chunked_logits(model, random_text(0, 12)[None], chunk=4, keep=12)
    assert passes == []
    next(parts)
    assert passes == [1]


def test_logits_have_no_gradient_and_grad_mode_is_restored():
    model = tiny_decoder()
    parts = chunked_logits(model, random_text(0, 12)[None], chunk=4, keep=12)
    assert not next(parts).requires_grad
    assert torch.is_grad_enabled()
    assert not next(parts).requires_grad
