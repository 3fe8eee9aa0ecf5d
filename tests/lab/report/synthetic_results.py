"""Results as an experiment would write them: five schemes, two seeds, some stopped early."""

import json
import math
import random

LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
TRAINED = 160
SEEDS = (0, 1)
# The length at which retrieval breaks down, and whether evaluation then stops.
BREAKDOWN = {
    "NoPE": (300, True),
    "ALiBi": (700, False),
    "RoPE": (260, True),
    "BAM": (3000, False),
    "BAM <SSMax>": (1e6, False),
}
THETA_BETA = (-5.6, -1.1, -0.6, -0.3, 0.0, 0.4, 1.0, 2.6)


def make_results() -> dict:
    generator = random.Random(0)
    results = {
        "format": 1,
        "recipe": {
            "name": "Five schemes & a needle",
            "description": "A synthetic experiment: small models, texts up to 51 times the training length.",
            "model": {"layers": 2, "heads": 4, "width": 128},
            "training": {"context_length": TRAINED, "steps": 500, "corpus": "a small corpus"},
            "evaluation": {"lengths": list(LENGTHS), "depths": 20},
            "schemes": {name: {"prior": name.lower()} for name in BREAKDOWN},
        },
        "versions": {
            "attention-priors": "0.1.0",
            "python": "3.12.1",
            "torch": "2.9.0",
            "transformers": "5.0.0",
        },
        "machine": {"platform": "Linux", "processor": "x86_64", "cores": 2, "threads_per_run": 1},
        "seeds": list(SEEDS),
        "created": "2026-11-20T14:00:00+00:00",
        "wall_seconds": 412.0,
        "schemes": [
            {"name": name, "description": f"{name.lower()}()", "parameters": 1048576, "prior_parameters": 32}
            for name in BREAKDOWN
        ],
        "runs": [],
        "passkey": [],
        "perplexity": [],
        "copying": [],
        "sink_mass": [],
        "priors": [],
        "prior_terms": [],
        "prior_mass": [],
        "prior_reach": [],
        "logit_scales": [],
        "extensions": [],
        "retrieval": [],
        "losses": [],
        "completions": [],
        "needle_weights": [],
        "timing": [],
    }
    for scheme, (breakdown, stops) in BREAKDOWN.items():
        for seed in SEEDS:
            results["runs"].append(_run(generator, results, scheme, seed, breakdown, stops))
            results["perplexity"] += _perplexity(generator, scheme, seed, breakdown)
            if scheme in ("ALiBi", "BAM", "BAM <SSMax>"):
                results["priors"] += _priors(generator, scheme, seed)
            if "SSMax" in scheme:
                results["logit_scales"] += [
                    {
                        "scheme": scheme,
                        "seed": seed,
                        "layer": layer,
                        "head": head,
                        "s": generator.gauss(0.4, 0.2),
                    }
                    for layer in range(2)
                    for head in range(4)
                ]
    return json.loads(json.dumps(results))


def _run(generator, results, scheme, seed, breakdown, stops) -> dict:
    failures, stopped = 0, None
    for length in LENGTHS:
        chance = 0.98 / (1 + (length / breakdown) ** 4)
        # The second seed of RoPE keeps a flicker, and so is evaluated farther than the first.
        correct = [int(generator.random() < max(chance, 0.12 * (scheme == "RoPE" and seed == 1))) for _ in range(20)]
        results["passkey"] += [
            {"scheme": scheme, "seed": seed, "length": length, "depth": i / 19, "trials": 1, "correct": hit}
            for i, hit in enumerate(correct)
        ]
        failures = 0 if any(correct) else failures + 1
        if stops and failures == 2:
            stopped = f"passkey accuracy 0 at two lengths running ({length // 2}, {length})"
            break
    return {
        "scheme": scheme, "seed": seed, "train_seconds": 101.2, "evaluate_seconds": 60.0, "steps": 500,
        "final_loss": 3.1 + generator.gauss(0, 0.05), "stopped": stopped,
    }  # fmt: skip


def _perplexity(generator, scheme, seed, breakdown) -> list[dict]:
    made = []
    for position in (2.5, 8.5, 24.5, 48.5, 96.5, 192.5, 384.5, 768.5, 1536.5, 3072.5, 6144.5):
        nll = 3 + 3 / position**0.5 + 2.2 * math.log1p((position / breakdown) ** 1.5) + generator.gauss(0, 0.03)
        made.append({"scheme": scheme, "seed": seed, "position": position, "nll": nll, "tokens": 10})
    return made


def _priors(generator, scheme, seed) -> list[dict]:
    distances = [0, *(2**k for k in range(14))]
    made = []
    for layer in range(2):
        for head in range(4):
            if scheme == "ALiBi":
                prior, (parameters, log_prior) = "laplace", _laplace(2.0 ** (-2 * (head + 1)), distances)
            else:
                prior = "generalized_gaussian"
                theta_alpha, beta = generator.gauss(-0.5, 0.8), THETA_BETA[layer * 4 + head]
                parameters, log_prior = _generalized_gaussian(theta_alpha, beta, distances)
            made.append(
                {
                    "scheme": scheme,
                    "seed": seed,
                    "layer": layer,
                    "head": head,
                    "prior": prior,
                    "parameters": parameters,
                    "distance": distances,
                    "log_prior": log_prior,
                }
            )
    return made


def _laplace(slope, distances) -> tuple[dict, list[float]]:
    return {"slope": slope}, [-slope * distance for distance in distances]


def _generalized_gaussian(theta_alpha, beta, distances) -> tuple[dict, list[float]]:
    amplitude = math.exp(theta_alpha)
    parameters = {
        "alpha": math.exp(-theta_alpha / beta) if beta else None,  # nan is written as null
        "beta": beta,
        "mu": 0.0,
        "amplitude": amplitude,
        "theta_alpha": theta_alpha,
        "theta_beta": beta,
    }
    return parameters, [-amplitude * (distance + 1e-5) ** beta for distance in distances]
