"""Time of a model with attached priors, beside the unmodified model.

The script times a training step and a token of `generate`. Usage:

    python benchmarks/attached.py --output attached.json
    python benchmarks/attached.py --model HuggingFaceTB/SmolLM2-135M-Instruct --length 512

Without --model, the model is a Llama of two layers, width 512 and 8 heads with random weights, which reads 2048 tokens.
Every repetition runs every model once, in a new random order. The script prints medians, and medians of the ratios
within a repetition.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from attention_priors._io import write_json
from attention_priors.hf import attach
from attention_priors.lab.machine import memory_bytes, now, processor, versions

WIDTH, LAYERS, HEADS, VOCABULARY = 512, 2, 8, 4096
GGD = {"name": "generalized_gaussian", "init": "spread", "learn": True}
ATTACHED: dict[str, dict[str, Any]] = {
    "unmodified": {},
    "GGD": {"prior": GGD},
    "GGD + SSMax": {"prior": GGD, "logit_scale": "residual_ssmax"},
    "ALiBi": {"prior": "laplace"},
}


def make(options: dict[str, Any], name: str | None) -> Any:
    """Return a Llama with random weights, or the model of a folder or name, with the attached options."""
    if name is not None:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
        return attach(model, **options) if options else model
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        max_position_embeddings=4096,
    )
    model = LlamaForCausalLM(config)
    return attach(model, **options) if options else model


def main() -> None:
    """Measure all models, print the results and write them."""
    parser = argparse.ArgumentParser(description="Time of a model with attached priors.")
    parser.add_argument("--model", help="folder or Hugging Face name of a causal language model")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--prompt", type=int, default=256, help="number of tokens in the prompt")
    parser.add_argument("--tokens", type=int, default=64, help="number of generated tokens")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, help="JSON file for the results; without it, they are only printed")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    models = {name: make(attached, options.model) for name, attached in ATTACHED.items()}
    ids = torch.randint(3, VOCABULARY, (1, options.length))

    def step(model: Any) -> None:
        model.train().zero_grad()
        model(ids, labels=ids, use_cache=False).loss.backward()

    def generate(model: Any) -> None:
        settings = {"max_new_tokens": options.tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        model.eval().generate(ids[:, : options.prompt], **settings)

    passes: dict[str, Callable[[Any], None]] = {"training step": step, "generate": generate}
    seconds = {what: {name: list[float]() for name in models} for what in passes}
    for repetition in range(options.repetitions + 1):
        for what, run in passes.items():
            for name in random.sample(list(models), len(models)):
                start = time.perf_counter()
                run(models[name])
                if repetition:  # the first repetition is a warm-up
                    seconds[what][name].append(time.perf_counter() - start)
    results: list[dict[str, Any]] = []
    for what, of_models in seconds.items():
        for name, found in of_models.items():
            ratios = [a / b for a, b in zip(found, of_models["unmodified"], strict=True)]
            per = options.tokens if what == "generate" else 1
            row = {
                "pass": what,
                "attached": name,
                "milliseconds": 1e3 * statistics.median(found) / per,
                "ratio": statistics.median(ratios),
                "ratios": ratios,
                "seconds": found,
            }
            results.append(row)
            print(f"{what:14} {name:12} {row['milliseconds']:8.2f} ms  {row['ratio']:.2f}x")
    if options.output:
        write_json(
            options.output,
            {
                "created": now(),
                "settings": vars(options) | {"output": None},
                "processor": processor(),
                "memory": memory_bytes(),
                "versions": versions(("attention-priors", "torch", "transformers")),
            }
            | {"results": results},
        )


if __name__ == "__main__":
    main()
