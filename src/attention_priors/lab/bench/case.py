"""One case of a benchmark: sizes, dtype, device, and the tensors that all contenders are given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

Pass = Literal["forward", "forward+backward", "decode"]
PASSES: tuple[Pass, ...] = get_args(Pass)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Case:
    """Causal self-attention over ``length`` tokens, or one query against ``length`` cached keys (decode)."""

    passing: Pass
    length: int
    batch: int
    heads: int
    head_dim: int
    dtype: torch.dtype
    device: str
    seed: int

    @property
    def backward(self) -> bool:
        """Whether gradients are computed."""
        return self.passing == "forward+backward"

    @property
    def num_queries(self) -> int:
        """One in decoding, else as many as keys."""
        return 1 if self.passing == "decode" else self.length

    @property
    def matrix_bytes(self) -> int:
        """The size of one matrix of queries by keys for every head."""
        return self.batch * self.bias_bytes

    @property
    def bias_bytes(self) -> int:
        """The size of one matrix of queries by keys per head, shared by the batch."""
        return self.heads * self.num_queries * self.length * self.dtype.itemsize


@dataclass(frozen=True)
class Inputs:
    """Queries ``(B, H, Lq, D)``, keys and values ``(B, H, L, D)``: independent, of unit variance."""

    query: Tensor
    key: Tensor
    value: Tensor


def make_inputs(case: Case, head_dim: int | None = None) -> Inputs:
    """The tensors of a case, the same for the same seed; with gradients where the pass has a backward half.

    Args:
        case: the case.
        head_dim: another head dimension than the case's.
    """
    generator = torch.Generator().manual_seed(case.seed)
    width = case.head_dim if head_dim is None else head_dim

    def draw(length: int) -> Tensor:
        numbers = torch.randn(case.batch, case.heads, length, width, generator=generator)
        return numbers.to(case.device, case.dtype).requires_grad_(case.backward)

    return Inputs(draw(case.num_queries), draw(case.length), draw(case.length))
