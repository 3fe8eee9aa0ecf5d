"""Bidirectional priors: the masked language model, and attention from one text to another."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForMaskedLM, DataCollatorForLanguageModeling, Trainer, TrainingArguments

from attention_priors.hf import load_model
from attention_priors.lab.data import load_corpus, token_stream, train_tokenizer
from attention_priors.models import PriorEncoderConfig, PriorEncoderForMaskedLM

SMALL: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "initializer_range": 0.2,
}
KINDS: dict[str, dict[str, Any]] = {
    "bam": {"prior": {"name": "generalized_gaussian", "init": "spread"}, "logit_scale": "ssmax"},
    "t5": {"prior": {"name": "relative_buckets", "bidirectional": True, "init": "normal"}, "share_prior": True},
    "rotary": {"encoding": "rotary"},
    "sinusoidal": {"encoding": "sinusoidal"},
    "shaw": {"prior": "clipped_offsets"},
    "none": {},
}
TEXT = torch.tensor([[3, 14, 15, 9, 2, 6], [5, 35, 8, 9, 7, 9]])


def made(name: str) -> PriorEncoderForMaskedLM:
    torch.manual_seed(0)
    return PriorEncoderForMaskedLM(PriorEncoderConfig(**SMALL, **KINDS[name])).eval()


def test_commands_for_decoders_refuse_encoders(tmp_path: Path) -> None:
    made("bam").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"must be a causal language model, .*; got an encoder \(prior_encoder\)"):
        load_model(tmp_path)


@pytest.mark.parametrize("name", KINDS)
def test_tokens_see_later_tokens(name: str) -> None:
    model = made(name)
    changed = TEXT.clone()
    changed[:, -1] += 1
    before, after = model(TEXT).logits[:, 0], model(changed).logits[:, 0]
    assert float((before - after).detach().abs().max()) > 1e-4


@pytest.mark.parametrize("name", KINDS)
def test_padding_changes_no_logits(name: str) -> None:
    model = made(name)
    padded = torch.cat([TEXT, torch.tensor([[1, 2, 3], [4, 5, 6]])], 1)
    mask = torch.tensor([[1] * 6 + [0] * 3] * 2)
    torch.testing.assert_close(
        model(padded, attention_mask=mask).logits[:, :6], model(TEXT).logits, rtol=1e-4, atol=1e-5
    )
    # Padding may also be in front of the text, with or without explicit positions.
    front = torch.cat([torch.tensor([[1, 2, 3], [4, 5, 6]]), TEXT], 1)
    positions = torch.arange(-3, 6).clamp(min=0)
    for given in ({"position_ids": positions}, {}):
        found = model(front, attention_mask=mask.flip(1), **given).logits[:, 3:]
        torch.testing.assert_close(found, model(TEXT).logits, rtol=1e-4, atol=1e-5)
    # A batch may hold a text of each kind.
    both = model(torch.cat([front, padded]), attention_mask=torch.cat([mask.flip(1), mask])).logits
    torch.testing.assert_close(both[:2, 3:], model(TEXT).logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(both[2:, :6], model(TEXT).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in KINDS if name not in ("sinusoidal", "none")])
def test_logits_depend_on_distances_only(name: str) -> None:
    model = made(name)
    moved = model(TEXT, position_ids=torch.arange(100, 106)).logits
    torch.testing.assert_close(moved, model(TEXT).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", KINDS)
def test_saved_models_load_with_equal_logits(name: str, tmp_path: Path) -> None:
    model = made(name)
    model.save_pretrained(tmp_path)
    again = AutoModelForMaskedLM.from_pretrained(tmp_path, trust_remote_code=True)
    assert type(again) is PriorEncoderForMaskedLM
    torch.testing.assert_close(again(TEXT).logits, model(TEXT).logits, rtol=0, atol=0)


def test_attentions_and_hidden_states_are_returned() -> None:
    found = made("bam")(TEXT, output_attentions=True, output_hidden_states=True)
    assert [weights.shape for weights in found.attentions] == [(2, 3, 6, 6)] * 2
    assert len(found.hidden_states) == 3
    for weights in found.attentions:
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 3, 6))


def test_invalid_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="encoding must be additive or rotary in an encoder"):
        PriorEncoderConfig(**SMALL, encoding={"name": "shaw", "max_offset": 4})
    grids: list[Any] = [{"name": "axial", "rows": "laplace"}, ["uniform", "spectral_2d"]]
    for prior in grids:
        with pytest.raises(ValueError, match=r"prior must be over a line, got '(axial|spectral_2d)'"):
            PriorEncoderConfig(**SMALL, prior=prior)
    with pytest.raises(ValueError, match="slope"):
        PriorEncoderConfig(**SMALL, prior={"name": "key_sink", "train_length": 8, "init": "recency"})
    with pytest.raises(ValueError, match="share_prior must be True or False, got 'no'"):
        PriorEncoderConfig(**SMALL, share_prior="no")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="pass exactly one of input_ids and inputs_embeds"):
        made("none")()
    for options, words in (
        (
            {"attention_mask": torch.ones(2, 5)},
            r"attention_mask must have the shape of the tokens, \(2, 6\), got \(2, 5\)",
        ),
        ({"document_ids": torch.zeros(2, 7)}, r"document_ids must have the shape of the tokens, \(2, 6\)"),
        ({"position_ids": torch.arange(5)}, r"position_ids must have the shape of the tokens, \(2, 6\) or \(6,\)"),
        ({"position_ids": torch.rand(6)}, "position_ids"),
        ({"labels": TEXT[:, 1:]}, r"labels must have shape \(2, 6\), got \(2, 5\)"),
        ({"token_type_ids": TEXT}, "the encoder does not take the argument token_type_ids"),
    ):
        with pytest.raises(ValueError, match=words):
            made("none")(TEXT, **options)
    with pytest.raises(ValueError, match=r"input_ids must have shape \(B, L\)"):
        made("none")(TEXT[0])


@pytest.mark.parametrize("name", KINDS)
def test_packed_documents_do_not_see_each_other(name: str) -> None:
    model = made(name)
    first, second = TEXT[:, :2], TEXT[:, 2:]
    documents = torch.tensor([[7, 7, 3, 3, 3, 3]] * 2)
    packed = model(TEXT, document_ids=documents).logits
    torch.testing.assert_close(packed[:, :2], model(first).logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(packed[:, 2:], model(second).logits, rtol=1e-4, atol=1e-5)


def test_accumulated_losses_sum_to_the_whole() -> None:
    """The Trainer accumulates gradients: each part gets the total number of labels."""
    model, labels = made("bam"), TEXT.clone()
    labels[0, :4] = -100
    whole = model(TEXT, labels=labels).loss
    parts = [model(TEXT[i : i + 1], labels=labels[i : i + 1], num_items_in_batch=torch.tensor(8)).loss for i in (0, 1)]
    torch.testing.assert_close(parts[0] + parts[1], whole)


def test_masked_tokens_of_the_embedded_corpus_are_learned(tmp_path: Path) -> None:
    """Training uses transformers' own Trainer and collator."""
    text = load_corpus("embedded", max_characters=60_000).train
    tokenizer = train_tokenizer(text, 400)
    tokenizer.add_special_tokens({"mask_token": "<|mask|>"})
    rows = [{"input_ids": row} for row in token_stream(tokenizer, text).tokens.split(64)[:-1]]
    torch.manual_seed(0)
    config = PriorEncoderConfig(
        **SMALL | {"vocab_size": len(tokenizer), "hidden_size": 48, "initializer_range": 0.05}, **KINDS["bam"]
    )
    model: Any = PriorEncoderForMaskedLM(config)
    settings = TrainingArguments(
        str(tmp_path), max_steps=60, per_device_train_batch_size=8, learning_rate=3e-3, logging_steps=20, seed=0,
        report_to="none", save_strategy="no", disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15)
    trainer = Trainer(model, settings, train_dataset=rows, data_collator=collator)  # pyright: ignore[reportArgumentType]
    before = model.model.stack.layers[0].self_attn.prior.theta_beta.detach().clone()
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0] - 0.3
    after = model.model.stack.layers[0].self_attn.prior.theta_beta.detach()
    assert float((after - before).abs().max()) > 0.01
