"""Rotary positions (RoPE) and their scalings for longer contexts."""

from __future__ import annotations

import torch
from torch import Tensor

from attention_priors.checks import check_above, check_positive_integers
from attention_priors.encodings.base import Encoding


class Rotary(Encoding):
    """RoPE: rotation of pairs of query and key coordinates by ``i · ω_r``, so that ``q·k`` depends on ``i - j``.

    ``ω_r = base^(-2r / head_dim)``; coordinates ``r`` and ``r + head_dim/2`` form a pair, as in Llama.

    Source: Su et al., "RoFormer" (2021); frequencies and scalings are those of transformers.

    Args:
        head_dim: width of a head, ``D``, even.
        base: ratio of the longest to the shortest period, before scaling.
        scaling: None, ``linear``, ``ntk`` or ``yarn``. ``linear`` (position interpolation) divides all frequencies by
            ``factor``. ``ntk`` (NTK-aware) multiplies the base by ``factor^(D/(D-2))``.
        factor: ratio of the target length to the original length. At least 1.
        original_length: training length in tokens; for YaRN, which requires it.
        base_multiplier: factor on the base, for use after training with SSMax (BAM used 50 to 100).
    """

    name = "rotary"
    scalings = ("linear", "ntk", "yarn")

    def __init__(
        self,
        head_dim: int,
        base: float = 10000.0,
        scaling: str | None = None,
        factor: float = 1.0,
        original_length: int | None = None,
        base_multiplier: float = 1.0,
    ) -> None:
        super().__init__()
        if not isinstance(head_dim, int) or head_dim < 2 or head_dim % 2:
            raise ValueError(f"head_dim must be a positive even integer for rotary positions, got {head_dim!r}")
        if scaling not in (None, *self.scalings):
            raise ValueError(f"scaling must be None or one of {', '.join(self.scalings)}; got {scaling!r}")
        check_above(1, base=base)
        check_above(0, base_multiplier=base_multiplier, factor=factor)
        if not factor >= 1:
            raise ValueError(f"factor must be at least 1, got {factor!r}")
        if scaling is None and factor != 1:
            raise ValueError(f"factor={factor!r} needs a scaling, one of {', '.join(self.scalings)}")
        if scaling == "ntk" and head_dim < 4:
            raise ValueError(f"scaling='ntk' needs head_dim of at least 4, got {head_dim}")
        if (scaling == "yarn") != (original_length is not None):
            raise ValueError(
                "original_length is required for scaling='yarn' and must be None otherwise; got "
                f"original_length={original_length!r} with scaling={scaling!r}"
            )
        if original_length is not None:
            check_positive_integers(original_length=original_length)
        self.head_dim = head_dim
        self.base = float(base)
        self.scaling = scaling
        self.factor = float(factor)
        self.original_length = original_length
        self.base_multiplier = float(base_multiplier)
        self._frequencies: tuple[Tensor, float] | None = None

    def frequencies(self) -> tuple[Tensor, float]:
        """Return ``ω`` in radians per token, ``(D/2,)`` in float32, and YaRN's factor on cosines and sines.

        Frequencies are computed at first use, because the constructor may run on the meta device. Under a dispatch mode
        such as FakeTensorMode, frequencies are computed anew: cached tensors and fake tensors must not mix.
        """
        if torch._C._len_torch_dispatch_stack() > 0:
            return self._frequencies_on_cpu()
        if self._frequencies is None:
            self._frequencies = self._frequencies_on_cpu()
        return self._frequencies

    # The effect of torch.compiler.assume_constant_result, whose import of the compiler takes a second.
    frequencies._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]

    def _frequencies_on_cpu(self) -> tuple[Tensor, float]:
        with torch.device("cpu"):
            return self._compute_frequencies()

    def _compute_frequencies(self) -> tuple[Tensor, float]:
        base = self.base * self.base_multiplier
        if self.scaling is None:
            exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float32) / self.head_dim
            return 1.0 / base**exponents, 1.0
        # Import transformers lazily: the core requires torch alone.
        from transformers import LlamaConfig
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        length = self.original_length or 1
        parameters = {"rope_type": self.scaling, "rope_theta": base, "factor": self.factor}
        if self.scaling == "ntk":
            # "dynamic" with factor 1 at `factor` times the length is the static NTK-aware formula.
            parameters |= {"rope_type": "dynamic", "factor": 1.0}
        if self.scaling == "yarn":
            parameters["original_max_position_embeddings"] = length
        config = LlamaConfig(
            head_dim=self.head_dim,
            hidden_size=self.head_dim,
            num_attention_heads=1,
            max_position_embeddings=int(length * self.factor) if self.scaling == "yarn" else length,
            rope_parameters=parameters,  # pyright: ignore[reportArgumentType]
        )
        compute = ROPE_INIT_FUNCTIONS[parameters["rope_type"]]
        reached = torch.tensor(self.factor, dtype=torch.float32) if self.scaling == "ntk" else None
        return compute(config, torch.device("cpu"), reached)  # pyright: ignore[reportArgumentType]

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate queries or keys.

        Args:
            x: queries or keys, ``(B, H, L, D)``.
            positions: integers ``(L,)`` or ``(B, L)``, in tokens.

        Returns:
            ``x`` rotated, in the dtype of ``x``. Phases are computed in float64.
        """
        if x.shape[-1] != self.head_dim:
            raise ValueError(f"x must have head dimension {self.head_dim}, got shape {tuple(x.shape)}")
        frequencies, magnitude = self.frequencies()
        phase = positions.double().unsqueeze(-1) * frequencies.to(x.device, torch.float64)
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        cos = (phase.cos() * magnitude).to(wide).unsqueeze(-3)
        sin = (phase.sin() * magnitude).to(wide).unsqueeze(-3)
        first, second = x.to(wide).chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
