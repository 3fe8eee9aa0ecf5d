"""Loading, recomputation and static caches change no results."""

from typing import Any

import pytest
import torch
from tiny_decoders import DISTINCT, VARIANTS, tiny_decoder, tokens

from attention_priors.models import PriorDecoderForCausalLM
from thoroughness import every_other_deep

distinct_variants = pytest.mark.parametrize("variant", every_other_deep(VARIANTS, DISTINCT))


@distinct_variants
def test_gradient_checkpointing_gives_the_same_gradients(variant: str):
    ids = tokens(2, 9)
    grads = []
    for checkpointing in (False, True):
        model = tiny_decoder(**VARIANTS[variant]).train()
        if checkpointing:
            model.activation_checkpointing_enable()
        model(ids, labels=ids).loss.backward()
        grads.append({name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad})
    for name, expected in grads[0].items():
        torch.testing.assert_close(grads[1][name], expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("variant", VARIANTS)
def test_fixed_parameters_stay_fixed_after_loading(variant: str, tmp_path):
    model = tiny_decoder(torch.float32, **VARIANTS[variant])
    model.save_pretrained(tmp_path)
    loaded = PriorDecoderForCausalLM.from_pretrained(tmp_path)
    wanted = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    assert {name: parameter.requires_grad for name, parameter in loaded.named_parameters()} == wanted


@pytest.mark.parametrize("padded", [False, True])
@distinct_variants
def test_static_and_dynamic_caches_generate_equal_tokens(variant: str, padded: bool):
    model: Any = tiny_decoder(**VARIANTS[variant], initializer_range=1.0)
    ids = tokens(2, 5)
    if padded:
        ids[0, :3] = 0
    mask = (ids != 0).long()

    def generate(**options):
        return model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=6, pad_token_id=0, **options)

    assert torch.equal(generate(cache_implementation="static", disable_compile=True), generate())
