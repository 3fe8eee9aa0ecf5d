"""accelerate's ``device_map``: parts of the model in memory and on disk, including priors."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_decoders import FAMILIES, VARIANTS, VOCABULARY, logits_of, tiny_decoder, tokens

from attention_priors.models import PriorDecoderForCausalLM, PriorEncoderConfig, PriorEncoderForMaskedLM
from attention_priors.models.masks import keys_of_call

CASES = {**FAMILIES, "prior and shaw": VARIANTS["prior and shaw"], "learned": VARIANTS["encoding learned"]}


def on_disk(model: PriorDecoderForCausalLM, *names: str) -> dict[str, str]:
    """Return a device map with the named parts on disk, and the others in memory."""
    parts = {"lm_head", *(f"model.{name}" for name, _ in model.model.named_children() if name != "layers")}
    parts |= {f"model.layers.{index}" for index in range(len(model.model.layers))}
    return {part: "disk" if part in names else "cpu" for part in parts}


@pytest.mark.parametrize("case", CASES)
def test_parts_may_be_on_disk(case: str, tmp_path: Path) -> None:
    model, ids = tiny_decoder(torch.float32, **CASES[case], initializer_range=1.0), tokens(2, 6)
    model.save_pretrained(tmp_path)
    places = on_disk(model, "model.layers.1", "model.prior", "model.encoding")
    loaded: Any = PriorDecoderForCausalLM.from_pretrained(
        tmp_path, device_map=places, offload_folder=tmp_path / "offloaded"
    )
    away = [name for name, parameter in loaded.named_parameters() if parameter.device.type == "meta"]
    assert any("self_attn" in name for name in away)
    torch.testing.assert_close(logits_of(loaded, ids), logits_of(model, ids), rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        weights = loaded(ids, output_attentions=True).attentions
        expected = model(ids, output_attentions=True).attentions
    torch.testing.assert_close(weights, expected, rtol=1e-4, atol=1e-5)
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    original: Any = model
    assert torch.equal(loaded.generate(ids, **options), original.generate(ids, **options))
    # No weights stay in memory.
    assert away == [name for name, parameter in loaded.named_parameters() if parameter.device.type == "meta"]
    # The offloaded model can be saved.
    loaded.save_pretrained(tmp_path / "again")
    again = PriorDecoderForCausalLM.from_pretrained(tmp_path / "again").eval()
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name


@pytest.mark.parametrize("scheme", [{"prior": "laplace", "share_prior": True}, {"encoding": "rotary"}], ids=str)
def test_parts_of_an_encoder_may_be_on_disk(scheme: dict[str, Any], tmp_path: Path) -> None:
    config = PriorEncoderConfig(
        vocab_size=VOCABULARY, hidden_size=24, num_hidden_layers=2, num_attention_heads=3, **scheme
    )
    model, ids = PriorEncoderForMaskedLM(config).eval(), tokens(2, 6)
    model.save_pretrained(tmp_path)
    places = {"lm_head": "cpu", "model.embed_tokens": "cpu", "model.stack.norm": "cpu", "model.stack.prior": "disk"}
    places |= {f"model.stack.layers.{index}": "disk" for index in range(2)}
    loaded: Any = PriorEncoderForMaskedLM.from_pretrained(
        tmp_path, device_map=places, offload_folder=tmp_path / "offloaded"
    )
    mask = torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]])
    found, expected = (one(ids, attention_mask=mask).logits.detach() for one in (loaded, model))
    torch.testing.assert_close(found[mask == 1], expected[mask == 1], rtol=1e-4, atol=1e-4)


def test_device_map_auto_splits_whole_layers(tmp_path: Path) -> None:
    """Whole layers are in memory while they fit, and the others on disk."""
    model, ids = tiny_decoder(torch.float32, **FAMILIES["BAM"]), tokens(2, 6)
    model.save_pretrained(tmp_path)
    whole = PriorDecoderForCausalLM.from_pretrained(tmp_path, device_map="auto").eval()
    assert {parameter.device.type for parameter in whole.parameters()} == {"cpu"}
    split: Any = PriorDecoderForCausalLM.from_pretrained(
        tmp_path, device_map="auto", max_memory={"cpu": "45KB"}, offload_folder=tmp_path / "offloaded"
    )
    assert set(split.hf_device_map.values()) == {"cpu", "disk"}
    assert not any(".layers.0." in name or ".layers.1." in name for name in split.hf_device_map)
    for loaded in (whole, split):
        torch.testing.assert_close(logits_of(loaded, ids), logits_of(model, ids), rtol=1e-4, atol=1e-4)


def test_cached_keys_follow_their_layers() -> None:
    """accelerate moves a layer's inputs to the layer's device by their method ``to``."""
    mask = torch.tensor([[0, 0, 1, 1], [1] * 4])
    keys = keys_of_call(2, 4, torch.device("cpu"), attention_mask=mask, position_ids=torch.arange(4)[None] * 2)
    assert keys.to("cpu") is keys
    moved = keys.to("meta")
    assert moved.num_keys == keys.num_keys
    for tensor in (moved.positions, moved.key_positions, moved.padding):
        assert tensor is not None
        assert tensor.device.type == "meta"
    assert keys.positions.device.type == "cpu"
