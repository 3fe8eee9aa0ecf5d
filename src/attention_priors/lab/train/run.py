"""Resumable training runs from a recipe of ``attention-priors train``."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, set_seed

from attention_priors._io import read_json, with_nulls, writable_folder, write_json
from attention_priors.attention import SSMax
from attention_priors.hf.loading import check_positions, note_length
from attention_priors.lab.data.preparation import prepare, prepared_tokenizer
from attention_priors.lab.data.shards import PackedRows, TokenShards, read_manifest
from attention_priors.lab.data.tokenizer import pretrained_tokenizer
from attention_priors.lab.machine import WallClock, processor, versions
from attention_priors.lab.output_folder import undone_if_refused
from attention_priors.lab.strict_yaml import check_same_recipe
from attention_priors.lab.train.engine import Observer, Validation, check_machinery, is_first_process, processes, train
from attention_priors.lab.train.recipe import TrainRecipe, check_model, make_model
from attention_priors.priors import Prior

IDENTITY = "identity.json"
SOFTWARE = ("attention-priors", "torch", "transformers", "tokenizers", "accelerate", "numpy")


def run_recipe(recipe: TrainRecipe, output: Path, observer: Observer | None = None) -> dict[str, Any]:
    """Train the model of a recipe. An interrupted run resumes when called again; a finished run is not changed.

    ``output`` then holds these files and folders:

    - ``recipe.json``.
    - ``machine.json``: versions and machine of each distinct session.
    - ``data/``: tokens, unless the recipe names prepared tokens.
    - ``checkpoints/``.
    - ``model/``: weights, config and tokenizer.
    - ``training.json``: losses, numbers of parameters, time.

    Args:
        recipe: Recipe of the run.
        output: Folder of the run.
        observer: Progress callbacks.

    Returns:
        The content of ``training.json``; a non-finite validation loss is None.

    Raises:
        RecipeError: Before any work, if ``output`` holds another run or another call is writing to it.
        ShardError: Prepared tokens are damaged.
        ValueError: Settings of the recipe are incompatible.
        FloatingPointError: The loss is not finite.
        OSError: A file cannot be read or written.
    """
    observer = observer if observer is not None and is_first_process() else Observer()
    settings, length = recipe.training, recipe.training.context_length
    check_machinery(settings, recipe.running)
    if not _is_finished(output):
        check_model(recipe.model, length=length, tokenizer_size=_tokenizer_size(recipe, output))
    identity = _identity(recipe, output)
    with writing(output):
        check_same_recipe(output / IDENTITY, identity)
        if is_first_process() and not (output / IDENTITY).exists():
            write_json(output / IDENTITY, identity)
        if _is_finished(output):
            observer.on_message(f"{output / 'model'} exists already")
            return read_json(output / "training.json")
        if is_first_process():
            write_json(output / "recipe.json", recipe.model_dump(mode="json", exclude_defaults=True))
            _note_machine(output / "machine.json")
        shards = prepare_data(recipe, output, observer)
        tokenizer = prepared_tokenizer(shards)
        rows = PackedRows(
            TokenShards(shards, "train"),
            context_length=length,
            num_rows=settings.total_rows,
            seed=recipe.seed if recipe.data.order == "shuffled" else None,
        )
        validation = None
        if recipe.validation is not None:
            held_out = TokenShards(shards, "held_out")
            wanted = max(1, min(recipe.validation.tokens, len(held_out)) // length)
            held_out_rows = PackedRows(held_out, context_length=length, num_rows=wanted)
            validation = Validation(held_out_rows, recipe.validation.every)
        set_seed(recipe.seed)
        model = make_model(recipe.model, tokenizer)
        check_positions(model, length)
        note_length(model, length)
        parameters = numbers_of_parameters(model)
        clock = WallClock(output / "train_seconds.json" if is_first_process() else None)

        def on_step(step: int) -> None:
            clock.tick()
            observer.on_step(step)

        with _logs_beside(output), clock:
            trained = train(
                model,
                rows,
                settings,
                output / "checkpoints",
                seed=recipe.seed,
                running=recipe.running,
                shuffle=False,
                validation=validation,
                run_name=recipe.name,
                observer=replace(observer, on_step=on_step),
            )
        numbers = {
            "seed": recipe.seed,
            "steps": settings.total_steps,
            "tokens": settings.total_steps * settings.step_tokens,
            "epochs": rows.epochs,
            **parameters,
            "processes": processes(),
            "train_seconds": round(clock.seconds, 1),
            "history": trained.history,
            "validation": trained.validation,
        }
        results = with_nulls(numbers)
        if is_first_process():
            write_json(output / "training.json", results)
        trained.save(output / "model", tokenizer)
        # The clock's file is kept until the model is saved, because the next call would write training.json again.
        clock.forget()
        return results


def _identity(recipe: TrainRecipe, output: Path) -> dict[str, Any]:
    """Return the content that ``identity.json`` must have.

    Raises:
        ShardError: The preparation of the tokens has not finished.
    """
    identity = recipe.identity()
    if not (output / IDENTITY).exists():
        return identity
    known = read_json(output / IDENTITY)
    for key, here in identity["fingerprints"].items():
        there = known.get("fingerprints", {}).get(key)
        if here is None and _is_finished(output):
            # A finished run stays valid when its input files have been removed.
            identity["fingerprints"][key] = there
        elif here is not None and here == there:
            # Unchanged files may have moved or may be named by another path.
            section, name = key.split(".")
            identity[section][name] = known[section][name]
    return identity


def _tokenizer_size(recipe: TrainRecipe, output: Path) -> int | None:
    """Return the number of entries of the tokenizer; None if the run has begun to prepare tokens with it."""
    if recipe.data.shards is not None:
        return len(prepared_tokenizer(Path(recipe.data.shards)))
    if isinstance(recipe.tokenizer, str):
        return None if (output / "data").exists() else len(pretrained_tokenizer(recipe.tokenizer))
    return recipe.tokenizer


def _is_finished(output: Path) -> bool:
    return (output / "training.json").exists() and (output / "model").exists()


@contextmanager
def writing(output: Path) -> Iterator[None]:
    """Lock the folder of a run against other calls. The processes of one call share the lock.

    Raises:
        RecipeError: Another call is writing to the folder.
        OSError: The folder cannot be made or written.
    """
    if is_first_process():
        # Prepared tokens also stay, but do not count as work: their manifest lets other recipes reuse or refuse them.
        has_work = (output / "checkpoints").exists
        with undone_if_refused(output, (IDENTITY, "recipe.json", "machine.json"), keep=has_work):
            yield
    else:
        writable_folder(output)
        yield


def prepare_data(recipe: TrainRecipe, output: Path, observer: Observer) -> Path:
    """Prepare a recipe's tokens unless they are prepared already, and return their folder.

    Raises:
        RecipeError: The folder holds tokens of another preparation.
        ShardError: The folder in ``data.shards`` holds no prepared tokens.
        ValueError: The documents or the tokenizer cannot be read, or no tokens are left to train on.
        OSError: A file cannot be read or written.
    """
    if recipe.data.shards is not None:
        folder = Path(recipe.data.shards)
        read_manifest(folder)
        return folder
    folder = output / "data"
    prepare(recipe.preparation(), folder, on_tokens=observer.on_tokens, on_message=observer.on_message)
    return folder


def machine() -> dict[str, Any]:
    """Return the library versions and a description of this machine."""
    return {
        "versions": versions(SOFTWARE),
        "platform": platform.platform(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "devices": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "processes": processes(),
        "threads": torch.get_num_threads(),
    }


def _note_machine(path: Path) -> None:
    """Append this session's versions and machine, unless an earlier session was equal."""
    sessions = read_json(path) if path.exists() else []
    here = machine()
    if here not in sessions:
        write_json(path, [*sessions, here])


def numbers_of_parameters(model: PreTrainedModel) -> dict[str, int]:
    """Return the number of all ``parameters``, and of the trained ``prior_parameters`` of priors and logit scales."""
    parts = (module for module in model.modules() if isinstance(module, Prior | SSMax))
    positional = {parameter for part in parts for parameter in part.parameters() if parameter.requires_grad}
    return {
        "parameters": model.num_parameters(),
        "prior_parameters": sum(parameter.numel() for parameter in positional),
    }


@contextmanager
def _logs_beside(output: Path) -> Iterator[None]:
    """Direct TensorBoard and Weights & Biases to the run's folder, unless their environment variables are set."""
    places = {"TENSORBOARD_LOGGING_DIR": str(output / "tensorboard"), "WANDB_DIR": str(output)}
    added = {name: place for name, place in places.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]
