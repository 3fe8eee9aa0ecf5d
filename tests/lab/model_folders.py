"""Folders with small random models and a trained tokenizer, as input of evaluations."""

import random
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from transformers import PreTrainedTokenizerFast

from attention_priors.hf import attach
from attention_priors.lab.data import Document, train_tokenizer
from attention_priors.models import PriorDecoderConfig, PriorDecoderForCausalLM

VOCABULARY = 400
LONGEST = 700
"""Number of positions of models with a position table."""

_SYLLABLES = ["ka", "to", "mi", "ren", "su", "lo", "vai", "ne", "pol", "dra"]
_LLAMA: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
}


def made_up_text(seed: int, sentences: int) -> str:
    draw = random.Random(seed)
    words = ["".join(draw.choices(_SYLLABLES, k=draw.randint(1, 4))) for _ in range(200)]
    lines = []
    for _ in range(sentences):
        sentence = " ".join(draw.choices(words, k=draw.randint(4, 12)))
        lines.append(f"{sentence.capitalize()}, {draw.randint(0, 9999)}.")
    return "\n".join(lines) + "\n"


def documents(count: int = 12) -> list[Document]:
    # Words of the prompts, so that they are not split into letters.
    prompts = (
        "The pass key is hidden inside a lot of irrelevant text. Remember it. What is the special magic number for "
        "the needle mentioned in the provided text? Some special magic numbers are hidden within the following text. "
        "Make sure to memorize it. I will quiz you about the numbers afterwards. One of the special magic uuids is: "
        "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
    )
    return [Document(f"{index:02}.txt", made_up_text(index, 3 + 6 * index) + prompts) for index in range(count)]


def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(documents(), vocab_size=VOCABULARY)


def model(kind: str, seed: int = 0) -> Any:
    """Build one of ``KINDS``."""
    torch.manual_seed(seed)
    if kind == "ours":
        config = PriorDecoderConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            initializer_range=0.3,
            prior={"name": "generalized_gaussian", "init": "sampled"},
            logit_scale={"name": "ssmax", "init": 0.4},
        )
        return PriorDecoderForCausalLM(config).eval()
    if kind == "gpt2":
        sizes: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": LONGEST}
        config = hf.GPT2Config(vocab_size=VOCABULARY, initializer_range=0.3, **sizes)
        return hf.GPT2LMHeadModel(config).eval()
    made = hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=VOCABULARY, **_LLAMA)).eval()
    if kind == "attached":
        attach(made, {"name": "generalized_gaussian", "init": "sampled"}, logit_scale="residual_ssmax")
    return made


KINDS = ("ours", "gpt2", "llama", "attached")


def save(made: Any, words: PreTrainedTokenizerFast, folder: Path) -> Path:
    end: Any = words.eos_token_id
    for config in (made.config, made.generation_config):
        config.bos_token_id = config.eos_token_id = config.pad_token_id = end
    made.save_pretrained(folder)
    words.save_pretrained(folder)
    return folder
