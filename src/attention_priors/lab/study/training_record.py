"""What a run keeps of how its model was made: ``training.json``."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from transformers import PreTrainedModel

from attention_priors._io import write_json
from attention_priors.lab.study.environment import SOFTWARE, environment


def write_training(
    folder: Path,
    model: PreTrainedModel,
    *,
    steps: int,
    seconds: float,
    history: list[dict[str, float]],
    software: Iterable[str] = SOFTWARE,
) -> None:
    """Write it.

    Args:
        folder: the run's.
        model: as it was trained.
        steps: of the training.
        seconds: that it took.
        history: its losses, as :class:`~attention_priors.lab.train.Trained` has them.
        software: the libraries that the run's numbers depend on, whose versions are recorded.
    """
    write_json(
        folder / "training.json",
        {
            "train_seconds": round(seconds, 1),
            "steps": steps,
            "history": history,
            "parameters": model.num_parameters(),
            "prior_parameters": _positional_parameters(model),
            **environment(software),
        },
    )


def _positional_parameters(model: PreTrainedModel) -> int:
    """How many trained numbers priors and logit scales have."""
    return sum(
        parameter.numel()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and ("prior." in name or "logit_scale." in name)
    )
