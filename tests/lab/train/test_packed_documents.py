"""Packed documents of any model do not see each other."""

from typing import Any

import pytest
import torch
from training_cases import LLAMA
from transformers import AutoModelForCausalLM, LlamaConfig

from attention_priors.lab.train.packed import check_documents_apart, packed_inputs


def test_packed_documents_of_a_hugging_face_model_are_apart():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=20, initializer_range=0.5, **LLAMA)).eval()
    check_documents_apart(model)
    ids = torch.randint(20, (1, 9))
    documents = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 2, 2]])
    with torch.no_grad():
        packed = model(**packed_inputs(model, ids, documents)).logits
        apart = torch.cat([model(part).logits for part in ids.split([4, 3, 2], dim=1)], dim=1)
    torch.testing.assert_close(packed, apart, atol=1e-5, rtol=1e-4)


class _Leaky(torch.nn.Module):
    """Takes positions and does not read them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(20, 4)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, use_cache: bool) -> Any:
        hidden = self.embedding(input_ids).cumsum(1)
        return type("Output", (), {"logits": hidden})


def test_a_model_that_mixes_packed_documents_is_refused():
    with pytest.raises(ValueError, match=r"_Leaky .* lets a packed document see the one before it"):
        check_documents_apart(_Leaky())


def test_a_model_without_positions_to_tell_is_refused():
    with pytest.raises(ValueError, match="Embedding takes neither document_ids nor position_ids"):
        check_documents_apart(torch.nn.Embedding(20, 4))
