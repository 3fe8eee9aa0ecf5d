"""Model under test."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from attention_priors.hf.loading import load_config, load_model, tokenizer_of
from attention_priors.lab.data import EMBEDDED, Corpus, load_corpus, tokenizer_fingerprint
from attention_priors.lab.data.tokenizer import pretrained_tokenizer
from attention_priors.lab.machine import device_named
from attention_priors.lab.tasks.generation import chunked_logits

if TYPE_CHECKING:
    from attention_priors.lab.tasks.copying import CopyMixture

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_NO_PART_OF_A_MODEL = frozenset(
    {"_name_or_path", "transformers_version", "torch_dtype", "dtype", "architectures", "attention_priors_format"}
)
"""Config keys that describe the model's origin, or that other fields record."""
_ROUNDING, _HALF_ROUNDING = 1e-3, 0.1
"""Largest rounding error of logits in float32 and in half precision, in standard deviations; real differences are far
larger."""


@dataclass(frozen=True)
class Subject:
    """Causal language model under test, with its tokenizer and training data."""

    name: str
    model: PreTrainedModel
    text_tokenizer: PreTrainedTokenizerBase | None
    """Tokenizer of the model; None if the tokens do not represent text."""
    trained_on: tuple[str, Corpus] | None = None
    """Source of the training corpus, if known, and the corpus with its held-out part."""
    mixture: CopyMixture | None = None
    """Copy mixture on which the model was trained."""
    read: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """Tokenized corpora by source, shared by the plans of a subject."""
    cache_dir: Path | None = field(default=None, compare=False, repr=False)
    """Folder that keeps tokens of corpora for other subjects; None to encode them anew."""

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Tokenizer of the model.

        Raises:
            ValueError: the model has no tokenizer.
        """
        if self.text_tokenizer is None:
            raise ValueError(f"model {self.name!r} has no tokenizer: expected a model of text for this task")
        return self.text_tokenizer

    @classmethod
    def load(cls, name: str | Path, *, dtype: str = "float32", device: str | None = None) -> Subject:
        """Load a model to test: a model of this library, an attached model, or a causal language model of transformers.

        Args:
            name: model folder, name on the Hugging Face Hub, or adapter folder, as for :func:`load_model`.
            dtype: float32, bfloat16 or float16.
            device: device of the model; by default CUDA if available.

        Raises:
            ValueError: ``dtype`` is unknown, or ``device`` is not available. The model is not a causal language model
                or cannot read a text in chunks. Or the tokenizer has no end-of-text token, or more tokens than the
                model.
            OSError: the model or its tokenizer cannot be loaded.
        """
        if dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}; got {dtype!r}")
        place = device_named(device)
        name = str(name)
        load_config(name)  # first, so that the error for a wrong name concerns the model and not the tokenizer
        tokenizer = pretrained_tokenizer(tokenizer_of(name))
        model = load_model(name, dtype=DTYPES[dtype])
        check_vocabulary(name, model, tokenizer)
        model.to(place).eval()  # pyright: ignore[reportArgumentType]
        _check_chunks(name, model)
        return cls(name, model, tokenizer)

    def held_out_of(self, source: str) -> Corpus | None:
        """Return the corpus of a source if the model is known not to have seen its held-out part, else None.

        The held-out part of the embedded corpus is always unseen, because every training leaves out the same documents.
        """
        if self.trained_on is not None and Path(source).resolve() == Path(self.trained_on[0]).resolve():
            return self.trained_on[1]
        return load_corpus(EMBEDDED) if source == EMBEDDED else None

    def identity(self) -> dict[str, Any]:
        """Return everything about the model that results depend on.

        This includes hashes of model and tokenizer, the dtype, and the tokens that begin and end texts.
        """
        if self.text_tokenizer is None:
            return {"model": model_fingerprint(self.model), "dtype": str(self.model.dtype).removeprefix("torch.")}
        # Call the tokenizer before hashing it: its first call drops a length limit and changes its hash.
        begin = self.beginning().tolist()
        return {
            "model": model_fingerprint(self.model),
            "tokenizer": tokenizer_fingerprint(self.tokenizer),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "begin": begin,
            "end": sorted(self.ends()),
        }

    def beginning(self) -> torch.Tensor:
        """Return the tokens that the tokenizer puts before every text, ``(n,)``.

        For most tokenizers this is a beginning-of-text token, or nothing.

        Raises:
            ValueError: adding special tokens changes the text's own tokens.
        """
        if self.text_tokenizer is None:
            return torch.empty(0, dtype=torch.int64)
        plain = self.tokenizer("a", add_special_tokens=False)["input_ids"]
        whole = self.tokenizer("a", add_special_tokens=True)["input_ids"]
        for start in range(len(whole) - len(plain) + 1):
            if whole[start : start + len(plain)] == plain:
                return torch.tensor(whole[:start], dtype=torch.int64)
        raise ValueError(
            f"tokenizer of {self.name!r} must encode a text alike with and without special tokens; it encodes 'a' as "
            f"{plain} without and {whole} with them"
        )

    def ends(self) -> set[int]:
        """Return the tokens that end a continuation."""
        configured = getattr(self.model.generation_config, "eos_token_id", None)
        several = configured if isinstance(configured, list) else [configured]
        return {token for token in (*several, self.tokenizer.eos_token_id) if isinstance(token, int)}


def check_vocabulary(name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that a model has an embedding for every token of its tokenizer.

    Raises:
        ValueError: the tokenizer has more tokens than the model.
    """
    embedding: Any = model.get_input_embeddings()
    size, rows = max(tokenizer.get_vocab().values()) + 1, embedding.weight.shape[0]
    if size > rows:
        raise ValueError(f"model {name!r} has {rows} tokens, but its tokenizer has {size}")


@torch.no_grad()
def _check_chunks(name: str, model: PreTrainedModel) -> None:
    """Check that a model gives the same logits when it reads a text in chunks."""
    tokens = torch.arange(8).remainder(model.config.get_text_config(decoder=True).vocab_size)[None]
    whole = model(tokens.to(model.device)).logits.float()
    chunked = torch.cat(list(chunked_logits(model, tokens, chunk=5, keep=8)), 1).float()
    difference = float((whole - chunked).abs().max() / whole.std())
    if not difference <= (_ROUNDING if model.dtype == torch.float32 else _HALF_ROUNDING):  # or it is nan
        raise ValueError(
            f"model {name!r} ({type(model).__name__}) must give the same logits for a text in one chunk and in two; "
            f"they differ by {difference:.2g} of their standard deviation: expected a causal language model with a KV "
            "cache"
        )


def model_fingerprint(model: PreTrainedModel) -> str:
    """Return the SHA-256 (64 hex digits) of a model's config and its current weights."""
    digest = hashlib.sha256()
    config = {key: value for key, value in model.config.to_dict().items() if key not in _NO_PART_OF_A_MODEL}
    digest.update(json.dumps([type(model).__name__, config], sort_keys=True, default=str).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        # As bytes, because NumPy has no bfloat16.
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
