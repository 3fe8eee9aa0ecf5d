"""``results.json``: everything a comparison has found, in rows that a program can read."""

from __future__ import annotations

import datetime
import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attention_priors.experiments.recipe import Recipe, Scheme
from attention_priors.experiments.run import run_folder
from attention_priors.files import read_json
from attention_priors.machine import processor, versions

FORMAT = 1

_SOFTWARE = ("attention-priors", "torch", "transformers", "tokenizers", "accelerate")


def collect(
    recipe: Recipe,
    output: Path,
    runs: Sequence[tuple[str, int]],
    *,
    wall_seconds: float,
    corpus: dict[str, Any],
) -> dict[str, Any]:
    """Put the finished runs of a recipe together.

    Args:
        recipe: the recipe.
        output: the comparison's folder.
        runs: scheme and seed of every finished run.
        wall_seconds: how long the comparison has taken, all sessions together.
        corpus: what the runs read: name, fingerprint, sizes.
    """
    results: dict[str, Any] = {
        "format": FORMAT,
        "recipe": recipe.model_dump(mode="json", exclude_defaults=True),
        "versions": versions(_SOFTWARE),
        "machine": {
            "platform": platform.platform(),
            "processor": processor(),
            "cores": os.cpu_count(),
            "threads_per_run": recipe.threads_per_run,
        },
        "corpus": corpus,
        "seeds": sorted({seed for _, seed in runs}),
        "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "wall_seconds": round(wall_seconds, 1),
        "schemes": [],
    }
    sections: dict[str, list[dict[str, Any]]] = {
        name: [] for name in ("runs", "passkey", "perplexity", "priors", "logit_scales")
    }
    for scheme, seed in runs:
        folder = run_folder(output, scheme, seed)
        who = {"scheme": scheme, "seed": seed}
        training, done = read_json(folder / "training.json"), read_json(folder / "done.json")
        if scheme not in [entry["name"] for entry in results["schemes"]]:
            results["schemes"].append(
                {
                    "name": scheme,
                    "description": describe(recipe.schemes[scheme]),
                    "parameters": training["parameters"],
                    "prior_parameters": training["prior_parameters"],
                }
            )
        sections["runs"].append(
            who
            | {key: training[key] for key in ("train_seconds", "steps")}
            | {"final_loss": training["history"][-1]["loss"], "history": training["history"]}
            | done
        )
        if (folder / "passkey.jsonl").exists():
            lines = (folder / "passkey.jsonl").read_text(encoding="utf-8").splitlines()
            sections["passkey"] += [who | json.loads(line) for line in lines]
        if (folder / "perplexity.json").exists():
            sections["perplexity"] += [who | row for row in read_json(folder / "perplexity.json")]
        learned = read_json(folder / "priors.json")
        for name in ("priors", "logit_scales"):
            sections[name] += [who | row for row in learned[name]]
    return results | sections


def describe(scheme: Scheme) -> str:
    """A scheme in one line, as code would make it: ``generalized_gaussian(init='roles') · ssmax``."""
    parts: list[Any] = []
    for part in (scheme.encoding, scheme.prior, scheme.logit_scale):
        parts += part if isinstance(part, list) else [] if part is None else [part]
    words = [_call(part) for part in parts]
    changes = {k: v for k, v in scheme.at_evaluation.model_dump().items() if v is not None}
    words += [f"{key}={value} at evaluation" for key, value in changes.items()]
    return " · ".join(words) or "no position but the causal mask"


def _call(part: dict[str, Any] | str) -> str:
    if isinstance(part, str):
        return part
    arguments = ", ".join(f"{key}={value!r}" for key, value in part.items() if key != "name")
    return f"{part['name']}({arguments})" if arguments else part["name"]
