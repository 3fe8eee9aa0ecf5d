"""The model under test."""

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
from attention_priors.lab.tasks.generation import chunked_logits

if TYPE_CHECKING:
    from attention_priors.lab.tasks.copying import CopyMixture

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_NO_PART_OF_A_MODEL = frozenset(
    {"_name_or_path", "transformers_version", "torch_dtype", "dtype", "architectures", "attention_priors_format"}
)
"""Keys of a configuration that say where it comes from, or are said elsewhere."""
_ROUNDING, _HALF_ROUNDING = 1e-3, 0.1
"""Largest rounding of logits, in standard deviations; real differences are far larger."""


@dataclass(frozen=True)
class Subject:
    """A causal language model, its tokenizer, and what tells both from others."""

    name: str
    model: PreTrainedModel
    text_tokenizer: PreTrainedTokenizerBase | None
    """None for a model whose tokens stand for nothing."""
    trained_on: tuple[str, Corpus] | None = None
    """Source of the training corpus, where it is known, and the corpus with its held-out part."""
    mixture: CopyMixture | None = None
    """Copy mixture that the model was trained on."""
    read: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """Tokenised corpora by their source, shared by the plans of a subject."""

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Tokenizer of the model.

        Raises:
            ValueError: The model has none.
        """
        if self.text_tokenizer is None:
            raise ValueError(f"model {self.name!r} has no tokenizer: expected a model of text for this task")
        return self.text_tokenizer

    @classmethod
    def load(cls, name: str, *, dtype: str = "float32", device: str | None = None) -> Subject:
        """Load a model of ours, an attached one, or any causal language model of transformers, to be tested.

        Args:
            name: its folder, or its name on the Hugging Face Hub; or an adapter's folder, as for :func:`load_model`.
            dtype: of its weights: float32, bfloat16 or float16.
            device: where it runs; CUDA where there is some by default.

        Raises:
            ValueError: if ``dtype`` is none of these, ``device`` is none that is there, the model is no causal
                language model, the tokenizer has no end-of-text token, or more tokens than the model, or the model
                cannot be read in chunks.
            OSError: if the model or its tokenizer cannot be loaded.
        """
        if dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}; got {dtype!r}")
        place = device_named(device)
        load_config(name)  # at once, so that a wrong name is not first missed by a tokenizer
        tokenizer = pretrained_tokenizer(tokenizer_of(name))
        model = load_model(name, dtype=DTYPES[dtype])
        check_vocabulary(name, model, tokenizer)
        model.to(place).eval()  # pyright: ignore[reportArgumentType]
        _check_chunks(name, model)
        return cls(name, model, tokenizer)

    def held_out_of(self, source: str) -> Corpus | None:
        """The corpus of that source if a part of it is known not to have been trained on; None if it is not.

        Of the embedded corpus it is: everybody here leaves out the same.
        """
        if self.trained_on is not None and Path(source).resolve() == Path(self.trained_on[0]).resolve():
            return self.trained_on[1]
        return load_corpus(EMBEDDED) if source == EMBEDDED else None

    def identity(self) -> dict[str, Any]:
        """All that results depend on: hashes of model and tokenizer, the precision, where texts begin and end."""
        if self.text_tokenizer is None:
            return {"model": model_fingerprint(self.model), "dtype": str(self.model.dtype).removeprefix("torch.")}
        # In this order: a tokenizer forgets a limit to its texts when it is first called, and its hash changes.
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

        Most tokenizers put a beginning-of-text token there, or none.

        Raises:
            ValueError: the tokenizer changes a text's own tokens beside special ones.
        """
        if self.text_tokenizer is None:
            return torch.empty(0, dtype=torch.int64)
        plain = self.tokenizer("a", add_special_tokens=False)["input_ids"]
        whole = self.tokenizer("a", add_special_tokens=True)["input_ids"]
        for start in range(len(whole) - len(plain) + 1):
            if whole[start : start + len(plain)] == plain:
                return torch.tensor(whole[:start], dtype=torch.int64)
        raise ValueError(
            f"tokenizer of {self.name!r} must give a text the same tokens with special tokens around them; it gives "
            f"'a' {plain} alone and {whole} with them"
        )

    def ends(self) -> set[int]:
        """Tokens at which a continuation ends."""
        configured = getattr(self.model.generation_config, "eos_token_id", None)
        several = configured if isinstance(configured, list) else [configured]
        return {token for token in (*several, self.tokenizer.eos_token_id) if isinstance(token, int)}


def check_vocabulary(name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Make sure that a model has all tokens of its tokenizer.

    Raises:
        ValueError: it has not.
    """
    embedding: Any = model.get_input_embeddings()
    size, rows = max(tokenizer.get_vocab().values()) + 1, embedding.weight.shape[0]
    if size > rows:
        raise ValueError(f"model {name!r} has {rows} tokens, but its tokenizer has {size}")


@torch.no_grad()
def _check_chunks(name: str, model: PreTrainedModel) -> None:
    """Make sure that a model reads on from what it has read, as texts are read in chunks, and sees no future."""
    tokens = torch.arange(8).remainder(model.config.get_text_config(decoder=True).vocab_size)[None]
    whole = model(tokens.to(model.device)).logits.float()
    chunked = torch.cat(list(chunked_logits(model, tokens, chunk=5, keep=8)), 1).float()
    difference = float((whole - chunked).abs().max() / whole.std())
    if not difference <= (_ROUNDING if model.dtype == torch.float32 else _HALF_ROUNDING):  # or it is nan
        raise ValueError(
            f"model {name!r} ({type(model).__name__}) must give a text that is read in two chunks the logits that it "
            f"has when it is read at once; they differ by {difference:.2g} of their standard deviation: expected a "
            "causal language model with a KV cache"
        )


def device_named(name: str | None) -> torch.device:
    """The device of a name; without one CUDA, where there is some.

    Raises:
        ValueError: it is none, or none that is there.
    """
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be cpu, cuda or cuda:N; got {name!r}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device is {name!r}, but PyTorch finds {torch.cuda.device_count()} CUDA devices here")
    return device


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
