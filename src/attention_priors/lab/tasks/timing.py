"""Time and memory of inference and training passes."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from attention_priors.lab.machine import PeakMemory, processor, versions
from attention_priors.lab.tasks.generation import chunked_logits
from attention_priors.lab.tasks.task import Record, Task, Unit

SOFTWARE = ("attention-priors", "torch", "transformers")
"""Packages that affect times."""

WARM_UP = 1
"""Number of warm-up passes. They are not timed, nor is the pass after them, which measures memory."""

KINDS = ("forward", "forward+backward", "decode")
"""Kinds of pass. ``decode`` reads the last token of a text, with the keys of the others in a cache."""

DECODED = 10
"""Factor by which passes of ``decode`` are more than the plan asks for: they are short, and vary more."""


def time_model(model: PreTrainedModel, length: int, *, passes: int, kind: str, seed: int) -> dict[str, Any]:
    """Return mean and standard deviation of the time over passes of batch 1 (BAM's protocol).

    Args:
        model: causal language model.
        length: length of the text, in tokens. The tokens are random.
        passes: number of timed passes.
        kind: one of :data:`KINDS`. Passes of ``forward+backward`` run in training mode. Only ``decode`` uses a cache.
        seed: seed of the tokens.

    Returns:
        ``mean_ms``, ``std_ms`` and ``median_ms``. Also ``peak_bytes``, the peak memory of one pass beyond the model
        and the cache before the pass, gradients included; None if it cannot be measured.
    """
    generator = torch.Generator().manual_seed(seed)
    vocabulary = int(model.config.get_text_config(decoder=True).vocab_size)
    tokens = torch.randint(vocabulary, (1, length), generator=generator).to(model.device)
    was_training, filled = model.training, None

    def one_pass(cache: DynamicCache | None) -> None:
        if kind == "forward+backward":
            model.zero_grad()
            model(tokens, labels=tokens, use_cache=False).loss.backward()
        else:
            with torch.no_grad():
                if cache is None:
                    model(tokens, use_cache=False)
                else:
                    model(tokens[:, -1:], cache=cache, use_cache=True)
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)

    model.train(kind == "forward+backward")
    try:
        if kind == "decode":
            filled = DynamicCache(config=model.config)
            for _ in chunked_logits(model, tokens[:, :-1], chunk=length, keep=1, cache=filled):
                pass
        for _ in range(WARM_UP):
            one_pass(copy.deepcopy(filled))
        model.zero_grad()
        cache = copy.deepcopy(filled)
        with PeakMemory(model.device) as memory:
            one_pass(cache)
        seconds = []
        for _ in range(passes):
            # A pass adds a token, so each has a cache of its own, copied before the clock starts.
            cache = copy.deepcopy(filled)
            start = time.perf_counter()
            one_pass(cache)
            seconds.append(time.perf_counter() - start)
    finally:
        model.zero_grad()
        model.train(was_training)
    return {
        "passes": passes,
        "mean_ms": 1e3 * statistics.fmean(seconds),
        "std_ms": 1e3 * statistics.stdev(seconds) if passes > 1 else None,
        "median_ms": 1e3 * statistics.median(seconds),
        "peak_bytes": memory.bytes,
    }


class Timing(Task):
    """Measure time and memory of one pass: forward, with gradients, and of one more token after a cache."""

    reads_texts = False

    def identity(self) -> dict[str, Any]:
        """Return everything that affects times."""
        device = self.subject.model.device
        return {
            "passes": self.plan.passes,
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else processor(),
            "threads": torch.get_num_threads(),
            "versions": versions(SOFTWARE),
        }

    def _check_chunk(self, tokens: int) -> None:
        """Accept any chunk, because a timed pass reads the whole text at once."""

    def groups(self, length: int) -> Iterator[Sequence[Unit]]:
        """Yield each kind of pass."""
        for kind in KINDS:
            yield [Unit({"pass": kind}, length)]

    def ask(self, length: int, units: Sequence[Unit]) -> list[Record]:
        """Return mean, standard deviation and median of the time, and the peak memory."""
        (unit,) = units
        model, plan, kind = self.subject.model, self.plan, str(unit.key["pass"])
        passes = plan.passes * (DECODED if kind == "decode" else 1)
        return [time_model(model, length, passes=passes, kind=kind, seed=plan.seed)]
