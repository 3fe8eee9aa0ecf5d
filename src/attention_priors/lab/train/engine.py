"""One way to run a training, for every command: transformers' ``Trainer``, on one process or many."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments
from transformers.image_processing_base import ImageProcessingMixin
from transformers.trainer_callback import PrinterCallback

from attention_priors._io import remove
from attention_priors.lab.data import collate_rows
from attention_priors.lab.train.checkpoints import move_into_place
from attention_priors.lab.train.recipe import OptimizationSettings, RunningSettings
from attention_priors.lab.train.trainer import Observer, PriorTrainer, SealedTrainer, StepReport, shard_priors

Rows = Dataset[dict[str, Tensor]]


@dataclass(frozen=True)
class Validation:
    """Rows whose loss is measured while a model trains."""

    rows: Rows
    every: int
    """Steps from one measurement to the next; the last step always has one."""


@dataclass(frozen=True)
class Trained:
    """The end of a training."""

    trainer: SealedTrainer
    history: list[dict[str, float]]
    """``{"step": ..., "loss": ...}``, the loss a mean over the steps since the last entry."""
    validation: list[dict[str, float]]
    """``{"step": ..., "loss": ...}``, the loss on the validation rows."""

    def save(self, folder: Path, processor: PreTrainedTokenizerBase | ImageProcessingMixin | None) -> None:
        """Write the model, and the processor of its inputs if it has one: the whole folder, or nothing.

        Every process calls it, the first one writes.
        """
        unfinished = folder.with_name(f"{folder.name}.unfinished")
        is_first, wait = self.trainer.args.should_save, self.trainer.accelerator.wait_for_everyone
        if is_first:
            remove(unfinished)
        wait()
        self.trainer.save_model(str(unfinished))
        if is_first:
            if processor is not None:
                processor.save_pretrained(unfinished)
            # The trainer's own note of its arguments is a pickle, which nobody needs.
            (unfinished / "training_args.bin").unlink(missing_ok=True)
            move_into_place(unfinished, folder)
        wait()


def processes() -> int:
    """Return the number of processes that torchrun or accelerate launch has started; 1 without them."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first_process() -> bool:
    """Whether this process writes the files that all share."""
    return int(os.environ.get("RANK", "0")) == 0


def check_machinery(settings: OptimizationSettings, running: RunningSettings) -> None:
    """Make sure that this machine can run a training as it is described.

    Raises:
        ValueError: it cannot; the message names the setting.
    """
    running.accumulation(settings, processes())
    if running.fsdp is not None:
        # Priors are sharded apart, by FSDP2 and before accelerate comes: see shard_priors().
        for name, needed in (("version", 2), ("cpu_ram_efficient_loading", False)):
            if running.fsdp.get(name, needed) != needed:
                raise ValueError(f"running.fsdp: {name} must be {needed}, got {running.fsdp[name]!r}")
        if not torch.cuda.is_available():
            raise ValueError(
                "running.fsdp needs CUDA devices: on a CPU accelerate would keep whole copies in every process (DDP) "
                "without a word"
            )
        if processes() == 1:
            raise ValueError("running.fsdp needs several processes: start them with torchrun or accelerate launch")
    missing = [name for name in running.report_to if find_spec(name) is None]
    if missing:
        raise ValueError(f"running.report_to: {', '.join(missing)} is not installed; pip install {' '.join(missing)}")
    if settings.precision == "float16" and not torch.cuda.is_available():
        raise ValueError("training.precision float16 needs a CUDA device; bfloat16 and float32 do not")


def train(
    model: PreTrainedModel,
    rows: Dataset[Any],
    settings: OptimizationSettings,
    folder: Path,
    *,
    seed: int,
    running: RunningSettings | None = None,
    shuffle: bool = True,
    validation: Validation | None = None,
    run_name: str | None = None,
    observer: Observer | None = None,
    trainer_class: type[SealedTrainer] = PriorTrainer,
    collate: Callable[[Any], Any] = collate_rows,
) -> Trained:
    """Train a model in place; go on from the last complete checkpoint in ``folder`` if there is one.

    Args:
        model: a causal language model that takes ``document_ids``, or ``position_ids`` of packed rows; with another
            ``trainer_class``, a model that it can train.
        rows: at least ``settings.total_rows`` rows.
        settings: :class:`TrainingSettings`; with another ``trainer_class``, other settings of the optimiser.
        folder: of the checkpoints.
        seed: of the order of rows and of dropout.
        running: the machinery.
        shuffle: whether rows are read in an order drawn from the seed, or in their own.
        validation: rows whose loss is measured on the way.
        run_name: name in TensorBoard and Weights & Biases.
        observer: progress callbacks.
        trainer_class: knows the loss.
        collate: makes a batch of rows.

    Raises:
        ValueError: before any work, if the model, the machine or the sizes do not go together.
        FloatingPointError: the loss is not finite.
        CheckpointError: a checkpoint cannot be written.
    """
    running, observer = running or RunningSettings(), observer or Observer()
    trainer_class.check_model(model, settings)
    check_machinery(settings, running)
    rows_at_a_time, passes = running.accumulation(settings, processes())
    # Every parameter that trains has a gradient in every step.
    ddp = {"find_unused_parameters": False} | running.ddp
    options: dict[str, Any] = {f"ddp_{name}": value for name, value in ddp.items()}
    if running.fsdp is not None:
        options |= {"fsdp": True, "fsdp_config": dict(running.fsdp)}
    if validation is not None:
        options |= {"eval_strategy": "steps", "eval_steps": validation.every}
    arguments = TrainingArguments(
        output_dir=str(folder),
        run_name=run_name,
        max_steps=settings.total_steps,
        per_device_train_batch_size=rows_at_a_time,
        per_device_eval_batch_size=rows_at_a_time,
        gradient_accumulation_steps=passes,
        learning_rate=settings.learning_rate,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": settings.minimum_learning_rate_ratio},
        warmup_steps=settings.warmup_steps,
        max_grad_norm=settings.gradient_clip,
        bf16=settings.precision == "bfloat16",
        fp16=settings.precision == "float16",
        activation_checkpointing=running.activation_checkpointing or None,
        # Otherwise bfloat16 would be refused, and of several processes each would train a model of its own.
        use_cpu=not torch.accelerator.is_available(),
        save_strategy="steps",
        save_steps=settings.checkpoint_steps,
        logging_steps=running.log_every or max(1, settings.total_steps // 50),
        logging_nan_inf_filter=False,
        disable_tqdm=True,
        report_to=list(running.report_to) or "none",
        dataloader_num_workers=running.workers,
        dataloader_pin_memory=torch.cuda.is_available(),
        remove_unused_columns=False,
        train_sampling_strategy="random" if shuffle else "sequential",
        seed=seed,
        data_seed=seed,
        ddp_timeout=running.ddp_timeout,
        **options,
    )
    if arguments.n_gpu > 1:
        raise ValueError(
            f"PyTorch sees {arguments.n_gpu} CUDA devices here, and one process would read that many times the rows of "
            "a step: start one process for each device (torchrun), or show it one (CUDA_VISIBLE_DEVICES=0)"
        )
    if running.fsdp is not None:
        shard_priors(model)
    trainer = trainer_class(
        settings=settings,
        checkpoints_kept=running.checkpoints_kept,
        model=model,
        args=arguments,
        train_dataset=rows,
        eval_dataset=None if validation is None else validation.rows,
        data_collator=collate,
    )
    if trainer.accelerator.num_processes != processes():
        raise RuntimeError(
            f"{processes()} processes were started, but accelerate runs {trainer.accelerator.num_processes}: each "
            "would train alone"
        )
    trainer.add_callback(StepReport(trainer, observer))
    # It would print every loss; the observer has them.
    trainer.remove_callback(PrinterCallback)
    trainer.resume(observer.on_message)
    history = trainer.state.log_history
    return Trained(
        trainer,
        [{"step": entry["step"], "loss": entry["loss"]} for entry in history if "loss" in entry],
        [{"step": entry["step"], "loss": entry["eval_loss"]} for entry in history if "eval_loss" in entry],
    )
