"""The model under test."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from attention_priors.data import tokenizer_fingerprint
from attention_priors.data.tokenizer import pretrained_tokenizer
from attention_priors.hub import load_model

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_NO_PART_OF_A_MODEL = frozenset({"_name_or_path", "transformers_version", "torch_dtype", "dtype", "architectures"})
"""Keys of a configuration that say where it comes from, or are said elsewhere."""


@dataclass(frozen=True)
class Subject:
    """A causal language model, its tokenizer, and what tells both from others."""

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    @classmethod
    def load(cls, name: str, *, dtype: str = "float32", device: str = "cpu") -> Subject:
        """Load a model of ours, an attached one, or any causal language model of transformers, to be tested.

        Args:
            name: its folder, or its name on the Hugging Face Hub.
            dtype: of its weights: float32, bfloat16 or float16.
            device: where it runs.

        Raises:
            ValueError: if ``dtype`` is none of these, ``device`` is none, or the tokenizer has no end-of-text token.
            OSError: if the model or its tokenizer cannot be loaded.
        """
        if dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}; got {dtype!r}")
        try:
            place = torch.device(device)
        except RuntimeError as error:
            raise ValueError(f"device must be one that PyTorch knows, such as cpu or cuda:0; got {device!r}") from error
        if place.type == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"device is {device!r}, but PyTorch finds no CUDA here")
        tokenizer = pretrained_tokenizer(name)
        model = load_model(name, dtype=DTYPES[dtype])
        model.to(place).eval()  # pyright: ignore[reportArgumentType]
        return cls(name, model, tokenizer)

    def identity(self) -> dict[str, Any]:
        """What its results depend on: hashes of model and tokenizer, and the precision."""
        return {
            "model": model_fingerprint(self.model),
            "tokenizer": tokenizer_fingerprint(self.tokenizer),
            "dtype": str(self.model.dtype).removeprefix("torch."),
        }

    def beginning(self) -> torch.Tensor:
        """The tokens that stand before every text, ``(n,)``: a beginning-of-text token, for tokenizers that add one."""
        tokens = self.tokenizer("", add_special_tokens=True)["input_ids"]
        begin = self.tokenizer.bos_token_id
        return torch.tensor([token for token in tokens if token == begin], dtype=torch.int64)

    def ends(self) -> set[int]:
        """Tokens at which a continuation ends."""
        configured = getattr(self.model.generation_config, "eos_token_id", None)
        several = configured if isinstance(configured, list) else [configured]
        return {token for token in (*several, self.tokenizer.eos_token_id) if isinstance(token, int)}


def model_fingerprint(model: PreTrainedModel) -> str:
    """SHA-256 (64 hex digits) of a model's configuration and of its weights, as they are now."""
    digest = hashlib.sha256()
    config = {key: value for key, value in model.config.to_dict().items() if key not in _NO_PART_OF_A_MODEL}
    digest.update(json.dumps([type(model).__name__, config], sort_keys=True, default=str).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        # NumPy has no bfloat16: bytes are bytes.
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
