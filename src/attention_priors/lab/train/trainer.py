"""transformers' ``Trainer`` with our optimisers, in which priors stand in groups of their own, and our loss."""

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
from attention_priors.lab.data import IGNORED_LABEL
from attention_priors.lab.train import checkpoints
from attention_priors.lab.train.checkpoints import CheckpointError
from attention_priors.lab.train.recipe import OptimizationSettings, TrainingSettings
from attention_priors.priors import Prior

_RUNNING_LOSS = "running_loss.json"


@dataclass(frozen=True)
class Observer:
    """Progress callbacks of a run. The first of several processes alone calls them."""

    on_message: Callable[[str], None] = lambda message: None
    """Called with messages to the user."""
    on_tokens: Callable[[str, int], None] = lambda part, tokens: None
    """Called with a part of the data and the number of its prepared tokens."""
    on_step: Callable[[int], None] = lambda step: None
    """Called with the number of finished steps."""
    on_log: Callable[[Mapping[str, float]], None] = lambda logs: None
    """Called with logged numbers."""


def weighted_loss(logits: Tensor, labels: Tensor, weights: Tensor, total: Tensor | None = None) -> Tensor:
    """Return the weighted mean of the next tokens' negative log-likelihoods, in nats.

    Args:
        logits: ``(B, L, vocabulary)``.
        labels: ``(B, L)``, aligned with the inputs, ``-100`` = ignore.
        weights: ``(B, L)``, aligned with ``labels``.
        total: divisor of the sum; the sum of the weights by default.
    """
    sums, own = loss_sums(logits, labels, weights)
    return sums.sum() / (own.sum().clamp(min=1e-9) if total is None else total)


def loss_sums(logits: Tensor, labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return weighted losses ``(B * (L-1),)`` and their weights."""
    targets, weights = labels[:, 1:].flatten(), weights[:, 1:].flatten()
    losses = cross_entropy(logits[:, :-1].flatten(0, 1).float(), targets, reduction="none", ignore_index=IGNORED_LABEL)
    weights = weights * (targets != IGNORED_LABEL)
    return losses * weights, weights


def packed_inputs(model: nn.Module, input_ids: Tensor, document_ids: Tensor) -> dict[str, Any]:
    """Return the arguments of a model for a batch of packed rows.

    Our models take ``document_ids``. Others take ``position_ids`` that start again at 0 with each document. Without a
    cache, transformers' masks read these positions as packing.

    Args:
        model: a causal language model, not wrapped.
        input_ids: ``(B, L)``.
        document_ids: ``(B, L)``.

    Raises:
        ValueError: the model takes neither.
    """
    takes = inspect.signature(model.forward).parameters
    inputs = {"input_ids": input_ids, "use_cache": False}
    if "document_ids" in takes:
        return inputs | {"document_ids": document_ids}
    if "position_ids" in takes:
        return inputs | {"position_ids": positions_in_documents(document_ids)}
    raise ValueError(
        f"{type(model).__name__} takes neither document_ids nor position_ids: packed documents cannot be kept apart"
    )


@torch.no_grad()
def check_documents_apart(model: nn.Module) -> None:
    """Make sure that a packed document does not see the one before it.

    Raises:
        ValueError: it does in this model, or the model takes no packed documents.
    """
    device, config = next(model.parameters()).device, getattr(model, "config", None)
    document_ids = torch.tensor([[0] * 4 + [1] * 4], device=device)
    # The first documents differ in any vocabulary of two tokens at least.
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
            "before it: it cannot be trained on packed rows"
        )


class SealedTrainer(Trainer):
    """A ``Trainer`` with this package's optimiser, whose checkpoints are complete or absent.

    Args:
        settings: the optimiser and the schedule.
        checkpoints_kept: older ones are deleted.
        options: as for ``Trainer``.
    """

    def __init__(self, *, settings: OptimizationSettings, checkpoints_kept: int = 2, **options: Any) -> None:
        super().__init__(**options)
        # A model's own loss is a mean: several passes and processes have the mean of theirs.
        self.model_accepts_loss_kwargs = False
        self.settings = settings
        self.checkpoints_kept = checkpoints_kept
        self._folder, self._staging = Path(str(self.args.output_dir)), None
        # The sum of the steps' losses since the last one that was logged, and the step that was logged.
        self._loss_sum = torch.zeros((), device=self.args.device)
        self._loss_from = 0

    @classmethod
    def check_model(cls, model: PreTrainedModel, settings: OptimizationSettings) -> None:
        """Make sure, before any work, that a model can be trained.

        Raises:
            ValueError: it cannot.
        """

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Make our optimiser: ``Trainer`` knows neither RAdam nor groups for priors."""
        if self.optimizer is None:
            assert self.model is not None
            self.optimizer = make_optimizer(self.model if model is None else model, self.settings)
        return self.optimizer

    # ---- the mean loss

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Train as ``Trainer`` does, and add up the loss."""
        loss = super().training_step(model, inputs, num_items_in_batch)
        self._loss_sum = self._loss_sum + loss
        return loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log as ``Trainer`` does, but with a mean loss that counts steps before an interruption too."""
        if "loss" in logs:
            logs["loss"] = self._mean_over_processes(self._loss_sum) / (self.state.global_step - self._loss_from)
            self._loss_sum, self._loss_from = torch.zeros_like(self._loss_sum), self.state.global_step
        super().log(logs, start_time)

    def _mean_over_processes(self, value: Tensor) -> float:
        return float(torch.as_tensor(self.accelerator.gather(value.unsqueeze(0))).mean())

    # ---- checkpoints

    def check_loss(self) -> None:
        """End a training that has diverged, before it can write a checkpoint.

        Raises:
            FloatingPointError: the loss is not finite; the message names the last checkpoint.
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
            f"the last good state is {checkpoints.checkpoint_folder(self._folder, steps[-1])}"
            if steps
            else "no checkpoint had been written"
        )

    def _get_output_dir(self, trial: Any) -> str:
        """Return the folder in which checkpoints are written until they are complete."""
        return super()._get_output_dir(trial) if self._staging is None else str(self._staging)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save as ``Trainer`` does, but elsewhere; then seal the checkpoint and move it into place."""
        assert self.model is not None
        # The part of each parameter that this process holds.
        held = {name: p.to_local() if isinstance(p, DTensor) else p for name, p in self.model.named_parameters()}
        broken = [name for name, part in held.items() if not bool(part.detach().isfinite().all())]
        # Every process must come to the same end: the others would wait for the one that stops.
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
        # For a full disk, libraries raise an OSError, a RuntimeError (torch.save) or their own error (safetensors).
        except Exception as error:
            shutil.rmtree(staging, ignore_errors=True)
            raise CheckpointError(
                f"the checkpoint of step {step} could not be written to {self._folder}: {error}; {self._last_good()}"
            ) from error
        finally:
            self._staging = None
        self.accelerator.wait_for_everyone()

    def resume(self, on_message: Callable[[str], None]) -> None:
        """Train from the last checkpoint if there is one, else from the start. Incomplete ones get another name."""
        if self.args.should_save:
            checkpoints.sweep(self._folder)
            checkpoints.last_complete(self._folder, on_message)
        self.accelerator.wait_for_everyone()
        steps = checkpoints.checkpoint_steps(self._folder)
        if not steps:
            self.train()
            return
        checkpoint = checkpoints.checkpoint_folder(self._folder, steps[-1])
        on_message(f"Going on from {checkpoint}")
        running = read_json(checkpoint / _RUNNING_LOSS)
        self._loss_sum = torch.tensor(running["sum"], device=self.args.device)
        self._loss_from = running["since_step"]
        self.train(resume_from_checkpoint=str(checkpoint))


class PriorTrainer(SealedTrainer):
    """A ``Trainer`` for packed rows, such as :class:`TrainingMixture` and :class:`PackedRows` give.

    The loss of a step is the weighted mean over all of its rows, however they are shared out among processes and
    accumulated passes.

    Args:
        options: as for :class:`SealedTrainer`.
    """

    @classmethod
    def check_model(cls, model: PreTrainedModel, settings: OptimizationSettings) -> None:
        """Make sure that a model has enough positions and keeps packed documents apart."""
        assert isinstance(settings, TrainingSettings)
        check_positions(model, settings.context_length)
        check_documents_apart(model)

    def __init__(self, **options: Any) -> None:
        super().__init__(compute_metrics=_mean_of_sums, **options)
        self._bare: nn.Module = options["model"]
        # Our loss is a sum over the whole step's weights: it must not be divided by the passes again.
        self.model_accepts_loss_kwargs = True
        self.loss_is_scaled_for_ga = True

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor | int | None]:
        """Return a step's batches, and the sum of all of their weights over all processes."""
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
        """Return the weighted loss; in a step of the optimiser, the part of this process and this pass."""
        logits = self._logits(model, inputs)
        total = None if num_items_in_batch is None else torch.as_tensor(num_items_in_batch, device=logits.device)
        loss = weighted_loss(logits, inputs["labels"], inputs["loss_weights"], total)
        if total is not None:
            # Gradients are averaged over the processes; our parts are to be added up.
            loss = loss * self.accelerator.num_processes
        return (loss, {"logits": logits}) if return_outputs else loss

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return each row's weighted sum of losses and its weights: the mean does not depend on the batches."""
        inputs = self._prepare_inputs(inputs)
        rows = len(inputs["input_ids"])
        with torch.no_grad(), self.compute_loss_context_manager():
            sums = loss_sums(self._logits(model, inputs), inputs["labels"], inputs["loss_weights"])
        return None, torch.stack([x.double().view(rows, -1).sum(-1) for x in sums], -1), sums[0].new_zeros(rows)


def _mean_of_sums(prediction: EvalPrediction) -> dict[str, float]:
    sums, weights = torch.as_tensor(prediction.predictions).sum(0)
    return {"loss": float(sums / weights)}


class StepReport(TrainerCallback):
    """Report every step and log, and end a training that has diverged.

    Args:
        trainer: the trainer.
        observer: progress callbacks of the run.
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

    Weight decay pulls matrices alone. Priors and logit scales have multiples of the learning rate;
    schedules that scale each group's own rate keep the ratios.

    Args:
        model: any, with priors anywhere in it.
        settings: :class:`TrainingSettings`, of which ``learning_rate``, ``weight_decay`` and the multipliers of the
            learning rate are used.

    Returns:
        For any optimiser of PyTorch: ``params``, ``name``, ``lr`` and ``weight_decay`` of each group.
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
        model: any, with priors anywhere in it.
        settings: as for :func:`parameter_groups`, with ``optimizer``, ``betas`` and ``epsilon``.
    """
    groups = parameter_groups(model, settings)
    if settings.optimizer == "radam":
        return torch.optim.RAdam(groups, betas=settings.betas, eps=settings.epsilon, decoupled_weight_decay=True)
    return torch.optim.AdamW(groups, betas=settings.betas, eps=settings.epsilon)


def shard_priors(model: nn.Module, mesh: DeviceMesh | None = None) -> None:
    """Shard all priors and logit scales of a model as one FSDP2 group of their own, in float32.

    Call it before ``fully_shard`` (or accelerate) shards the rest. ``MixedPrecisionPolicy(param_dtype=torch.bfloat16)``
    would otherwise cast their parameters together with the matrices around them, and where the model itself is in
    bfloat16, FSDP2 would refuse two dtypes in one group. Gradients are reduced in float32 too.

    The group is gathered once, when the forward pass of ``model`` begins, and kept until its backward pass ends. FSDP2
    would gather parameters only where a module is called, but priors make tables and lanes at any time. They are a few
    numbers per head.

    Args:
        model: the whole model, as it is called; not itself sharded yet.
        mesh: as for ``fully_shard``; all processes by default.

    Raises:
        ValueError: ``model``, or a prior, is sharded already.
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
        # A forward pass without a backward pass may leave values from before the last step of the optimiser.
        group.reshard()
        group.unshard()

    # The hook of fully_shard() for the root comes first, and must have run.
    model.register_forward_pre_hook(gather)
