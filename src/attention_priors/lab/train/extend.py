"""Context extension: a short training run at a longer context."""

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
from attention_priors.lab.data.packing import collate_rows
from attention_priors.lab.data.preparation import prepared_tokenizer
from attention_priors.lab.data.shards import PackedRows, TokenShards
from attention_priors.lab.data.tokenizer import pretrained_tokenizer, tokenizer_fingerprint
from attention_priors.lab.machine import device_named
from attention_priors.lab.strict_yaml import validated
from attention_priors.lab.train.engine import Observer, is_first_process, processes
from attention_priors.lab.train.recipe import TrainRecipe
from attention_priors.lab.train.run import IDENTITY, run_recipe, writing
from attention_priors.lab.train.trainer import loss_sums, packed_inputs

ROWS_PER_STEP = 16
"""Number of rows per step for a model without a recipe."""


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
    """Train a saved model further at a longer context, and measure the loss before and after.

    The model's training recipe, in the folder of ``attention-priors train``, determines the data, the optimiser, the
    tokens per step, and whether only attached priors learn. An interrupted extension resumes when called again.

    Source: BAM, Appendix C (256 more steps at twice the context).

    Args:
        model: Folder of a causal language model, or of a training run.
        output: Folder of the results. It gets the files of :func:`run_recipe` and ``extension.json``.
        length: New length in tokens (``1024``) or as a multiple of the training length (``2x``).
        steps: Number of optimiser steps.
        data: Folder of prepared tokens. The default is the model's training tokens.
        learning_rate: Constant learning rate. The default is the final rate of the model's training.
        tokens_per_step: Tokens per optimiser step. The default is the value of the model's training.
        test_tokens: Number of held-out tokens on which the losses are measured.
        observer: Progress callbacks.

    Returns:
        The content of ``extension.json``: mean losses in nats per token on held-out rows of the old and the new
        length, before and after. A non-finite loss is None.

    Raises:
        RecipeError: Before any work, if ``output`` holds another run or another call is writing to it.
        ValueError: A setting is invalid or unknown, or settings are incompatible.
        FileNotFoundError: The model does not exist, or its training has not finished.
        OSError: A file cannot be read or written.
    """
    observer = observer or Observer()
    if learning_rate is not None:
        check_above(0, learning_rate=learning_rate)
    folder = _model_folder(model).absolute()  # `.` has no parent
    known = folder.parent / "recipe.json"
    # Saved files must not import modules: the user passes the plugins to this command again.
    before = validated(read_json(known) | {"plugins": []}, TrainRecipe, str(known)) if known.is_file() else None
    if data is None and before is None:
        raise ValueError(f"data is missing: no recipe.json beside {folder} names the training data; pass data")
    shards = data or Path((before and before.data.shards) or folder.parent / "data")
    old = before.training.context_length if before else getattr(load_config(folder), "max_position_embeddings", None)
    new = _length(length, old)
    tokenizer = pretrained_tokenizer(folder)
    if tokenizer_fingerprint(tokenizer) != tokenizer_fingerprint(prepared_tokenizer(shards)):
        raise ValueError(f"the tokens in {shards} were made with another tokenizer than the tokenizer in {folder}")
    if learning_rate is None:
        if before is None:
            raise ValueError(f"learning_rate is missing: there is no recipe.json beside {folder}; pass learning_rate")
        learning_rate = before.training.final_learning_rate
    size = {"context_length": new, "steps": steps, "tokens_per_step": tokens_per_step}
    recipe = _recipe(before, folder, shards, old, learning_rate=learning_rate, **size)
    held_out = TokenShards(shards, "held_out")
    if len(held_out) < new:
        raise ValueError(f"{shards} has {len(held_out)} held-out tokens: expected at least one row of {new} tokens")
    run_recipe(recipe, output, observer)
    with writing(output):
        # The identity prevents reuse of results of another run in the folder.
        described = {"from": old, "to": new, "steps": steps, "test_tokens": test_tokens}
        described |= {"identity": checksum(output / IDENTITY)}
        result = output / "extension.json"
        content: dict[str, Any] = read_json(result) if result.exists() else {}
        if {key: content.get(key) for key in described} != described:
            # Every process measures, so that all processes return equal values.
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
    """Return the training settings of an extension, which has a constant learning rate.

    Args:
        training: Settings of the original training.
        context_length: New context length in tokens.
        steps: Number of optimiser steps.
        tokens_per_step: Tokens per optimiser step, a multiple of ``context_length``.
        learning_rate: Constant learning rate, without warm-up.
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
    """Return the default output folder: in the model's training folder, or beside a model without such a folder."""
    if (model / "model").is_dir():
        return model / f"extended-{length}"
    if (model.parent / "recipe.json").is_file():
        return model.parent / f"extended-{length}"
    model = model.absolute()
    return model.with_name(f"{model.name}-extended-{length}")


def _model_folder(given: Path) -> Path:
    if not given.exists():
        raise FileNotFoundError(f"model: folder {given} does not exist")
    if not given.is_dir():
        raise FileNotFoundError(f"model: {given} is a file; expected the folder of a saved model or of a training run")
    for folder in (given / "model", given):
        if (folder / "config.json").is_file():
            return folder
    if (given / "recipe.json").is_file():
        raise FileNotFoundError(
            f"model: the training in {given} has not finished: {given / 'model'} does not exist; run attention-priors "
            "train again to finish it"
        )
    raise FileNotFoundError(f"model: {given} holds no model: it has no config.json")


def _length(length: str, old: int | None) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(x?)", length.strip())
    if found is None or ("." in found[1] and not found[2]):
        raise ValueError(f"length must be a number of tokens or a multiple such as 2x, got {length!r}")
    if found[2] and old is None:
        raise ValueError(f"length={length!r}: the model's training length is unknown; pass a number of tokens")
    new = round(float(found[1]) * (old or 1)) if found[2] else int(found[1])
    if new <= (old or 1):
        raise ValueError(f"length must be above the model's training length, {old or 1} tokens; got {new}")
    return new


def _recipe(before: TrainRecipe | None, model: Path, shards: Path, old: int | None, **settings: Any) -> TrainRecipe:
    """Return the recipe of an extension; ``settings`` are keyword arguments of :func:`continued`."""
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
            f"tokens_per_step is missing: {tokens_per_step} tokens, the value of the model's training, are not a "
            f"multiple of the new length, {new}; pass tokens_per_step"
        )
    if running.get("rows_at_a_time") and old:
        # Keep the number of tokens per pass about constant, with a whole number of passes per step.
        most, together = max(1, running["rows_at_a_time"] * old // new), tokens_per_step // new
        fitting = (rows for rows in range(most, 0, -1) if together % (rows * processes()) == 0)
        running["rows_at_a_time"] = next(fitting, None)
    content = {
        "name": f"{description.get('name', model.name)}, extended to {new}",
        "model": pretrained,
        "data": {"shards": str(shards), "order": description.get("data", {}).get("order", "shuffled")},
        "training": continued(description.get("training", {}), **settings | {"tokens_per_step": tokens_per_step}),
        "running": running,
        # Another seed gives another permutation of the tokens.
        "seed": description.get("seed", 0) + 1,
    }
    return validated(content, TrainRecipe, f"the extension of {model}")


def _losses(model: PreTrainedModel, tokens: TokenShards, lengths: list[int], count: int) -> dict[str, float]:
    """Return the mean negative log-likelihood on rows of each length, cut from the first ``count`` tokens."""
    for_evaluation(model)
    losses = {}
    for length in lengths:
        rows = PackedRows(tokens, context_length=length)
        losses[str(length)] = mean_loss(model, (rows[i] for i in range(max(1, min(count // length, rows.blocks)))))
    return losses


Model = TypeVar("Model", bound=PreTrainedModel)


def for_evaluation(model: Model) -> Model:
    """Return the model in evaluation mode, on CUDA if available."""
    model.eval().to(device_named(None))  # pyright: ignore[reportArgumentType]
    return model


@torch.no_grad()
def mean_loss(model: PreTrainedModel, rows: Iterable[dict[str, Tensor]]) -> float:
    """Return the mean negative log-likelihood of a model over rows of packed documents, in nats per token.

    Args:
        model: Causal language model in evaluation mode.
        rows: At least one row of :class:`PackedRows` or :class:`TrainingMixture`.
    """
    loss = weight = 0.0
    for row in rows:
        batch: dict[str, Tensor] = {key: x.to(model.device) for key, x in collate_rows([row]).items()}
        logits = model(**packed_inputs(model, batch["input_ids"], batch["document_ids"])).logits
        sums = loss_sums(logits, batch["labels"], batch["loss_weights"])
        loss, weight = loss + float(sums[0].double().sum()), weight + float(sums[1].double().sum())
    return loss / weight
