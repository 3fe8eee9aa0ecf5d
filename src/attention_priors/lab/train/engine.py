"""Training loop of all commands: transformers' ``Trainer`` on one or many processes."""

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
from attention_priors.lab.data.packing import collate_rows
from attention_priors.lab.train.checkpoints import move_into_place
from attention_priors.lab.train.recipe import OptimizationSettings, RunningSettings, TrainingSettings
from attention_priors.lab.train.trainer import Observer, PriorTrainer, SealedTrainer, StepReport, shard_priors
from attention_priors.models.card import TRAINING_KEY

Rows = Dataset[dict[str, Tensor]]


@dataclass(frozen=True)
class Validation:
    """Validation rows, whose loss is measured during training."""

    rows: Rows
    every: int
    """Number of steps between measurements. The last step always has a measurement."""


@dataclass(frozen=True)
class Trained:
    """Trained model and its losses."""

    trainer: SealedTrainer
    history: list[dict[str, float]]
    """Training losses as ``{"step": ..., "loss": ...}``, each a mean over the steps since the last entry."""
    validation: list[dict[str, float]]
    """Validation losses as ``{"step": ..., "loss": ...}``."""

    def save(self, folder: Path, processor: PreTrainedTokenizerBase | ImageProcessingMixin | None) -> None:
        """Save the model and its tokenizer or image processor, atomically.

        Every process must call this method; the first process writes.

        Args:
            folder: Folder of the model.
            processor: Tokenizer or image processor; None to save the model alone.
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
            # `Trainer` pickles its arguments into this file, which is not needed to load the model.
            (unfinished / "training_args.bin").unlink(missing_ok=True)
            move_into_place(unfinished, folder)
        wait()


def processes() -> int:
    """Return the number of processes that torchrun or accelerate launch started; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first_process() -> bool:
    """Return whether this process is the first, which writes the shared files."""
    return int(os.environ.get("RANK", "0")) == 0


def check_machinery(settings: OptimizationSettings, running: RunningSettings) -> None:
    """Check that this machine supports the settings of a training run.

    Raises:
        ValueError: A setting is not supported; the message names the setting.
    """
    running.accumulation(settings, processes())
    if running.fsdp is not None:
        # shard_priors() shards priors as a separate FSDP2 group, before accelerate shards the model.
        for name, needed in (("version", 2), ("cpu_ram_efficient_loading", False)):
            if running.fsdp.get(name, needed) != needed:
                raise ValueError(f"running.fsdp: {name} must be {needed}, got {running.fsdp[name]!r}")
        if not torch.cuda.is_available():
            raise ValueError(
                "running.fsdp needs CUDA devices; on a CPU, accelerate would silently use DDP, with a full copy of the "
                "model in every process"
            )
        if processes() == 1:
            raise ValueError("running.fsdp needs several processes; start them with torchrun or accelerate launch")
    missing = [name for name in running.report_to if find_spec(name) is None]
    if missing:
        raise ValueError(f"running.report_to: {', '.join(missing)} is not installed; pip install {' '.join(missing)}")
    if settings.precision == "float16" and not torch.cuda.is_available():
        raise ValueError("training.precision float16 needs a CUDA device; use bfloat16 or float32 on a CPU")


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
    """Train a model in place, from the last complete checkpoint in ``folder`` if there is one.

    Args:
        model: Causal language model that takes ``document_ids``, or ``position_ids`` of packed rows. With another
            ``trainer_class``, a model that the class can train.
        rows: Dataset of at least ``settings.total_rows`` rows.
        settings: :class:`TrainingSettings`. Another ``trainer_class`` may take other optimiser settings.
        folder: Folder of the checkpoints.
        seed: Seed of the row order and of dropout.
        running: Processes, checkpoints and logging.
        shuffle: Whether to shuffle the rows with the seed. Otherwise, they are read in order.
        validation: Rows whose loss is measured during training.
        run_name: Name on the model card, and in TensorBoard and Weights & Biases. Without a name, the card says nothing
            about the training.
        observer: Progress callbacks.
        trainer_class: Trainer, which defines the loss.
        collate: Function that makes a batch from rows.

    Raises:
        ValueError: Before any work, if the model, the machine and the settings are incompatible.
        FloatingPointError: The loss is not finite.
        CheckpointError: A checkpoint cannot be written.
    """
    running, observer = running or RunningSettings(), observer or Observer()
    trainer_class.check_model(model, settings)
    check_machinery(settings, running)
    rows_at_a_time, passes = running.accumulation(settings, processes())
    # Every trainable parameter has a gradient in every step.
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
        # Without `use_cpu`, transformers refuses bfloat16, and several processes would train separate models.
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
            f"PyTorch sees {arguments.n_gpu} CUDA devices, for which one process would multiply the rows of a step; "
            "start one process per device (torchrun), or hide the others (CUDA_VISIBLE_DEVICES=0)"
        )
    if run_name is not None:
        steps = f"{settings.total_steps} of {settings.step_in_words}"
        known = {"recipe": run_name, "steps": steps, "learning rate": settings.learning_rate, "seed": seed}
        if isinstance(settings, TrainingSettings):
            known["context length"] = f"{settings.context_length} tokens"
        setattr(model.config, TRAINING_KEY, known)
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
            f"{processes()} processes were started, but accelerate runs {trainer.accelerator.num_processes}; each "
            "process would train a separate model"
        )
    trainer.add_callback(StepReport(trainer, observer))
    # The observer reports the losses that this callback would print.
    trainer.remove_callback(PrinterCallback)
    trainer.resume(observer.on_message)
    history = trainer.state.log_history
    return Trained(
        trainer,
        [{"step": entry["step"], "loss": entry["loss"]} for entry in history if "loss" in entry],
        [{"step": entry["step"], "loss": entry["eval_loss"]} for entry in history if "eval_loss" in entry],
    )
