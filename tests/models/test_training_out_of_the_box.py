"""transformers' own Trainer, collators and text generation pipeline work unchanged."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_decoders import FAMILIES, tiny_config, tiny_decoder
from transformers import (
    AutoModelForCausalLM,
    DataCollatorForLanguageModeling,
    DataCollatorWithFlattening,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    pipeline,
)

from attention_priors.lab.data import Document, train_tokenizer
from attention_priors.models import PriorDecoderForCausalLM

TEXTS = ["to be or not to be", "that is the question", "whether it is nobler in the mind to suffer", "or not"] * 4


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer([Document("text", " ".join(TEXTS))], 270)


def rows(tokenizer: PreTrainedTokenizerFast) -> list[dict[str, Any]]:
    return [{"input_ids": tokenizer.encode(text)} for text in TEXTS]


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    options: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": 8,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "logging_steps": 4,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "save_strategy": "no",
    }
    return TrainingArguments(**options | changes)


@pytest.mark.parametrize("collator", ["padded", "flattened"])
@pytest.mark.parametrize("family", ["BAM", "GOAT", "ALiBi and SSMax"])
def test_trainer_trains_the_decoder(
    family: str, collator: str, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    model: Any = PriorDecoderForCausalLM(tiny_config(**FAMILIES[family], vocab_size=270, initializer_range=0.1))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    collate: Any = {
        "padded": DataCollatorForLanguageModeling(tokenizer, mlm=False),
        "flattened": DataCollatorWithFlattening(),
    }[collator]
    options = {"eval_strategy": "steps", "eval_steps": 8, "save_strategy": "steps", "save_steps": 8}
    options |= {"activation_checkpointing": True}
    data: Any = rows(tokenizer)
    trainer = Trainer(
        model, arguments(tmp_path, **options), data_collator=collate, train_dataset=data, eval_dataset=data
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < 0.8 * losses[0]
    assert any("eval_loss" in entry for entry in trainer.state.log_history)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert not torch.equal(parameter.detach(), before[name]), name
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-8")
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name)), name


def test_accumulated_gradients_match_the_whole_batch(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """The Trainer counts the tokens of a batch with rows of different lengths, and passes the number to the loss."""
    losses, ends = [], []
    for size, steps in ((4, 1), (2, 2)):
        torch.manual_seed(0)
        model = PriorDecoderForCausalLM(tiny_config(**FAMILIES["BAM"], vocab_size=270, initializer_range=0.1))
        settings = arguments(
            tmp_path,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=steps,
            max_steps=3,
            logging_steps=1,
            learning_rate=1e-3,
        )
        collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)
        data: Any = rows(tokenizer)
        trainer = Trainer(model, settings, data_collator=collate, train_dataset=data)
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
        ends.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-3, atol=1e-4)


def test_pipeline_generates_as_the_model_does(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A saved model generates batches of texts of different lengths. Each text gives the tokens it gives alone."""
    tiny_decoder(torch.float32, **FAMILIES["GOAT"], vocab_size=270).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    # The pipeline pads on the left, whatever padding side the saved tokenizer has.
    generator: Any = pipeline("text-generation", model=str(tmp_path), device="cpu")
    options = {"max_new_tokens": 5, "do_sample": False, "return_full_text": False}
    texts = ["to be", "whether it is nobler", "that"]
    together = generator(texts, batch_size=3, **options)
    alone = [generator(text, **options) for text in texts]
    assert together == alone
    assert all(found[0]["generated_text"] for found in together)
    assert "not supported" not in caplog.text
