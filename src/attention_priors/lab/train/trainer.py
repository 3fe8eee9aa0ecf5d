"""transformers' ``Trainer`` with a weighted loss, and optimisers with separate parameter groups for priors."""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from transformers import (
    EvalPrediction,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from attention_priors._io import read_json, write_json
from attention_priors.attention import NullKey, SSMax
from attention_priors.attention.geometry import positions_in_documents
from attention_priors.hf.loading import check_positions
from attention_priors.lab.data.packing import IGNORED_LABEL
from attention_priors.lab.train import checkpoints
from attention_priors.lab.train.checkpoints import CheckpointError
from attention_priors.lab.train.recipe import OptimizationSettings, TrainingSettings
from attention_priors.priors import Prior

_RUNNING_LOSS = "running_loss.json"


@dataclass(frozen=True)
class Observer:
    """Progress callbacks of a run, called in the first process only."""

    on_message: Callable[[str], None] = lambda message: None
    """Callback with a message to the user."""
    on_tokens: Callable[[str, int], None] = lambda part, tokens: None
    """Callback with a part of the data and its number of prepared tokens."""
    on_step: Callable[[int], None] = lambda step: None
    """Callback with the number of finished steps."""
    on_log: Callable[[Mapping[str, float]], None] = lambda logs: None
    """Callback with logged numbers by name."""


def weighted_loss(logits: Tensor, labels: Tensor, weights: Tensor, total: Tensor | None = None) -> Tensor:
    """Return the weighted mean negative log-likelihood of the next tokens, in nats.

    Args:
        logits: Logits, shape ``(B, L, vocabulary)``.
        labels: Token ids, shape ``(B, L)``, unshifted. The label ``-100`` is ignored.
        weights: Loss weight of each label, shape ``(B, L)``.
        total: Divisor of the weighted sum. The default is the sum of the weights.
    """
    sums, own = loss_sums(logits, labels, weights)
    return sums.sum() / (own.sum().clamp(min=1e-9) if total is None else total)


def loss_sums(logits: Tensor, labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weighted losses and their weights, both of shape ``(B * (L-1),)``."""
    targets, weights = labels[:, 1:].flatten(), weights[:, 1:].flatten()
    losses = cross_entropy(logits[:, :-1].flatten(0, 1).float(), targets, reduction="none", ignore_index=IGNORED_LABEL)
    weights = weights * (targets != IGNORED_LABEL)
    return losses * weights, weights


def packed_inputs(model: nn.Module, input_ids: Tensor, document_ids: Tensor) -> dict[str, Any]:
    """Return the keyword arguments of a model for a batch of packed rows.

    Our models take ``document_ids``. Other models take ``position_ids`` that restart at 0 with each document; without a
    cache, transformers derives the mask of packed documents from these positions.

    Args:
        model: Causal language model, not wrapped.
        input_ids: Token ids, shape ``(B, L)``.
        document_ids: Document of each token, shape ``(B, L)``.

    Raises:
        ValueError: The model takes neither argument.
    """
    takes = inspect.signature(model.forward).parameters
    inputs = {"input_ids": input_ids, "use_cache": False}
    if "document_ids" in takes:
        return inputs | {"document_ids": document_ids}
    if "position_ids" in takes:
        return inputs | {"position_ids": positions_in_documents(document_ids)}
    raise ValueError(
        f"{type(model).__name__} takes neither document_ids nor position_ids, so packed documents cannot be separated"
    )


@torch.no_grad()
def check_documents_apart(model: nn.Module) -> None:
    """Check that packed documents do not attend to earlier documents.

    Raises:
        ValueError: They do in this model, or the model does not support packed documents.
    """
    device, config = next(model.parameters()).device, getattr(model, "config", None)
    document_ids = torch.tensor([[0] * 4 + [1] * 4], device=device)
    # The first documents of the two rows differ in any vocabulary of at least two tokens.
    rows = torch.tensor([[[1, 2, 3, 4, 5, 6, 7, 8]], [[4, 1, 1, 2, 5, 6, 7, 8]]], device=device)
    was_training = model.training
    model.eval()
    one, other = (
        model(**packed_inputs(model, ids % getattr(config, "vocab_size", 9), document_ids)).logits[:, 4:].float()
        for ids in rows
    )
    model.train(was_training)
    if float((one - other).abs().max()) > 1e-5 * float(one.abs().max()):
        attention = getattr(config, "_attn_implementation", "unknown")
        raise ValueError(
            f"{type(model).__name__} with attention implementation {attention!r} lets a packed document see the one "
            "before it; use an attention implementation that supports packed rows"
        )


class SealedTrainer(Trainer):
    """A ``Trainer`` with this package's optimisers and atomic checkpoints.

    Args:
        settings: Settings of the optimiser and the schedule.
        checkpoints_kept: Number of checkpoints to keep; older checkpoints are deleted.
        options: Other arguments of ``Trainer``.
    """

    def __init__(self, *, settings: OptimizationSettings, checkpoints_kept: int = 2, **options: Any) -> None:
        super().__init__(**options)
        # A model's own loss is a mean, so the loss of several passes and processes is the mean of their losses.
        self.model_accepts_loss_kwargs = False
        self.settings = settings
        self.checkpoints_kept = checkpoints_kept
        self._folder, self._staging = Path(str(self.args.output_dir)), None
        # Sum of losses since the last logged step, and the number of that step.
        self._loss_sum = torch.zeros((), device=self.args.device)
        self._loss_from = 0

    @classmethod
    def check_model(cls, model: PreTrainedModel, settings: OptimizationSettings) -> None:
        """Check, before any work, that this class can train a model.

        Raises:
            ValueError: The class cannot train the model.
        """

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Make this package's optimiser, because ``Trainer`` has neither RAdam nor parameter groups for priors."""
        if self.optimizer is None:
            assert self.model is not None
            self.optimizer = make_optimizer(self.model if model is None else model, self.settings)
        return self.optimizer

    # ---- the mean loss

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Run the step of ``Trainer``, and add its loss to the running sum."""
        loss = super().training_step(model, inputs, num_items_in_batch)
        self._loss_sum = self._loss_sum + loss
        return loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log with a mean loss that includes the steps before an interruption."""
        if "loss" in logs:
            logs["loss"] = self._mean_over_processes(self._loss_sum) / (self.state.global_step - self._loss_from)
            self._loss_sum, self._loss_from = torch.zeros_like(self._loss_sum), self.state.global_step
        super().log(logs, start_time)

    def _mean_over_processes(self, value: Tensor) -> float:
        return float(torch.as_tensor(self.accelerator.gather(value.unsqueeze(0))).mean())

    # ---- checkpoints

    def check_loss(self) -> None:
        """Stop training with a non-finite loss before it writes a checkpoint.

        Raises:
            FloatingPointError: The loss is not finite; the message names the last checkpoint.
        """
        if not bool(self._loss_sum.isfinite()):
            self._diverged(f"the loss became {float(self._loss_sum)}")

    def _diverged(self, what: str) -> None:
        raise FloatingPointError(
            f"{what} at step {self.state.global_step}; {self._last_good()}; try a lower learning_rate"
        )

    def _last_good(self) -> str:
        steps = checkpoints.checkpoint_steps(self._folder)
        return (
            f"the last good checkpoint is {checkpoints.checkpoint_folder(self._folder, steps[-1])}"
            if steps
            else "no checkpoint had been written"
        )

    def _get_output_dir(self, trial: Any) -> str:
        """Return the staging folder while a checkpoint is written."""
        return super()._get_output_dir(trial) if self._staging is None else str(self._staging)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save a checkpoint to the staging folder, seal it, and move it into place."""
        assert self.model is not None
        # The part of each parameter that this process holds.
        held = {name: p.to_local() if isinstance(p, DTensor) else p for name, p in self.model.named_parameters()}
        broken = [name for name, part in held.items() if not bool(part.detach().isfinite().all())]
        # All processes must raise together, because the others would wait forever for a process that stops.
        if self._mean_over_processes(torch.tensor(float(bool(broken)), device=self.args.device)):
            self._diverged(f"weights are not finite ({', '.join(broken[:3]) or 'in another process'})")
        running = {"sum": self._mean_over_processes(self._loss_sum), "since_step": self._loss_from}
        staging, step = checkpoints.staging_folder(self._folder), self.state.global_step
        try:
            if self.args.should_save:
                checkpoints.sweep(self._folder)
                staging.mkdir()
            self.accelerator.wait_for_everyone()
            self._staging = staging
            super()._save_checkpoint(model, trial)
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                staged = checkpoints.checkpoint_folder(staging, step)
                write_json(staged / _RUNNING_LOSS, running)
                checkpoints.seal(staged, checkpoints.checkpoint_folder(self._folder, step))
                staging.rmdir()
                checkpoints.keep_last(self._folder, self.checkpoints_kept)
        # On a full disk, libraries raise an OSError, a RuntimeError (torch.save) or an error class of their own.
        except Exception as error:
            shutil.rmtree(staging, ignore_errors=True)
            raise CheckpointError(
                f"the checkpoint of step {step} could not be written to {self._folder}: {error}; {self._last_good()}"
            ) from error
        finally:
            self._staging = None
        self.accelerator.wait_for_everyone()

    def resume(self, on_message: Callable[[str], None]) -> None:
        """Train from the last complete checkpoint, or from the start. Incomplete checkpoints are renamed."""
        if self.args.should_save:
            checkpoints.sweep(self._folder)
            checkpoints.last_complete(self._folder, on_message)
        self.accelerator.wait_for_everyone()
        steps = checkpoints.checkpoint_steps(self._folder)
        if not steps:
            self.train()
            return
        checkpoint = checkpoints.checkpoint_folder(self._folder, steps[-1])
        on_message(f"Resuming from {checkpoint}")
        running = read_json(checkpoint / _RUNNING_LOSS)
        self._loss_sum = torch.tensor(running["sum"], device=self.args.device)
        self._loss_from = running["since_step"]
        self.train(resume_from_checkpoint=str(checkpoint))


class PriorTrainer(SealedTrainer):
    """A ``Trainer`` for packed rows of :class:`TrainingMixture` or :class:`PackedRows`.

    The loss of a step is the weighted mean over all of its rows. The mean does not depend on the numbers of processes
    and accumulated passes.

    Args:
        options: Arguments of :class:`SealedTrainer`.
    """

    @classmethod
    def check_model(cls, model: PreTrainedModel, settings: OptimizationSettings) -> None:
        """Check that a model has enough positions and separates packed documents.

        Raises:
            ValueError: The model does not.
        """
        assert isinstance(settings, TrainingSettings)
        check_positions(model, settings.context_length)
        check_documents_apart(model)

    def __init__(self, **options: Any) -> None:
        super().__init__(compute_metrics=_mean_of_sums, **options)
        self._bare: nn.Module = options["model"]
        # The loss is already divided by the weights of the whole step, so `Trainer` must not divide by the passes.
        self.model_accepts_loss_kwargs = True
        self.loss_is_scaled_for_ga = True

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor | int | None]:
        """Return the batches of a step, and the sum of their loss weights over all processes."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        total = torch.zeros((), device=device)
        for batch in batches:
            labels, weights = batch["labels"][:, 1:], batch["loss_weights"][:, 1:]
            total = total + (weights * (labels != IGNORED_LABEL)).sum().to(device)
        if self.accelerator.num_processes > 1:
            total = torch.as_tensor(self.accelerator.gather(total.unsqueeze(0))).sum()
        return batches, total.clamp(min=1e-9)

    def _logits(self, model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
        return model(**packed_inputs(self._bare, inputs["input_ids"], inputs["document_ids"])).logits

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Mapping[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Return the weighted loss; in an optimiser step, the share of this process and pass."""
        logits = self._logits(model, inputs)
        total = None if num_items_in_batch is None else torch.as_tensor(num_items_in_batch, device=logits.device)
        loss = weighted_loss(logits, inputs["labels"], inputs["loss_weights"], total)
        if total is not None:
            # Gradients are averaged over processes, but the shares of the loss must be summed.
            loss = loss * self.accelerator.num_processes
        return (loss, {"logits": logits}) if return_outputs else loss

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return each row's weighted sum of losses and sum of weights, so that the mean is independent of batching."""
        inputs = self._prepare_inputs(inputs)
        rows = len(inputs["input_ids"])
        with torch.no_grad(), self.compute_loss_context_manager():
            sums = loss_sums(self._logits(model, inputs), inputs["labels"], inputs["loss_weights"])
        return None, torch.stack([x.double().view(rows, -1).sum(-1) for x in sums], -1), sums[0].new_zeros(rows)


def _mean_of_sums(prediction: EvalPrediction) -> dict[str, float]:
    sums, weights = torch.as_tensor(prediction.predictions).sum(0)
    return {"loss": float(sums / weights)}


class StepReport(TrainerCallback):
    """Callback that reports every step and log, and stops training with a non-finite loss.

    Args:
        trainer: Trainer of the run.
        observer: Progress callbacks of the run.
    """

    def __init__(self, trainer: SealedTrainer, observer: Observer) -> None:
        self.trainer, self.observer = trainer, observer

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Report a step, before the trainer logs and saves."""
        self.trainer.check_loss()
        if state.is_world_process_zero:
            self.observer.on_step(state.global_step)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Report logged numbers."""
        if state.is_world_process_zero and kwargs["logs"]:
            self.observer.on_log(kwargs["logs"])


def parameter_groups(model: nn.Module, settings: OptimizationSettings) -> list[dict[str, Any]]:
    """Return the trainable parameters in four groups: matrices, vectors, priors with null keys, logit scales.

    Only matrices have weight decay. The learning rates of priors and logit scales are multiplied by their own factors.
    Schedules that scale the rate of each group keep these ratios.

    Args:
        model: Any model, with priors in any of its modules.
        settings: Settings such as :class:`TrainingSettings`, of which ``learning_rate``, ``weight_decay`` and the two
            learning-rate multipliers are used.

    Returns:
        Parameter groups for any PyTorch optimiser, with ``params``, ``name``, ``lr`` and ``weight_decay``.
    """
    special: dict[nn.Parameter, str] = {}
    for module in model.modules():
        if isinstance(module, Prior | NullKey | SSMax):
            special |= dict.fromkeys(module.parameters(), "logit_scale" if isinstance(module, SSMax) else "prior")
    kinds = {  # multiplier of the learning rate, and weight decay
        "matrices": (1.0, settings.weight_decay),
        "vectors": (1.0, 0.0),
        "prior": (settings.prior_learning_rate_multiplier, 0.0),
        "logit_scale": (settings.logit_scale_learning_rate_multiplier, 0.0),
    }
    groups: dict[str, list[nn.Parameter]] = {name: [] for name in kinds}
    for parameter in model.parameters():
        if parameter.requires_grad:
            groups[special.get(parameter, "matrices" if parameter.dim() > 1 else "vectors")].append(parameter)
    return [
        {"params": groups[name], "name": name, "lr": settings.learning_rate * multiplier, "weight_decay": decay}
        for name, (multiplier, decay) in kinds.items()
        if groups[name]
    ]


def make_optimizer(model: nn.Module, settings: OptimizationSettings) -> torch.optim.Optimizer:
    """Return AdamW, or RAdam with decoupled weight decay, over :func:`parameter_groups`.

    Args:
        model: Any model, with priors in any of its modules.
        settings: Settings of :func:`parameter_groups`, and ``optimizer``, ``betas`` and ``epsilon``.
    """
    groups = parameter_groups(model, settings)
    if settings.optimizer == "radam":
        return torch.optim.RAdam(groups, betas=settings.betas, eps=settings.epsilon, decoupled_weight_decay=True)
    return torch.optim.AdamW(groups, betas=settings.betas, eps=settings.epsilon, fused=True)


def shard_priors(model: nn.Module, mesh: DeviceMesh | None = None) -> None:
    """Shard all priors, null keys and logit scales of a model as a separate FSDP2 group in float32.

    Call this function before ``fully_shard`` (or accelerate) shards the rest of the model. Otherwise,
    ``MixedPrecisionPolicy(param_dtype=torch.bfloat16)`` would cast these parameters with the matrices around them, and
    FSDP2 would refuse to mix them with a model in bfloat16. Their gradients are also reduced in float32.

    The group is gathered when the forward pass of ``model`` begins, and kept until its backward pass ends. By default,
    FSDP2 gathers parameters only when their module is called, but priors use them at other times, for tables and
    lanes. The group has only a few numbers per head.

    Args:
        model: The whole model, not sharded yet.
        mesh: Device mesh of ``fully_shard``; all processes by default.

    Raises:
        ValueError: ``model`` or a prior is sharded already.
    """
    parts: list[nn.Module] = [module for module in model.modules() if isinstance(module, Prior | NullKey | SSMax)]
    inner = {child for part in parts for child in part.modules() if child is not part}
    parts = [part for part in parts if part not in inner]
    for name, module in (("model", model), *((type(part).__name__, part) for part in parts)):
        if isinstance(module, FSDPModule):
            raise ValueError(f"{name} is sharded already; call shard_priors() before fully_shard()")
    if not parts:
        return
    fully_shard(parts, mesh=mesh, reshard_after_forward=False)
    group: Any = parts[0]

    def gather(module: nn.Module, inputs: Any) -> None:
        # After a forward pass without a backward pass, the gathered values may be older than the last optimiser step.
        group.reshard()
        group.unshard()

    # This hook must run after the root's hook of fully_shard().
    model.register_forward_pre_hook(gather)
