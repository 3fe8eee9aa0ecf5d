"""Context extension: a little more training, at a longer context."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

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
from attention_priors.lab.train.engine import is_first_process, processes
from attention_priors.lab.train.packed import packed_inputs
from attention_priors.lab.train.recipe import TrainRecipe
from attention_priors.lab.train.run import IDENTITY, Observer, run_recipe, writing
from attention_priors.lab.train.trainer import loss_sums

ROWS_PER_STEP = 16
"""Of a model whose recipe is not known."""


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
    """Train a saved model further at a longer context, and measure what it changes.

    What ``attention-priors train`` has left beside the model says the rest: its data, its optimiser, its tokens a step,
    and whether only what is attached to it learns.
    Interrupted at any point, the same call goes on from there.

    Source: BAM, Appendix C (256 more steps at twice the context).

    Args:
        model: the folder of any causal language model; of one of ours, or the folder of its training.
        output: where everything goes, as in :func:`run_recipe`, and ``extension.json``.
        length: tokens (``1024``), or a multiple of what it was trained at (``2x``).
        steps: of the optimiser.
        data: prepared tokens, in place of those that the model was trained on.
        learning_rate: constant; the one that the model's own training ended with by default.
        tokens_per_step: as in the model's own training by default.
        test_tokens: how many of the held-out tokens the losses are measured on.
        observer: is told how far it is.

    Returns:
        The content of ``extension.json``: mean losses in nats per token on held-out rows of the old and of the new
        length, before and after; a loss that is not finite is None.

    Raises:
        RecipeError: before any work, if ``output`` holds another run or is being written by another call.
        ValueError: something that is needed is not known, or does not go together.
        FileNotFoundError: there is no such model, or its training has not finished.
        OSError: something cannot be read or written.
    """
    observer = observer or Observer()
    if learning_rate is not None:
        check_above(0, learning_rate=learning_rate)
    folder = _model_folder(model).absolute()  # `.` has no parent
    known = folder.parent / "recipe.json"
    before = validated(read_json(known), TrainRecipe, str(known)) if known.is_file() else None
    shards = _shards(folder, data, before)
    config = load_config(folder)
    old = before.training.context_length if before else getattr(config, "max_position_embeddings", None)
    new = _length(length, old)
    tokenizer = pretrained_tokenizer(folder)
    if tokenizer_fingerprint(tokenizer) != tokenizer_fingerprint(prepared_tokenizer(shards)):
        raise ValueError(f"the tokens in {shards} were made with another tokenizer than that in {folder}")
    if learning_rate is None:
        if before is None:
            raise ValueError(f"learning_rate must be given: {folder} has no recipe.json beside it")
        learning_rate = before.training.final_learning_rate
    recipe = _recipe(before, folder, shards, old, new, steps, learning_rate, tokens_per_step)

    held_out = TokenShards(shards, "held_out")
    if len(held_out) < new:
        raise ValueError(f"{shards} holds out {len(held_out)} tokens: expected at least one row of the {new} of length")
    lengths = [new] if old is None else [old, new]
    run_recipe(recipe, output, observer)
    with writing(output):
        described = {
            "from": old,
            "to": new,
            "steps": steps,
            "test_tokens": test_tokens,
            # With it, what another training has left in the folder is not taken for this one's.
            "identity": checksum(output / IDENTITY),
        }
        result = output / "extension.json"
        content: dict[str, Any] = read_json(result) if result.exists() else {}
        if {key: content.get(key) for key in described} != described:
            # Every process measures: what one of several returns must not depend on which it is.
            losses = {
                when: _losses(load_model(saved), held_out, lengths, test_tokens)
                for when, saved in (("before", folder), ("after", output / "model"))
            }
            content = with_nulls({"model": str(folder)} | described | {"loss": losses})
            if is_first_process():
                write_json(result, content)
    return content


def continued(
    training: Mapping[str, Any], *, context_length: int, steps: int, tokens_per_step: int, learning_rate: float
) -> dict[str, Any]:
    """The settings of a training that goes on with another's model, at a constant learning rate and without warm-up.

    Args:
        training: the settings of the first one.
        context_length: in tokens.
        steps: of the optimiser.
        tokens_per_step: a multiple of ``context_length``.
        learning_rate: what it is constant at.
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
    """Where an extension goes: into the folder of the model's training, or beside a model without one."""
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


def _shards(folder: Path, data: Path | None, before: TrainRecipe | None) -> Path:
    if data is not None:
        return data
    if before is None:
        raise ValueError(f"data must be given: {folder} has no recipe.json beside it that says what it was trained on")
    return folder.parent / "data" if before.data.shards is None else Path(before.data.shards)


def _length(length: str, old: int | None) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)x|(\d+)", length.strip())
    if found is None:
        raise ValueError(f"length must be a number of tokens or a multiple such as 2x, got {length!r}")
    if found[2] is not None:
        new = int(found[2])
    elif old is None:
        raise ValueError(f"length={length!r}: what the model was trained at is not known; give a number of tokens")
    else:
        new = round(float(found[1]) * old)
    if new <= (old or 1):
        raise ValueError(f"length must be above the {old or 1} tokens that the model was trained at, got {new}")
    return new


def _recipe(
    before: TrainRecipe | None,
    folder: Path,
    shards: Path,
    old: int | None,
    new: int,
    steps: int,
    learning_rate: float,
    tokens_per_step: int | None,
) -> TrainRecipe:
    description: dict[str, Any] = {} if before is None else before.model_dump(mode="json", exclude_defaults=True)
    training = description.get("training", {})
    running = description.get("running", {})
    pretrained: dict[str, Any] = {"pretrained": str(folder)}
    if before is not None and before.model.trains_attached_alone:
        pretrained["train_only"] = "attached"
    if tokens_per_step is None and before is not None and before.training.step_tokens % new:
        raise ValueError(
            f"tokens_per_step must be given: the {before.training.step_tokens} of the model's own training are no "
            f"multiple of the new length, {new}"
        )
    if tokens_per_step is None:
        tokens_per_step = ROWS_PER_STEP * new if before is None else before.training.step_tokens
    elif tokens_per_step % new:
        raise ValueError(f"tokens_per_step must be a multiple of the new length, {new}; got {tokens_per_step}")
    if running.get("rows_at_a_time") and old:
        # About as many tokens at a time, in whole passes.
        most, together = max(1, running["rows_at_a_time"] * old // new), tokens_per_step // new
        fitting = (rows for rows in range(most, 0, -1) if together % (rows * processes()) == 0)
        running["rows_at_a_time"] = next(fitting, None)
    return validated(
        {
            "name": f"{description.get('name', folder.name)}, extended to {new}",
            "model": pretrained,
            "data": {"shards": str(shards), "order": description.get("data", {}).get("order", "shuffled")},
            "training": continued(
                training,
                context_length=new,
                steps=steps,
                tokens_per_step=tokens_per_step,
                learning_rate=learning_rate,
            ),
            "running": running,
            # Another permutation of the same tokens.
            "seed": description.get("seed", 0) + 1,
        },
        TrainRecipe,
        f"the extension of {folder}",
    )


def _losses(model: PreTrainedModel, tokens: TokenShards, lengths: list[int], count: int) -> dict[str, float]:
    """Mean negative log-likelihood on rows of each length, of the same tokens."""
    model.eval()
    if torch.cuda.is_available():
        model.to(torch.device("cuda"))  # pyright: ignore[reportArgumentType]
    losses = {}
    for length in lengths:
        rows = PackedRows(tokens, context_length=length)
        losses[str(length)] = mean_loss(model, (rows[i] for i in range(max(1, min(count // length, rows.blocks)))))
    return losses


@torch.no_grad()
def mean_loss(model: PreTrainedModel, rows: Iterable[dict[str, Tensor]]) -> float:
    """Mean negative log-likelihood of a model over rows of packed documents, in nats per token.

    Args:
        model: a causal language model in evaluation mode.
        rows: as :class:`PackedRows` and :class:`TrainingMixture` give them; one at least.
    """
    total = torch.zeros(2, dtype=torch.float64)
    for row in rows:
        batch: dict[str, Tensor] = {key: x.to(model.device) for key, x in collate_rows([row]).items()}
        logits = model(**packed_inputs(model, batch["input_ids"], batch["document_ids"])).logits
        sums, weights = loss_sums(logits, batch["labels"], batch["loss_weights"])
        total += torch.stack([sums.double().sum(), weights.double().sum()]).cpu()
    return float(total[0] / total[1])
