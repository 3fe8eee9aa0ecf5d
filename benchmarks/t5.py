"""Time and memory of T5 with `use_priors`, beside transformers' own SDPA implementation.

    python benchmarks/t5.py --output t5.json

An encoder and a decoder of two layers each, width 512, 8 heads, 2048 tokens in both. Every repetition runs both models
once, in a new random order. The script prints medians, and medians of the ratios within a repetition. Memory is the
peak of all tensors above the weights, gradients of the weights included. A separate pass measures the peak.
"""

from __future__ import annotations

import argparse
import copy
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import T5Config, T5ForConditionalGeneration

from attention_priors._io import write_json
from attention_priors.hf import use_priors
from attention_priors.lab.machine import memory_bytes, now, processor, versions

MIB = 2**20


def make(layers: int, vocabulary: int) -> dict[str, Any]:
    """Return a T5 with random weights, and a copy of it with priors."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"d_model": 512, "d_kv": 64, "d_ff": 1024, "num_heads": 8, "num_layers": layers}
    sizes |= {"vocab_size": vocabulary, "dropout_rate": 0.0, "decoder_start_token_id": 0, "attn_implementation": "sdpa"}
    model = T5ForConditionalGeneration(T5Config(**sizes))
    return {"SDPA": model, "use_priors": use_priors(copy.deepcopy(model))}


def peak_bytes(run: Callable[[], None]) -> int:
    """Return the most memory that PyTorch holds at once above the memory before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    recorded: Any = profiler.profiler
    events = [event for event in recorded.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]  # frees are negative
    return max(accumulate(sizes))


def main() -> None:
    """Measure both models, print the results and write them."""
    parser = argparse.ArgumentParser(description="Time and memory of T5 with use_priors, beside transformers' SDPA.")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=2, help="number of layers of the encoder, and of the decoder")
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, help="JSON; nothing is written without it")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    models = make(options.layers, options.vocabulary)
    ids = torch.randint(1, options.vocabulary, (1, options.length))

    @torch.no_grad()
    def forward(model: Any) -> None:
        model(ids, labels=ids)

    def both(model: Any) -> None:
        model.zero_grad()
        model(ids, labels=ids).loss.backward()

    passes: dict[str, Callable[[Any], None]] = {"forward": forward, "forward + backward": both}
    results: list[dict[str, Any]] = []
    for what, run in passes.items():
        seconds: dict[str, list[float]] = {name: [] for name in models}
        peaks: dict[str, int] = {}
        for repetition in range(options.repetitions + 1):
            for name in random.sample(list(models), len(models)):
                start = time.perf_counter()
                run(models[name])
                if repetition:  # the first repetition is a warm-up
                    seconds[name].append(time.perf_counter() - start)
        for name, model in models.items():
            model.zero_grad()
            peaks[name] = peak_bytes(partial(run, model))
        for name, found in seconds.items():
            ratios = [a / b for a, b in zip(found, seconds["SDPA"], strict=True)]
            row = {"pass": what, "model": name, "seconds": found, "ratio": statistics.median(ratios), "ratios": ratios}
            row |= {"milliseconds": 1e3 * statistics.median(found), "peak_bytes": peaks[name]}
            row["peak_ratio"] = peaks[name] / peaks["SDPA"]
            results.append(row)
            time_text = f"{row['milliseconds']:8.0f} ms  {row['ratio']:.2f}x"
            print(
                f"{what:18} {name:10} {time_text}  {peaks[name] / MIB:6.0f} MiB  {row['peak_ratio']:.2f}x", flush=True
            )
    if options.output:
        machine = {"created": now(), "processor": processor(), "memory": memory_bytes()}
        machine["versions"] = versions(("attention-priors", "torch", "transformers"))
        settings = vars(options) | {"output": None}
        write_json(options.output, machine | {"settings": settings, "results": results})


if __name__ == "__main__":
    main()
