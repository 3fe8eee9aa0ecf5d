"""One run: one scheme of a recipe with one seed, trained and tested. Every step is on disk when it is done."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import set_seed

from attention_priors.analysis import logit_scale_rows, prior_rows
from attention_priors.data import ANSWER_LENGTH
from attention_priors.evaluation import PasskeyRow, has_given_up, passkey_rows, perplexity_rows
from attention_priors.experiments.materials import Materials
from attention_priors.experiments.recipe import folder_name
from attention_priors.files import write_json
from attention_priors.models.decoder import PriorDecoderForCausalLM
from attention_priors.priors import Window
from attention_priors.training import train

Progress = Callable[[str, int, int], None]
"""Called with the stage, what is done of it and how much there is of it."""


def run_folder(output: Path, scheme: str, seed: int) -> Path:
    """Where a run keeps its files."""
    return output / "runs" / folder_name(scheme) / f"seed-{seed}"


def identity(materials: Materials, scheme: str, seed: int) -> dict[str, Any]:
    """Everything that determines a run's results, but for the versions of the libraries.

    Args:
        materials: the recipe, its corpus and tokenizer.
        scheme: name of the scheme.
        seed: the seed.
    """
    recipe = materials.recipe
    kept = recipe.model_dump(mode="json", exclude={"name", "description", "schemes", "seeds", "training"})
    return kept | {
        "scheme": recipe.schemes[scheme].model_dump(mode="json", exclude={"training"}),
        "training": recipe.training_of(scheme).model_dump(mode="json"),
        "seed": seed,
        "corpus_fingerprint": materials.corpus.fingerprint,
        "tokenizer_fingerprint": materials.tokenizer_fingerprint,
    }


def execute(materials: Materials, scheme: str, seed: int, folder: Path, progress: Progress) -> None:
    """Train and test, going on from whatever ``folder`` holds.

    Args:
        materials: the recipe's corpus and tokenizer.
        scheme: name of the scheme.
        seed: of the initial weights, the rows and the test texts' draws.
        folder: the run's own (:func:`run_folder`), checked before (:func:`check_same_recipe`).
        progress: told of every step.
    """
    recipe = materials.recipe
    model = _trained_model(materials, scheme, seed, folder, progress)
    model.eval()
    if torch.cuda.is_available():
        model.to(torch.device("cuda"))  # pyright: ignore[reportArgumentType]
    started = time.monotonic()
    layers: list[nn.Module] = [model.model] if recipe.schemes[scheme].share_prior else list(model.model.layers)
    length = recipe.longest_text
    write_json(
        folder / "priors.json",
        {
            "priors": prior_rows(layers, length=length),
            "logit_scales": logit_scale_rows(list(model.model.layers)),
        },
    )
    _add_window(model, recipe.schemes[scheme].at_evaluation.window)
    stopped = _test_passkey(materials, model, folder, progress)
    _test_perplexity(materials, model, folder, progress)
    write_json(
        folder / "done.json",
        {"evaluate_seconds": round(time.monotonic() - started, 1), "stopped": stopped},
    )


def _trained_model(
    materials: Materials, scheme: str, seed: int, folder: Path, progress: Progress
) -> PriorDecoderForCausalLM:
    recipe, tokenizer = materials.recipe, materials.tokenizer
    settings = recipe.training_of(scheme)
    saved = folder / "model"
    if not saved.exists():
        progress("train", 0, settings.total_steps)
        set_seed(seed)
        eos: Any = tokenizer.eos_token_id
        model = PriorDecoderForCausalLM(recipe.config_of(scheme, vocab_size=len(tokenizer), eos_token_id=eos))
        started = time.monotonic()
        trained = train(
            model,
            materials.training_rows(settings, seed),
            settings,
            folder / "checkpoints",
            seed=seed,
            on_step=lambda step: progress("train", step, settings.total_steps),
        )
        write_json(
            folder / "training.json",
            {
                "train_seconds": round(time.monotonic() - started, 1),
                "steps": settings.total_steps,
                "history": trained.history,
                "parameters": model.num_parameters(),
                "prior_parameters": _positional_parameters(model),
            },
        )
        trained.save(saved, tokenizer)
        shutil.rmtree(folder / "checkpoints")
    progress("train", settings.total_steps, settings.total_steps)
    changes = recipe.schemes[scheme].at_evaluation
    options: dict[str, Any] = {}
    if changes.base_multiplier is not None:
        encoding = recipe.schemes[scheme].encoding
        described = {"name": encoding} if isinstance(encoding, str) else dict(encoding or {})
        options["encoding"] = described | {"base_multiplier": changes.base_multiplier}
    return PriorDecoderForCausalLM.from_pretrained(saved, **options)


def _positional_parameters(model: PriorDecoderForCausalLM) -> int:
    """How many trained numbers priors and logit scales have."""
    return sum(
        parameter.numel()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and ("prior." in name or "logit_scale." in name)
    )


def _add_window(model: PriorDecoderForCausalLM, size: int | None) -> None:
    if size is None:
        return
    window = Window(model.config.num_attention_heads, size)
    if model.model.prior is not None:
        model.model.prior = model.model.prior + window
        return
    for layer in model.model.layers:
        attention: Any = layer.self_attn
        attention.prior = window if attention.prior is None else attention.prior + window


def _test_passkey(materials: Materials, model: PriorDecoderForCausalLM, folder: Path, progress: Progress) -> str | None:
    """Append a line per row to ``passkey.jsonl``; return why it stopped early, if it did."""
    settings = materials.recipe.evaluation.passkey
    if settings is None:
        return None
    path = folder / "passkey.jsonl"
    rows = _read_rows(path)
    task = materials.passkey_task()
    total = sum(_cost(length) for length in settings.lengths) * settings.depths
    spent = sum(_cost(row["length"]) for row in rows)
    progress("passkey", spent, total)
    # Every scheme and every seed reads the same texts, so that differences are the models'.
    remaining = passkey_rows(model, task, settings, chunk=materials.recipe.evaluation.chunk, seed=0, done=len(rows))
    while len(rows) < settings.depths * len(settings.lengths):
        if len(rows) % settings.depths == 0 and (reason := has_given_up(rows, settings)):
            progress("passkey", total, total)
            return reason
        row = next(remaining)
        rows.append(row)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        spent += _cost(row["length"])
        progress("passkey", spent, total)
    return None


def _read_rows(path: Path) -> list[PasskeyRow]:
    """The rows of an evaluation that was interrupted; a last line that was cut off does not count."""
    if not path.exists():
        return []
    *lines, rest = path.read_text(encoding="utf-8").split("\n")
    if rest:
        path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return [json.loads(line) for line in lines]


def _cost(length: int) -> int:
    """How long a text takes to read, in arbitrary units: attention grows with its square."""
    return length * (4096 + length + ANSWER_LENGTH) // 4096


def _test_perplexity(materials: Materials, model: PriorDecoderForCausalLM, folder: Path, progress: Progress) -> None:
    path = folder / "perplexity.json"
    if materials.recipe.evaluation.perplexity is None or path.exists():
        return
    texts = materials.perplexity_texts()
    progress("perplexity", 0, len(texts))
    rows = perplexity_rows(
        model,
        texts,
        chunk=materials.recipe.evaluation.chunk,
        on_text=lambda count: progress("perplexity", count, len(texts)),
    )
    write_json(path, rows)
