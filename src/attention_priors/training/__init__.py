"""Training short: the optimiser's groups, the weighted loss, transformers' ``Trainer``."""

from attention_priors.training.optimizer import make_optimizer, parameter_groups
from attention_priors.training.settings import TrainingSettings
from attention_priors.training.trainer import PriorTrainer, train, weighted_loss

__all__ = ["PriorTrainer", "TrainingSettings", "make_optimizer", "parameter_groups", "train", "weighted_loss"]
