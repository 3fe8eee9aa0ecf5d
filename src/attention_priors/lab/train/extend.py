"""Context extension: a little more training, at a longer context."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from attention_priors._io import checksum, read_json, with_nulls, write_json
from attention_priors.checks import check_above
from attention_priors.hf.loading import load_config, load_model
from attention_priors.lab.data import collate_rows
from attention_priors.lab.data.preparation import prepared_tokenizer
from attention_priors.lab.data.shards import PackedRows, TokenShards
from attention_priors.lab.data.tokenizer import pretrained_tokenizer, tokenizer_fingerprint
from attention_priors.lab.strict_yaml import validated
from attention_priors.lab.tasks.subject import device_named
from attention_priors.lab.train.engine import Observer, is_first_process, processes
from attention_priors.lab.train.recipe import TrainRecipe
from attention_priors.lab.train.run import IDENTITY, run_recipe, writing
from attention_priors.lab.train.trainer import loss_sums, packed_inputs

ROWS_PER_STEP = 16
"""Rows of a step for a model whose recipe is not known."""


def extend(
    model: Path,
    output: Path,
    *,
    length: str,
    steps: int,
    data: Path | None = None,
    learning_rate: float | None = None,
    tokens_per_step: int | None = None,
    test_tokens: int = 200_000,
    observer: Observer | None = None,
) -> dict[str, Any]:
    """Train a saved model further at a longer context, and measure the losses before and after.

    The files of ``attention-priors train`` beside the model determine the rest: its data, its optimiser, its tokens a
    step, and whether only its attached priors learn. Interrupted at any point, the same call goes on from there.

    Source: BAM, Appendix C (256 more steps at twice the context).

    Args:
        model: the folder of any causal language model; of one of ours, or the folder of its training.
        output: the folder of all results, as in :func:`run_recipe`, and of ``extension.json``.
        length: tokens (``1024``), or a multiple of the model's training length (``2x``).
        steps: of the optimiser.
        data: prepared tokens; by default the tokens that the model was trained on.
        learning_rate: constant; by default the final one of the model's own training.
        tokens_per_step: as in the model's own training by default.
        test_tokens: number of held-out tokens that the losses are measured on.
        observer: progress callbacks.

    Returns:
        The content of ``extension.json``: mean losses in nats per token on held-out rows of the old and of the new
        length, before and after; a loss that is not finite is None.

    Raises:
        RecipeError: before any work, if ``output`` holds another run or is being written by another call.
        ValueError: a setting is not known, or settings do not go together.
        FileNotFoundError: there is no such model, or its training has not finished.
        OSError: a file cannot be read or written.
    """
    observer = observer or Observer()
    if learning_rate is not None:
        check_above(0, learning_rate=learning_rate)
    folder = _model_folder(model).absolute()  # `.` has no parent
    known = folder.parent / "recipe.json"
    # A saved file names no module to import: plugins of the recipe are given to this command anew.
    before = validated(read_json(known) | {"plugins": []}, TrainRecipe, str(known)) if known.is_file() else None
    if data is None and before is None:
        raise ValueError(f"data must be given: {folder} has no recipe.json beside it that names its training data")
    shards = data or Path((before and before.data.shards) or folder.parent / "data")
    old = before.training.context_length if before else getattr(load_config(folder), "max_position_embeddings", None)
    new = _length(length, old)
    tokenizer = pretrained_tokenizer(folder)
    if tokenizer_fingerprint(tokenizer) != tokenizer_fingerprint(prepared_tokenizer(shards)):
        raise ValueError(f"the tokens in {shards} were made with another tokenizer than that in {folder}")
    if learning_rate is None:
        if before is None:
            raise ValueError(f"learning_rate must be given: {folder} has no recipe.json beside it")
        learning_rate = before.training.final_learning_rate
    size = {"context_length": new, "steps": steps, "tokens_per_step": tokens_per_step}
    recipe = _recipe(before, folder, shards, old, learning_rate=learning_rate, **size)
    held_out = TokenShards(shards, "held_out")
    if len(held_out) < new:
        raise ValueError(f"{shards} holds out {len(held_out)} tokens: expected at least one row of the {new} of length")
    run_recipe(recipe, output, observer)
    with writing(output):
        # With the identity, numbers of another training in the folder are not taken for this one's.
        described = {"from": old, "to": new, "steps": steps, "test_tokens": test_tokens}
        described |= {"identity": checksum(output / IDENTITY)}
        result = output / "extension.json"
        content: dict[str, Any] = read_json(result) if result.exists() else {}
        if {key: content.get(key) for key in described} != described:
            # Every process measures: the value that one of several returns must not depend on which it is.
            lengths = [new] if old is None else [old, new]
            saved = {"before": folder, "after": output / "model"}
            losses = {when: _losses(load_model(path), held_out, lengths, test_tokens) for when, path in saved.items()}
            content = with_nulls({"model": str(folder)} | described | {"loss": losses})
            if is_first_process():
                write_json(result, content)
    return content


def continued(
    training: Mapping[str, Any], *, context_length: int, steps: int, tokens_per_step: int, learning_rate: float
) -> dict[str, Any]:
    """Return the settings of a training that goes on with another's model, at a constant learning rate.

    Args:
        training: the settings of the first one.
        context_length: in tokens.
        steps: of the optimiser.
        tokens_per_step: a multiple of ``context_length``.
        learning_rate: constant, without warm-up.
    """
    replaced = ("steps", "tokens", "batch_size", "warmup_steps")
    return {key: value for key, value in training.items() if key not in replaced} | {
        "context_length": context_length,
        "steps": steps,
        "tokens_per_step": tokens_per_step,
        "learning_rate": learning_rate,
        "minimum_learning_rate_ratio": 1.0,
    }


def default_output(model: Path, length: str) -> Path:
    """Return the output of an extension: in the folder of the model's training, or beside a model without one."""
    if (model / "model").is_dir():
        return model / f"extended-{length}"
    if (model.parent / "recipe.json").is_file():
        return model.parent / f"extended-{length}"
    model = model.absolute()
    return model.with_name(f"{model.name}-extended-{length}")


def _model_folder(given: Path) -> Path:
    if not given.exists():
        raise FileNotFoundError(f"model: there is no folder {given}")
    if not given.is_dir():
        raise FileNotFoundError(f"model: {given} is a file; expected the folder of a saved model, or of its training")
    for folder in (given / "model", given):
        if (folder / "config.json").is_file():
            return folder
    if (given / "recipe.json").is_file():
        raise FileNotFoundError(
            f"model: the training in {given} has not finished, there is no {given / 'model'} yet; attention-priors "
            "train goes on with it"
        )
    raise FileNotFoundError(f"model: {given} holds no model, it has no config.json")


def _length(length: str, old: int | None) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(x?)", length.strip())
    if found is None or ("." in found[1] and not found[2]):
        raise ValueError(f"length must be a number of tokens or a multiple such as 2x, got {length!r}")
    if found[2] and old is None:
        raise ValueError(f"length={length!r}: the model's training length is not known; give a number of tokens")
    new = round(float(found[1]) * (old or 1)) if found[2] else int(found[1])
    if new <= (old or 1):
        raise ValueError(f"length must be above the {old or 1} tokens that the model was trained at, got {new}")
    return new


def _recipe(before: TrainRecipe | None, model: Path, shards: Path, old: int | None, **settings: Any) -> TrainRecipe:
    """Return the recipe of an extension; ``settings`` are arguments of :func:`continued`."""
    description: dict[str, Any] = {} if before is None else before.model_dump(mode="json", exclude_defaults=True)
    running = description.get("running", {})
    pretrained: dict[str, Any] = {"pretrained": str(model)}
    if before is not None and before.model.trains_attached_alone:
        pretrained["train_only"] = "attached"
    new, given = settings["context_length"], settings["tokens_per_step"]
    tokens_per_step = given or (ROWS_PER_STEP * new if before is None else before.training.step_tokens)
    if tokens_per_step % new and given:
        raise ValueError(f"tokens_per_step must be a multiple of the new length, {new}; got {given}")
    if tokens_per_step % new:
        raise ValueError(
            f"tokens_per_step must be given: the {tokens_per_step} of the model's own training are no multiple of the "
            f"new length, {new}"
        )
    if running.get("rows_at_a_time") and old:
        # About as many tokens at a time, in whole passes.
        most, together = max(1, running["rows_at_a_time"] * old // new), tokens_per_step // new
        fitting = (rows for rows in range(most, 0, -1) if together % (rows * processes()) == 0)
        running["rows_at_a_time"] = next(fitting, None)
    content = {
        "name": f"{description.get('name', model.name)}, extended to {new}",
        "model": pretrained,
        "data": {"shards": str(shards), "order": description.get("data", {}).get("order", "shuffled")},
        "training": continued(description.get("training", {}), **settings | {"tokens_per_step": tokens_per_step}),
        "running": running,
        # Another permutation of the same tokens.
        "seed": description.get("seed", 0) + 1,
    }
    return validated(content, TrainRecipe, f"the extension of {model}")


def _losses(model: PreTrainedModel, tokens: TokenShards, lengths: list[int], count: int) -> dict[str, float]:
    """Return the mean negative log-likelihood on rows of each length, of the same tokens."""
    for_evaluation(model)
    losses = {}
    for length in lengths:
        rows = PackedRows(tokens, context_length=length)
        losses[str(length)] = mean_loss(model, (rows[i] for i in range(max(1, min(count // length, rows.blocks)))))
    return losses


Model = TypeVar("Model", bound=PreTrainedModel)


def for_evaluation(model: Model) -> Model:
    """Return the model in evaluation mode, on CUDA if there is some."""
    model.eval().to(device_named(None))  # pyright: ignore[reportArgumentType]
    return model


@torch.no_grad()
def mean_loss(model: PreTrainedModel, rows: Iterable[dict[str, Tensor]]) -> float:
    """Return the mean negative log-likelihood of a model over rows of packed documents, in nats per token.

    Args:
        model: a causal language model in evaluation mode.
        rows: of :class:`PackedRows` or :class:`TrainingMixture`; one at least.
    """
    loss = weight = 0.0
    for row in rows:
        batch: dict[str, Tensor] = {key: x.to(model.device) for key, x in collate_rows([row]).items()}
        logits = model(**packed_inputs(model, batch["input_ids"], batch["document_ids"])).logits
        sums = loss_sums(logits, batch["labels"], batch["loss_weights"])
        loss, weight = loss + float(sums[0].double().sum()), weight + float(sums[1].double().sum())
    return loss / weight
