"""The decoder with PEFT's LoRA, whose priors train beside the adapters, and torch.export."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_decoders import FAMILIES, logits_of, tiny_decoder, tokens

from attention_priors.priors import Prior


@pytest.mark.parametrize("family", ["BAM", "GOAT", "ALiBi and SSMax", "T5, shared by all layers"])
def test_lora_and_priors_train_together(family: str, tmp_path: Path) -> None:
    peft: Any = pytest.importorskip("peft")
    model, ids = tiny_decoder(torch.float32, **FAMILIES[family]).train(), tokens(2, 7)
    before, fixed = logits_of(model, ids), {name for name, p in model.named_parameters() if not p.requires_grad}
    parts = [part for part in ("prior", "logit_scale") if any(name.endswith(part) for name, _ in model.named_modules())]
    settings = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], r=2, modules_to_save=parts)
    adapted: Any = peft.get_peft_model(model, settings)
    # PEFT trains the whole module, including parameters that the config fixes. (It keeps a frozen original beside it.)
    for name, module in adapted.named_modules():
        if isinstance(module, Prior) and "modules_to_save" in name:
            module.freeze_what_is_fixed()
    torch.testing.assert_close(logits_of(adapted, ids), before)
    adapted.activation_checkpointing_enable({"use_reentrant": True})
    adapted.enable_input_require_grads()
    adapted(input_ids=ids, labels=ids).loss.backward()
    trained = {name: p for name, p in adapted.named_parameters() if p.requires_grad}
    assert all(p.grad is not None for p in trained.values())
    assert not any(name.split(".")[-1] in {f.split(".")[-1] for f in fixed} for name in trained)
    torch.optim.SGD(trained.values(), 1.0).step()
    after = logits_of(adapted.eval(), ids)
    assert float((after - before).abs().max()) > 1e-3
    adapted.save_pretrained(tmp_path)
    loaded: Any = peft.PeftModel.from_pretrained(tiny_decoder(torch.float32, **FAMILIES[family]), tmp_path).eval()
    torch.testing.assert_close(logits_of(loaded, ids), after, rtol=1e-5, atol=1e-5)
    options: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    found = loaded.generate(input_ids=ids, **options)
    merged = loaded.merge_and_unload()
    torch.testing.assert_close(logits_of(merged, ids), after, rtol=1e-4, atol=1e-4)
    assert torch.equal(merged.generate(input_ids=ids, **options), found)


@pytest.mark.parametrize("family", FAMILIES)
def test_exported_decoder_matches(family: str) -> None:
    model, ids = tiny_decoder(**FAMILIES[family], num_hidden_layers=1), tokens(2, 9)
    exported = torch.export.export(model, (ids,), {"use_cache": False}, strict=False)
    torch.testing.assert_close(exported.module()(ids, use_cache=False).logits, logits_of(model, ids))
