"""Training: one way to describe it, and one to run it, on transformers' ``Trainer``."""

from attention_priors.training.checkpoints import CheckpointError
from attention_priors.training.engine import Trained, Validation, fit, is_first_process, train
from attention_priors.training.extend import continued, default_output, extend, mean_loss
from attention_priors.training.model import (
    DecoderSettings,
    DecoderSizes,
    ModelSettings,
    PositionSettings,
    make_model,
)
from attention_priors.training.optimizer import make_optimizer, parameter_groups
from attention_priors.training.recipe import TrainRecipe, load_train_recipe
from attention_priors.training.run import Observer, prepare_data, run_recipe
from attention_priors.training.settings import OptimizationSettings, ProcessSettings, RunningSettings, TrainingSettings
from attention_priors.training.sharding import shard_priors
from attention_priors.training.trainer import PriorTrainer, SealedTrainer, weighted_loss

__all__ = [
    "CheckpointError",
    "DecoderSettings",
    "DecoderSizes",
    "ModelSettings",
    "Observer",
    "OptimizationSettings",
    "PositionSettings",
    "PriorTrainer",
    "ProcessSettings",
    "RunningSettings",
    "SealedTrainer",
    "TrainRecipe",
    "Trained",
    "TrainingSettings",
    "Validation",
    "continued",
    "default_output",
    "extend",
    "fit",
    "is_first_process",
    "load_train_recipe",
    "make_model",
    "make_optimizer",
    "mean_loss",
    "parameter_groups",
    "prepare_data",
    "run_recipe",
    "shard_priors",
    "train",
    "weighted_loss",
]
