"""Training recipes, and training runs on transformers' ``Trainer``."""

from attention_priors.lab.train.engine import Observer, is_first_process
from attention_priors.lab.train.extend import default_output, extend
from attention_priors.lab.train.recipe import TrainingSettings, load_train_recipe
from attention_priors.lab.train.run import run_recipe
from attention_priors.lab.train.trainer import make_optimizer, parameter_groups, shard_priors

__all__ = [
    "Observer",
    "TrainingSettings",
    "default_output",
    "extend",
    "is_first_process",
    "load_train_recipe",
    "make_optimizer",
    "parameter_groups",
    "run_recipe",
    "shard_priors",
]
