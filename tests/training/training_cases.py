"""A tiny decoder and rows for it."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from attention_priors.data import IGNORED_LABEL
from attention_priors.models import PriorDecoderConfig, PriorDecoderForCausalLM
from attention_priors.training import TrainingSettings

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
    """Random tokens in two documents, with weights of all sizes."""

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
