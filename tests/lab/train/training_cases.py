"""Tiny models, their rows, and interrupted trainings."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedConfig

from attention_priors.lab.data.packing import IGNORED_LABEL
from attention_priors.lab.train import Observer, TrainingSettings, run_recipe
from attention_priors.lab.train.recipe import TrainRecipe
from attention_priors.models import PriorDecoderConfig, PriorDecoderForCausalLM

# The package exports its function under this name.
extend_module = importlib.import_module("attention_priors.lab.train.extend")

VOCABULARY, LENGTH = 40, 12


def tiny_decoder(seed: int = 0, **changes: Any) -> PriorDecoderForCausalLM:
    options: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "initializer_range": 0.2,
        "prior": {"name": "generalized_gaussian", "init": "spread"},
        "logit_scale": "ssmax",
    }
    torch.manual_seed(seed)
    return PriorDecoderForCausalLM(PriorDecoderConfig(**(options | changes)))


def tiny_settings(**changes: Any) -> TrainingSettings:
    options: dict[str, Any] = {
        "context_length": LENGTH,
        "steps": 6,
        "batch_size": 2,
        "learning_rate": 0.01,
        "checkpoint_steps": 2,
    }
    return TrainingSettings.model_validate(options | changes)


class Rows(Dataset[dict[str, Tensor]]):
    """Rows of random tokens in two documents, with weights of all sizes."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(VOCABULARY, (LENGTH,), generator=generator)
        documents = (torch.arange(LENGTH) >= 3 + index % 5).long()
        labels = tokens.clone()
        labels[0] = IGNORED_LABEL
        labels[1:][documents[1:] != documents[:-1]] = IGNORED_LABEL
        weights = 3 * torch.rand(LENGTH, generator=generator)
        return {"input_ids": tokens, "labels": labels, "document_ids": documents, "loss_weights": weights}


LLAMA: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def saved_architecture(config: PreTrainedConfig, folder: Path) -> str:
    """Write the config of a transformers model, and return its folder for a recipe."""
    config.save_pretrained(folder)
    return str(folder)


class InterruptionError(Exception):
    """Exception that ends a training in a test."""


def stop_at(last: int, steps: list[int] | None = None) -> Observer:
    """Return an observer that records steps and ends the training after one of them."""

    def on_step(step: int) -> None:
        if steps is not None:
            steps.append(step)
        if step == last:
            raise InterruptionError

    return Observer(on_step=on_step)


def interrupt(recipe: TrainRecipe, output: Path, at: int) -> None:
    """Train up to a step."""
    with pytest.raises(InterruptionError):
        run_recipe(recipe, output, stop_at(at))


def weights_of(model: PriorDecoderForCausalLM) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def furthest(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    """Return the largest difference of two models' weights."""
    assert first.keys() == second.keys()
    return max(float((first[name].float() - second[name].float()).abs().max()) for name in first)
