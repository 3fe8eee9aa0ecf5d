"""Training with transformers' ``Trainer``: our optimiser and our weighted loss in it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset
from transformers import (
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_callback import PrinterCallback

from attention_priors.data import IGNORED_LABEL, collate_rows
from attention_priors.training.optimizer import make_optimizer
from attention_priors.training.settings import TrainingSettings


def weighted_loss(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """Weighted mean of the next tokens' negative log-likelihoods, in nats.

    Args:
        logits: ``(B, L, vocabulary)``.
        labels: ``(B, L)``, aligned with the inputs, ``-100`` = ignore.
        weights: ``(B, L)``, aligned with ``labels``.
    """
    targets, weights = labels[:, 1:].flatten(), weights[:, 1:].flatten()
    losses = cross_entropy(logits[:, :-1].flatten(0, 1).float(), targets, reduction="none", ignore_index=IGNORED_LABEL)
    weights = weights * (targets != IGNORED_LABEL)
    return (losses * weights).sum() / weights.sum().clamp(min=1e-9)


class PriorTrainer(Trainer):
    """A ``Trainer`` for rows of a :class:`TrainingMixture`.

    Args:
        settings: the optimiser and the schedule.
        options: as for ``Trainer``.
    """

    def __init__(self, *, settings: TrainingSettings, **options: Any) -> None:
        super().__init__(**options)
        self.settings = settings

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """RAdam is none of ``Trainer``'s names, and its groups know nothing of priors."""
        if self.optimizer is None:
            assert self.model is not None
            self.optimizer = make_optimizer(self.model if model is None else model, self.settings)
        return self.optimizer

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Mapping[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The weighted loss."""
        outputs = model(input_ids=inputs["input_ids"], document_ids=inputs["document_ids"], use_cache=False)
        loss = weighted_loss(outputs.logits, inputs["labels"], inputs["loss_weights"])
        return (loss, outputs) if return_outputs else loss


class _Report(TrainerCallback):
    """Hand every step on to a function, and end a training that has diverged."""

    def __init__(self, on_step: Callable[[int], None]) -> None:
        self.on_step = on_step

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.on_step(state.global_step)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        loss = (logs or {}).get("loss")
        if loss is not None and not math.isfinite(float(loss)):
            raise FloatingPointError(f"the loss became {loss} by step {state.global_step}; try a lower learning_rate")


def _last_checkpoint(folder: Path) -> str | None:
    """The newest checkpoint that was written to its end: the Trainer writes its state last."""
    states = folder.glob("checkpoint-*/trainer_state.json")
    newest = max(states, key=lambda path: int(path.parent.name.removeprefix("checkpoint-")), default=None)
    return None if newest is None else str(newest.parent)


def train(
    model: PreTrainedModel,
    rows: Dataset[dict[str, Tensor]],
    settings: TrainingSettings,
    folder: Path,
    *,
    seed: int,
    on_step: Callable[[int], None] = lambda step: None,
) -> list[dict[str, float]]:
    """Train a model in place; go on from the last checkpoint in ``folder`` if there is one.

    Args:
        model: a causal language model that takes ``document_ids``.
        rows: at least ``settings.steps * settings.batch_size`` rows.
        settings: how.
        folder: where checkpoints go.
        seed: of the order of rows and of dropout.
        on_step: called with the number of steps done.

    Raises:
        FloatingPointError: if the loss is no longer finite.

    Returns:
        ``[{"step": ..., "loss": ...}, ...]``, the loss a mean over the steps since the last entry.
    """
    logging_steps = max(1, settings.steps // 50)
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=settings.steps,
        per_device_train_batch_size=settings.batch_size,
        learning_rate=settings.learning_rate,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": settings.minimum_learning_rate_ratio},
        warmup_steps=settings.warmup_steps,
        max_grad_norm=settings.gradient_clip,
        save_strategy="steps",
        save_steps=settings.checkpoint_steps,
        save_total_limit=1,
        logging_steps=logging_steps,
        logging_nan_inf_filter=False,
        disable_tqdm=True,
        report_to="none",
        dataloader_pin_memory=torch.cuda.is_available(),
        remove_unused_columns=False,
        seed=seed,
        data_seed=seed,
    )
    trainer = PriorTrainer(
        settings=settings,
        model=model,
        args=arguments,
        train_dataset=rows,
        data_collator=collate_rows,
        callbacks=[_Report(on_step)],
    )
    # It would print every loss; the caller has them from us.
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=_last_checkpoint(folder))
    history = trainer.state.log_history
    return [{"step": entry["step"], "loss": entry["loss"]} for entry in history if "loss" in entry]
