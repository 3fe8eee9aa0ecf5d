"""What a run keeps of how its model was made: ``training.json``."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from pathlib import Path

from transformers import PreTrainedModel

from attention_priors.files import write_json
from attention_priors.machine import processor, versions


def write_training(
    folder: Path,
    model: PreTrainedModel,
    software: Iterable[str],
    *,
    steps: int,
    seconds: float,
    history: list[dict[str, float]],
) -> None:
    """Write it.

    Args:
        folder: the run's.
        model: as it was trained.
        software: the libraries that the run's numbers depend on, whose versions are recorded.
        steps: of the training.
        seconds: that it took.
        history: its losses, as :class:`~attention_priors.training.Trained` has them.
    """
    write_json(
        folder / "training.json",
        {
            "train_seconds": round(seconds, 1),
            "steps": steps,
            "history": history,
            "parameters": model.num_parameters(),
            "prior_parameters": _positional_parameters(model),
            "versions": versions(software),
            "machine": {"platform": platform.platform(), "processor": processor(), "cores": str(os.cpu_count())},
        },
    )


def _positional_parameters(model: PreTrainedModel) -> int:
    """How many trained numbers priors and logit scales have."""
    return sum(
        parameter.numel()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and ("prior." in name or "logit_scale." in name)
    )
