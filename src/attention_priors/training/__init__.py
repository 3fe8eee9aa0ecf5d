"""Training short: the optimiser's groups, the weighted loss, transformers' ``Trainer``."""

from attention_priors.training.checkpoints import CheckpointError
from attention_priors.training.engine import Trained, Validation, train
from attention_priors.training.optimizer import make_optimizer, parameter_groups
from attention_priors.training.settings import RunningSettings, TrainingSettings
from attention_priors.training.trainer import PriorTrainer, weighted_loss

__all__ = [
    "CheckpointError",
    "PriorTrainer",
    "RunningSettings",
    "Trained",
    "TrainingSettings",
    "Validation",
    "make_optimizer",
    "parameter_groups",
    "train",
    "weighted_loss",
]
