"""accelerate's ``device_map`` with attached priors: weights in memory or on disk, before and after attach()."""

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from tiny_models import tiny, tokens
from torch import Tensor
from transformers import AutoModelForCausalLM

from attention_priors.hf import attach, attached_priors, load_adapter, load_attached, save_adapter

IDS = tokens(2, 12)
CPU = torch.device("cpu")


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(IDS).logits


def learned(share_prior: bool) -> Any:
    model = attach(
        tiny("llama"), "generalized_gaussian", logit_scale="residual_ssmax", heads=[0, 2], share_prior=share_prior
    )
    with torch.no_grad():
        for part in attached_priors(model).values():
            for parameter in part.parameters():
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)))
    return model


@pytest.mark.parametrize("share_prior", [False, True])
def test_layers_may_be_on_disk(share_prior: bool, tmp_path: Path) -> None:
    model = learned(share_prior)
    model.save_pretrained(tmp_path)
    names = ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "model.rotary_emb", "lm_head"]
    places = {name: "disk" if name == "model.layers.1" else "cpu" for name in names}
    loaded: Any = load_attached(tmp_path, device_map=places, offload_folder=tmp_path / "offloaded")
    assert loaded.model.layers[1].self_attn.q_proj.weight.device.type == "meta"
    torch.testing.assert_close(logits(loaded), logits(model))
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(loaded.generate(IDS, **options), model.generate(IDS, **options))


@pytest.mark.parametrize("share_prior", [False, True])
def test_attached_models_can_be_offloaded(share_prior: bool) -> None:
    model = learned(share_prior)
    expected = logits(model)
    cpu_offload(model, execution_device=CPU)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    torch.testing.assert_close(logits(model), expected)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


@pytest.mark.parametrize("share_prior", [False, True])
def test_adapters_load_into_offloaded_models(share_prior: bool, tmp_path: Path) -> None:
    model = learned(share_prior)
    save_adapter(model, tmp_path / "adapter")
    tiny("llama").save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    cpu_offload(plain, execution_device=CPU)
    torch.testing.assert_close(logits(load_adapter(plain, tmp_path / "adapter")), logits(model))
