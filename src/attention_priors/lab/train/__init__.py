"""Training recipes, and training runs on transformers' ``Trainer``."""

from attention_priors.lab.train.checkpoints import CheckpointError
from attention_priors.lab.train.engine import Observer, Trained, is_first_process, train
from attention_priors.lab.train.extend import continued, default_output, extend, mean_loss
from attention_priors.lab.train.recipe import (
    AttachSettings,
    DecoderSettings,
    DecoderSizes,
    ModelSettings,
    OptimizationSettings,
    PositionSettings,
    ProcessSettings,
    RunningSettings,
    TrainingSettings,
    TrainRecipe,
    load_train_recipe,
    make_model,
)
from attention_priors.lab.train.run import numbers_of_parameters, prepare_data, run_recipe
from attention_priors.lab.train.trainer import (
    PriorTrainer,
    SealedTrainer,
    make_optimizer,
    parameter_groups,
    shard_priors,
    weighted_loss,
)

__all__ = [
    "AttachSettings",
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
    "continued",
    "default_output",
    "extend",
    "is_first_process",
    "load_train_recipe",
    "make_model",
    "make_optimizer",
    "mean_loss",
    "numbers_of_parameters",
    "parameter_groups",
    "prepare_data",
    "run_recipe",
    "shard_priors",
    "train",
    "weighted_loss",
]
