"""Small cases, and ways with scripted behaviour."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attention_priors.lab.bench.run import BenchRecipe
from attention_priors.lab.bench.way import Case, Inputs, Pass, Prepared, Way, prepared
from attention_priors.lab.bench.ways import LINE_WAYS, WAYS


def case(passing: Pass = "forward", length: int = 33, heads: int = 2, head_dim: int = 24, batch: int = 1) -> Case:
    return Case(passing, length, batch, heads, head_dim, torch.float32, "cpu", seed=5)


def recipe(**changes: Any) -> BenchRecipe:
    settings: dict[str, Any] = {"threads": 1, "heads": 2, "head_dim": 24, "repetitions": 3}
    part = {"lengths": (16,), "passes": ("forward",), "ways": ("attend-alibi",)}
    part |= {key: changes.pop(key) for key in list(changes) if key in part}
    return BenchRecipe.model_validate(settings | changes | {"parts": [part]})


def made(name: str, compute: Callable[[Inputs], Tensor], **options: Any) -> Way:
    """Return a way whose expected output is plain attention."""

    def prepare(case: Case, inputs: Inputs) -> Prepared:
        return prepared(case, inputs, lambda: compute(inputs))

    return Way(name, prepare, "others", f"made for a test: {name}", "nothing", **options)


def plainly(inputs: Inputs) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(inputs.query, inputs.key, inputs.value, is_causal=True)


__all__ = ["LINE_WAYS", "WAYS", "case", "made", "plainly", "recipe"]
