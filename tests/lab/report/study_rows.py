"""Rows of studies in the format of comparisons: five schemes with pass keys and losses, and a sweep."""

from __future__ import annotations

import json
import math
import random
from typing import Any

from attention_priors.lab.results import FORMAT, Results

LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
TRAINED = 160
SEEDS = (0, 1)
# Length at which retrieval fails, and whether evaluation then stops.
BREAKDOWN = {
    "NoPE": (300, True),
    "ALiBi": (700, False),
    "RoPE": (260, True),
    "BAM": (3000, False),
    "BAM <SSMax>": (1e6, False),
}
THETA_BETA = (-5.6, -1.1, -0.6, -0.3, 0.0, 0.4, 1.0, 2.6)


class Rows(list[dict[str, Any]]):
    """Rows of a study that a test may change."""

    def of(self, kind: str, /, **values: Any) -> list[dict[str, Any]]:
        """Return the rows of a kind with these values."""
        return [row for row in self if row["row"] == kind and values.items() <= row.items()]

    def put(self, kind: str, rows: list[dict[str, Any]]) -> Rows:
        """Replace all rows of a kind."""
        self[:] = [row for row in self if row["row"] != kind] + [{"row": kind} | row for row in rows]
        return self

    def results(self) -> Results:
        return Results.of(json.loads(json.dumps(self)))


def study(recipe: dict[str, Any], names: list[str] | dict[str, dict[str, Any]], seeds=SEEDS) -> Rows:
    """Return a study without results: its first row and its schemes."""
    entries = names if isinstance(names, dict) else {name: {} for name in names}
    first = {
        "row": "study", "format": FORMAT,
        "recipe": {"name": "A study", "training": {"context_length": TRAINED}} | recipe,
        "versions": {"attention-priors": "0.1.0", "torch": "2.9.0"}, "machine": {"cores": 2, "threads_per_run": 1},
        "seeds": list(seeds), "created": "2026-11-20T14:00:00+00:00", "wall_seconds": 412.0,
    }  # fmt: skip
    scheme = {"row": "scheme", "parameters": 1048576, "prior_parameters": 32}
    return Rows([first, *(scheme | {"scheme": n, "description": f"{n.lower()}()"} | e for n, e in entries.items())])


def attention_on_the_key() -> Rows:
    """Draw the weights of two schemes. In seed 0, head 1 gives most at first; in seed 1, head 0 does, and loses it
    later.
    """
    rows = study({}, ["ALiBi", "BAM"])
    weights = {(0, 0): (0.1, 0.9), (0, 1): (0.8, 0.7), (1, 0): (0.6, 0.2), (1, 1): (0.5, 0.5)}
    for (seed, head), values in weights.items():
        for length, weight in zip((160, 8192), values, strict=True):
            own = {"scheme": "ALiBi", "seed": seed, "plan": "drowning", "length": length, "layer": 1, "head": head}
            rows.append({"row": "needle_weight"} | own | {"texts": 5, "weight": weight})
    return rows


def five_schemes() -> Rows:
    """Draw five schemes with two seeds, some of which stop early."""
    draw = random.Random(0)
    about = "A synthetic experiment: small models, texts up to 51 times the training length."
    rows = study({"name": "Five schemes & a needle", "description": about}, [*BREAKDOWN])
    for scheme, (breakdown, stops) in BREAKDOWN.items():
        for seed in SEEDS:
            own = {"scheme": scheme, "seed": seed}
            asked, stopped = _asked(draw, own, breakdown, stops)
            times = {"train_seconds": 101.2, "evaluate_seconds": 60.0, "steps": 500, "stopped": stopped}
            rows += [{"row": "run"} | own | times | {"final_loss": 3.1 + draw.gauss(0, 0.05), "history": []}, *asked]
            for position in (2.5, 8.5, 24.5, 48.5, 96.5, 192.5, 384.5, 768.5, 1536.5, 3072.5, 6144.5):
                nll = 3 + 3 / position**0.5 + 2.2 * math.log1p((position / breakdown) ** 1.5) + draw.gauss(0, 0.03)
                rows.append(own | loss_row(position, nll, 10))
            for layer, head in ((layer, head) for layer in range(2) for head in range(4)):
                place = own | {"layer": layer, "head": head}
                if scheme in ("ALiBi", "BAM", "BAM <SSMax>"):
                    rows.append({"row": "prior"} | place | _prior(draw, scheme, layer, head))
                if "SSMax" in scheme:
                    rows.append({"row": "logit_scale"} | place | {"s": draw.gauss(0.4, 0.2)})
    return rows


def asked_row(length: int, depth: float | None, correct: float, trials: int = 1, **others: Any) -> dict[str, Any]:
    """Return a row of retrieval. By default, it is of the recipe's own pass keys."""
    row = {"row": "retrieval", "plan": None, "task": "passkey", "length": length, "depth": depth, "trials": trials}
    return row | {"correct": correct, "token_accuracy": None, "tokens_right": None, "stopped": None} | others


def loss_row(position: float, nll: float | None, tokens: int, **others: Any) -> dict[str, Any]:
    """Return a row of perplexity. By default, it is of the recipe's own texts."""
    row = {"row": "perplexity", "plan": None, "task": "perplexity", "length": None, "position": position}
    return row | {"nll": nll, "tokens": tokens} | others


def _asked(draw, own, breakdown, stops) -> tuple[list[dict[str, Any]], str | None]:
    rows, failures = [], 0
    for length in LENGTHS:
        chance = 0.98 / (1 + (length / breakdown) ** 4)
        # RoPE's second seed keeps rare successes, so it is evaluated at more lengths than the first.
        least = 0.12 * (own["scheme"] == "RoPE" and own["seed"] == 1)
        correct = [int(draw.random() < max(chance, least)) for _ in range(20)]
        rows += [own | asked_row(length, place / 19, hit) for place, hit in enumerate(correct)]
        failures = 0 if any(correct) else failures + 1
        if stops and failures == 2:
            return rows, f"passkey accuracy 0 at two lengths running ({length // 2}, {length})"
    return rows, None


def _prior(draw, scheme, layer, head) -> dict[str, Any]:
    distances = [0, *(2**k for k in range(14))]
    if scheme == "ALiBi":
        slope = 2.0 ** (-2 * (head + 1))
        curve = [-slope * distance for distance in distances]
        return {"prior": "laplace", "parameters": {"slope": slope}, "distance": distances, "log_prior": curve}
    return gaussian_row(draw.gauss(-0.5, 0.8), THETA_BETA[layer * 4 + head], distances)


def gaussian_row(theta_alpha: float, beta: float, distances: list[int]) -> dict[str, Any]:
    """Return the prior of a Generalized Gaussian."""
    amplitude = math.exp(theta_alpha)
    parameters = {
        "alpha": math.exp(-theta_alpha / beta) if beta else None,  # nan is written as null
        "beta": beta, "mu": 0.0, "theta_alpha": theta_alpha,
    }  # fmt: skip
    curve = [-amplitude * (distance + 1e-5) ** beta for distance in distances]
    return {"prior": "generalized_gaussian", "parameters": parameters, "distance": distances, "log_prior": curve}


# ---- a sweep: one scheme, three axes around a base, three seeds, two context extensions

EXTENDED = 320
SWEPT_SEEDS = (0, 1, 2)
SWEPT_LENGTHS = (128, 512, 2048, 8192)
BASE: dict[str, Any] = {"scheme": "BAM", "init": "uniform", "length": TRAINED, "s": "none"}
# Length at which retrieval fails, in tokens.
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


def sweep() -> Rows:
    draw = random.Random(1)
    entries: dict[str, dict[str, Any]] = {}
    breakdowns: dict[str, float] = {}
    for name, (changes, breakdown) in VARIANTS.items():
        axes = BASE | changes
        ways = {LONGER: "trained on", SHIFTED: "another prior"} if name == FIRST else {}
        before = {"extension": "before"} if ways else {}
        entries[name] = {"context_length": axes["length"], "axes": axes | before}
        breakdowns[name] = breakdown
        for extended, way in ways.items():
            entries[extended] = {"context_length": EXTENDED, "axes": axes | {"extension": way}, "extended_from": name}
            breakdowns[extended] = 4 * breakdown
    entries["ALiBi"], breakdowns["ALiBi"] = {"context_length": TRAINED}, 500
    rows = study({"name": "A sweep"}, entries, SWEPT_SEEDS)
    for name, entry in entries.items():
        for seed in SWEPT_SEEDS:
            rows += [{"scheme": name, "seed": seed} | row for row in _swept(draw, name, entry, seed, breakdowns[name])]
    return rows


def _swept(draw, name, entry, seed, breakdown):
    reach = breakdown * 2 ** draw.gauss(0, 0.4)
    times = {"train_seconds": 9.0, "evaluate_seconds": 4.0, "steps": 50, "final_loss": 3.0, "stopped": None}
    yield {"row": "run", "history": []} | times
    for size in SWEPT_LENGTHS:
        for depth in range(10):
            correct = sum(draw.random() < 0.99 / (1 + (size / reach) ** 3) for _ in range(2))
            yield asked_row(size, depth / 9, correct, trials=2)
    for k in range(14):
        nll = 3 + 3 / 2 ** (k / 2) + math.log1p((2**k / reach) ** 1.2) + draw.gauss(0, 0.02)
        yield loss_row(2**k * math.sqrt(2 - 2**-k), nll, 4 * 2**k)
    axes = entry.get("axes")
    for layer, head in ((layer, head) for layer in range(2) for head in range(4)):
        place = {"layer": layer, "head": head}
        if axes:
            beta = draw.choice((0.9, 0.4, -0.3, -0.2, -0.9)) + draw.gauss(SHIFT[axes["s"]], 0.05)
            yield {"row": "prior"} | place | gaussian_row(draw.gauss(-0.5, 0.5), beta, [0, *(2**k for k in range(14))])
        if axes and "extension" in axes:
            yield {"row": "logit_scale"} | place | {"s": draw.gauss(0.3 + 0.2 * ("extended_from" in entry), 0.1)}
    if "extended_from" in entry:
        after = {"160": draw.gauss(3.1, 0.01), "320": draw.gauss(3.0, 0.01)}
        # Both schemes have equal models.
        losses = {"before": {"160": 3.1 + seed / 100, "320": 3.4 - seed / 50}, "after": after}
        steps = 256 if name == LONGER else 0
        yield {"row": "extension", "from": TRAINED, "to": EXTENDED, "steps": steps, "loss": losses}
