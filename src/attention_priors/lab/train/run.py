"""Carrying out a recipe of ``attention-priors train`` in a folder that holds everything."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import set_seed

from attention_priors._io import read_json, with_nulls, writable_folder, write_json
from attention_priors.attention import SSMax
from attention_priors.hf.loading import check_positions, note_length
from attention_priors.lab.data.preparation import prepare, prepared_tokenizer
from attention_priors.lab.data.shards import PackedRows, TokenShards, read_manifest
from attention_priors.lab.data.tokenizer import pretrained_tokenizer
from attention_priors.lab.machine import processor, versions
from attention_priors.lab.output_folder import undone_if_refused
from attention_priors.lab.strict_yaml import check_same_recipe
from attention_priors.lab.train.engine import Validation, check_machinery, is_first_process, processes, train
from attention_priors.lab.train.model import check_model, make_model
from attention_priors.lab.train.recipe import TrainRecipe
from attention_priors.lab.wall_clock import WallClock
from attention_priors.priors import Prior

IDENTITY = "identity.json"
SOFTWARE = ("attention-priors", "torch", "transformers", "tokenizers", "accelerate", "numpy")


@dataclass(frozen=True)
class Observer:
    """Whom a run tells how far it is. Only the first of several processes has something to say."""

    on_message: Callable[[str], None] = lambda message: None
    on_tokens: Callable[[str, int], None] = lambda part, tokens: None
    """A part of the data, and how many tokens of it are prepared."""
    on_step: Callable[[int], None] = lambda step: None
    on_log: Callable[[Mapping[str, float]], None] = lambda logs: None


def run_recipe(recipe: TrainRecipe, output: Path, observer: Observer | None = None) -> dict[str, Any]:
    """Train what a recipe describes; interrupted at any point, the same call goes on from there.

    ``output`` then holds ``recipe.json``, ``machine.json`` (versions and machine, a list of all that there were),
    ``data/`` (tokens, unless the recipe names prepared ones), ``checkpoints/``, ``model/`` (weights, config and
    tokenizer) and ``training.json`` (losses, parameters, time). A finished run is left as it is.

    Args:
        recipe: what to train.
        output: the folder.
        observer: is told how far it is.

    Returns:
        The content of ``training.json``; a validation loss that is not finite is None.

    Raises:
        RecipeError: before any work, if ``output`` holds another run or is being written by another call.
        ShardError: prepared tokens are damaged.
        ValueError: the parts of the recipe do not go together.
        FloatingPointError: the loss is no longer finite.
        OSError: something cannot be read or written.
    """
    observer = observer if observer is not None and is_first_process() else Observer()
    check_machinery(recipe.training, recipe.running)
    if not _is_finished(output):
        size = _tokenizer_size(recipe, output)
        check_model(recipe.model, length=recipe.training.context_length, tokenizer_size=size)
    identity = _identity(recipe, output)
    with writing(output):
        check_same_recipe(output / IDENTITY, identity)
        if is_first_process() and not (output / IDENTITY).exists():
            write_json(output / IDENTITY, identity)
        if _is_finished(output):
            observer.on_message(f"{output / 'model'} is there already")
            return read_json(output / "training.json")
        if is_first_process():
            write_json(output / "recipe.json", recipe.model_dump(mode="json", exclude_defaults=True))
            _note_machine(output / "machine.json")
        shards = prepare_data(recipe, output, observer)
        tokenizer = prepared_tokenizer(shards)

        settings = recipe.training
        length = settings.context_length
        rows = PackedRows(
            TokenShards(shards, "train"),
            context_length=length,
            num_rows=settings.total_rows,
            seed=recipe.seed if recipe.data.order == "shuffled" else None,
        )
        validation = None
        if recipe.validation is not None:
            held_out = TokenShards(shards, "held_out")
            wanted = min(recipe.validation.tokens, len(held_out)) // length
            validation = Validation(
                PackedRows(held_out, context_length=length, num_rows=max(1, wanted)), recipe.validation.every
            )
        set_seed(recipe.seed)
        model = make_model(recipe.model, tokenizer)
        check_positions(model, length)
        note_length(model, length)
        parameters = {
            "parameters": model.num_parameters(),
            "prior_parameters": _count(model, Prior),
            "logit_scale_parameters": _count(model, SSMax),
        }
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
                on_step=on_step,
                on_log=observer.on_log,
                on_message=observer.on_message,
            )
        results = with_nulls(
            {
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
        )
        if is_first_process():
            write_json(output / "training.json", results)
        trained.save(output / "model", tokenizer)
        # Until the model is there, the next call writes training.json anew.
        clock.forget()
        return results


def _identity(recipe: TrainRecipe, output: Path) -> dict[str, Any]:
    """What ``identity.json`` must hold.

    Raises:
        ShardError: the preparation of the tokens has not finished.
    """
    identity = recipe.identity()
    if not (output / IDENTITY).exists():
        return identity
    known = read_json(output / IDENTITY)
    for key, here in identity["fingerprints"].items():
        there = known.get("fingerprints", {}).get(key)
        if here is None and _is_finished(output):
            # What a finished run has read may be gone: it says nothing against the run.
            identity["fingerprints"][key] = there
        elif here is not None and here == there:
            # The same files are the same, wherever they are, and from wherever they are named.
            section, name = key.split(".")
            identity[section][name] = known[section][name]
    return identity


def _tokenizer_size(recipe: TrainRecipe, output: Path) -> int | None:
    """Entries of the tokenizer; None where the tokens are prepared already, or in part."""
    if recipe.data.shards is not None:
        return len(prepared_tokenizer(Path(recipe.data.shards)))
    if isinstance(recipe.tokenizer, str):
        return None if (output / "data").exists() else len(pretrained_tokenizer(recipe.tokenizer))
    return recipe.tokenizer


def _is_finished(output: Path) -> bool:
    return (output / "training.json").exists() and (output / "model").exists()


@contextmanager
def writing(output: Path) -> Iterator[None]:
    """Let no other call write to a run's folder meanwhile; the processes of one call count as one writer.

    Raises:
        RecipeError: another call is writing to it.
        OSError: the folder cannot be made, or not be written to.
    """
    if not is_first_process():
        writable_folder(output)
        yield
        return

    def has_work() -> bool:
        # Prepared tokens stay as well, but say themselves what they are made of: another recipe may read them.
        return (output / "checkpoints").exists()

    made = (IDENTITY, "recipe.json", "machine.json")
    with undone_if_refused(output, made, keep=has_work):
        yield


def prepare_data(recipe: TrainRecipe, output: Path, observer: Observer, *, repair: bool = False) -> Path:
    """Where a recipe's tokens are; they are prepared, if they are not yet.

    Raises:
        ValueError, OSError: as :func:`prepare` and :meth:`TrainRecipe.preparation`.
    """
    if recipe.data.shards is not None:
        folder = Path(recipe.data.shards)
        read_manifest(folder)
        return folder
    folder = output / "data"
    prepare(recipe.preparation(), folder, repair=repair, on_tokens=observer.on_tokens, on_message=observer.on_message)
    return folder


def machine() -> dict[str, Any]:
    """What something was computed with and on."""
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
    """Add what this session computes with and on, unless an earlier one had the same."""
    sessions = read_json(path) if path.exists() else []
    here = machine()
    if here not in sessions:
        write_json(path, [*sessions, here])


def _count(model: nn.Module, kind: type[nn.Module]) -> int:
    """How many numbers the parts of a kind hold, fixed ones included."""
    parameters = {
        parameter for module in model.modules() if isinstance(module, kind) for parameter in module.parameters()
    }
    return sum(parameter.numel() for parameter in parameters)


@contextmanager
def _logs_beside(output: Path) -> Iterator[None]:
    """TensorBoard and Weights & Biases write beside the run, unless they have been told otherwise."""
    places = {"TENSORBOARD_LOGGING_DIR": str(output / "tensorboard"), "WANDB_DIR": str(output)}
    added = {name: place for name, place in places.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]
