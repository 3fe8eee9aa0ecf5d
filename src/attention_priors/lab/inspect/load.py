"""Models and texts to inspect."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForSeq2SeqLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from attention_priors._io import read_json
from attention_priors.hf.adapter import adapter_folder
from attention_priors.hf.attach import CONFIG_KEY, LEARNED_POSITIONS, attached_parts
from attention_priors.hf.loading import load_any_config, load_model, load_whole, tokenizer_of
from attention_priors.lab.data import load_corpus
from attention_priors.lab.data.corpora import read_documents
from attention_priors.lab.data.genomes import is_fasta
from attention_priors.lab.data.tokenizer import pretrained_tokenizer
from attention_priors.lab.machine import device_named
from attention_priors.lab.tasks.subject import check_vocabulary
from attention_priors.models.decoder import PriorDecoderConfig
from attention_priors.models.encoder import PriorEncoderConfig, PriorEncoderForMaskedLM
from attention_priors.models.vision import PriorVisionConfig


@dataclass(frozen=True)
class Inspected:
    """Language model to inspect, with its tokenizer if available."""

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    without_tokenizer: str = ""
    """Reason why the tokenizer is missing."""

    @property
    def title(self) -> str:
        """Display name: the Hub name, or the end of the folder's path.

        Parts named ``model`` are left out, because training gives every model folder this name.
        """
        folder = Path(self.name)
        if not folder.exists():
            return self.name
        parts = [part for part in folder.resolve().parts[-3:] if part not in ("model", folder.anchor)]
        return "/".join(parts[-2:])

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether the model has an encoder and a decoder."""
        return bool(self.model.config.is_encoder_decoder)

    @property
    def is_encoder(self) -> bool:
        """Whether the model is bidirectional and generates no text."""
        return isinstance(self.model.config, PriorEncoderConfig)

    def read(self, tokens: Tensor) -> Any:
        """Run the model on a text ``(L,)``; an encoder-decoder model reads the text in both stacks."""
        given: dict[str, Any] = {"input_ids": tokens[None].to(self.model.device)}
        if not self.is_encoder:
            given["use_cache"] = False
        if self.is_encoder_decoder:
            # Drop one token, so that cross-attention never has as many queries as keys.
            given["decoder_input_ids"] = given["input_ids"][:, :-1]
        with torch.no_grad():
            return self.model(**given)

    def positions(self) -> str:
        """Describe the position encoding of the model, without its priors."""
        config: Any = self.model.config
        if isinstance(config, PriorDecoderConfig | PriorEncoderConfig):
            layers = [config] * config.num_hidden_layers
            if isinstance(config, PriorDecoderConfig):
                layers = [config.of_layer(index) for index in range(config.num_hidden_layers)]
            found = Counter(_name(layer.encoding) for layer in layers)
            if len(found) == 1:
                return next(iter(found))
            return ", ".join(f"{name} in {number} of {len(layers)} layers" for name, number in found.items())
        names = {name.rpartition(".")[2] for name, _ in self.model.named_modules()}
        rotary = bool(getattr(config, "rope_parameters", None))
        own = "rotary" if rotary else "a learned table" if names & set(LEARNED_POSITIONS) else "none"
        attached = getattr(config, CONFIG_KEY, None)
        layers = {} if attached is None else attached_parts(attached)
        dropped, total = sum(parts["own positions dropped"] for parts in layers.values()), config.num_hidden_layers
        return f"{own}, dropped in {'all' if dropped == total else f'{dropped} of {total}'} layers" if dropped else own


def _name(encoding: dict[str, Any] | str | None) -> str:
    return "none" if encoding is None else encoding if isinstance(encoding, str) else str(encoding["name"])


def load_inspected(name: str | Path, *, device: str | None = None) -> Inspected:
    """Load a model to inspect.

    The model may be a decoder or an encoder of this library, an attached model, or a decoder or encoder-decoder of
    transformers.

    Args:
        name: model folder, name on the Hugging Face Hub, or adapter folder, as for :func:`load_model`.
        device: device of the model; by default CUDA if available.

    Raises:
        OSError: the model cannot be loaded, or weights are missing.
        ValueError: the model is not a language model, its files are damaged, its tokenizer has more tokens than the
            model, or ``device`` is not available.
    """
    place = device_named(device)
    config = load_any_config(name)
    if isinstance(config, PriorVisionConfig):
        raise ValueError(
            f"model {str(name)!r} is a classifier of images: expected a language model; the report of its comparison "
            "shows the priors of a classifier"
        )
    model = _load_any_model(name, config)
    try:
        tokenizer, why = pretrained_tokenizer(tokenizer_of(name)), ""
    except (OSError, ValueError) as error:
        tokenizer, why = None, f"no tokenizer could be loaded: {error}"
    if tokenizer is not None:
        check_vocabulary(str(name), model, tokenizer)
    return Inspected(str(name), model.to(place).eval(), tokenizer, why)  # pyright: ignore[reportArgumentType]


def _load_any_model(name: str | Path, config: PreTrainedConfig) -> PreTrainedModel:
    adapter = adapter_folder(name)
    if adapter is not None:
        return adapter.put_on(_load_any_model(adapter.base, config))
    if isinstance(config, PriorEncoderConfig):
        return load_whole(PriorEncoderForMaskedLM, name)
    return load_whole(AutoModelForSeq2SeqLM, name) if config.is_encoder_decoder else load_model(name)


def check_same_model(inspected: Path, name: str) -> None:
    """Check that an existing inspection describes the same model, since models may share a folder name.

    Raises:
        ValueError: the inspection describes another model.
    """
    if not inspected.is_file():
        return
    before = read_json(inspected)["model"]
    if _place(before) != _place(name):
        raise ValueError(f"output: {inspected.parent} holds the inspection of {before}; choose another folder")


def _place(name: str) -> str:
    return str(Path(name).resolve()) if Path(name).exists() else name


def text_to_read(source: str) -> tuple[str, str]:
    """Return the name and the content of a text.

    Args:
        source: text file in UTF-8; FASTA file, of which the first contig is read; or ``embedded``, the longest held-out
            file of the embedded corpus.

    Raises:
        OSError: the file does not exist.
        ValueError: the file is not text.
    """
    if source == "embedded":
        longest = max(load_corpus("embedded").held_out, key=lambda document: len(document.text))
        return f"{longest.name} of Python's standard library", longest.text
    if is_fasta(Path(source)):
        _, (first, *_), _ = read_documents(source)
        return first.name, first.text
    try:
        return Path(source).name, Path(source).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{source} is not UTF-8 text: {error}") from error
