"""Results as a sweep would write them: one scheme, three axes around a base, three seeds, two context extensions."""

import json
import math
import random
from typing import Any

TRAINED, EXTENDED = 160, 320
SEEDS = (0, 1, 2)
LENGTHS = (128, 512, 2048, 8192)
BASE: dict[str, Any] = {"scheme": "BAM", "init": "uniform", "length": TRAINED, "s": "none"}
# Where retrieval breaks down, in tokens.
VARIANTS: dict[str, tuple[dict[str, Any], float]] = {
    "BAM": ({}, 3000),
    "BAM · init=laplace": ({"init": "laplace"}, 400),
    "BAM · init=sampled": ({"init": "sampled"}, 1200),
    "BAM · length=320": ({"length": 320}, 6000),
    "BAM · length=80": ({"length": 80}, 900),
    "BAM · s=ssmax(init=0.2)": ({"s": "ssmax(init=0.2)"}, 20000),
}
FIRST = "BAM · s=ssmax(init=0.2)"
LONGER, SHIFTED = (f"{FIRST}, extended to 320: {way}" for way in ("trained on", "another prior"))
SHIFT = {"none": 0.0, "ssmax(init=0.2)": -0.4}


def make_swept_results() -> dict[str, Any]:
    draw = random.Random(1)
    results: dict[str, Any] = {
        "format": 1,
        "recipe": {"name": "A sweep", "training": {"context_length": TRAINED}},
        "versions": {"torch": "2.9.0"},
        "machine": {"cores": 2},
        "seeds": list(SEEDS),
        "created": "2026-11-20T14:00:00+00:00",
        "wall_seconds": 5000.0,
        "schemes": [],
        **{name: [] for name in ("runs", "passkey", "perplexity", "priors", "logit_scales", "extensions")},
    }
    for name, (changes, breakdown) in VARIANTS.items():
        axes = BASE | changes
        if "SSMax" in name or "ssmax" in name:
            _add(results, draw, name, axes | {"extension": "before"}, axes["length"], breakdown)
            for extended, way in ((LONGER, "trained on"), (SHIFTED, "another prior")):
                _add(results, draw, extended, axes | {"extension": way}, EXTENDED, 4 * breakdown, name)
        else:
            _add(results, draw, name, axes, axes["length"], breakdown)
    _add(results, draw, "ALiBi", {}, TRAINED, 500)
    return json.loads(json.dumps(results))


def _add(results, draw, name, axes, length, breakdown, extended_from=None) -> None:
    entry = {"name": name, "description": "x", "context_length": length, "parameters": 1000, "prior_parameters": 8}
    entry |= ({"axes": axes} if axes else {}) | ({"extended_from": extended_from} if extended_from else {})
    results["schemes"].append(entry)
    for seed in SEEDS:
        who = {"scheme": name, "seed": seed} | ({"axes": axes} if axes else {})
        reach = breakdown * 2 ** draw.gauss(0, 0.4)
        loss = {"train_seconds": 9.0, "evaluate_seconds": 4.0, "steps": 50, "final_loss": 3.0, "stopped": None}
        results["runs"].append(who | loss)
        results["passkey"] += [
            who
            | {"length": size, "depth": depth / 9, "trials": 2}
            | {"correct": sum(draw.random() < 0.99 / (1 + (size / reach) ** 3) for _ in range(2))}
            for size in LENGTHS
            for depth in range(10)
        ]
        results["perplexity"] += [
            who
            | {"position": 2**k * math.sqrt(2 - 2**-k), "tokens": 4 * 2**k}
            | {"nll": 3 + 3 / 2 ** (k / 2) + math.log1p((2**k / reach) ** 1.2) + draw.gauss(0, 0.02)}
            for k in range(14)
        ]
        if name != "ALiBi":
            results["priors"] += [who | _head(draw, layer, head, axes["s"]) for layer in range(2) for head in range(4)]
        if "extension" in axes:
            results["logit_scales"] += [
                who | {"layer": layer, "head": head, "s": draw.gauss(0.3 + 0.2 * (extended_from is not None), 0.1)}
                for layer in range(2)
                for head in range(4)
            ]
        if extended_from:
            losses = {
                when: {size: draw.gauss(mean, 0.01) for size, mean in (("160", 3.1), ("320", later))}
                for when, mean, later in (("before", 3.1, 3.4), ("after", 3.1, 3.0))
            }
            # Both are made of the same models.
            losses["before"] = {"160": 3.1 + seed / 100, "320": 3.4 - seed / 50}
            steps = 256 if name == LONGER else 0
            results["extensions"].append(who | {"from": TRAINED, "to": EXTENDED, "steps": steps, "loss": losses})


def _head(draw, layer, head, scale) -> dict[str, Any]:
    beta = draw.choice((0.9, 0.4, -0.3, -0.2, -0.9)) + draw.gauss(SHIFT[scale], 0.05)
    theta_alpha = draw.gauss(-0.5, 0.5)
    distances = [0, *(2**k for k in range(14))]
    return {
        "layer": layer,
        "head": head,
        "prior": "generalized_gaussian",
        "parameters": {"alpha": 1.0, "beta": beta, "mu": 0.0, "theta_alpha": theta_alpha, "theta_beta": beta},
        "distance": distances,
        "log_prior": [-math.exp(theta_alpha) * (distance + 1e-5) ** beta for distance in distances],
    }
