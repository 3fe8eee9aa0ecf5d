"""A checkpoint in the layout of BAM's authors, with random weights, and a small implementation of their forward pass.

The forward pass reads the state dict itself and shares no code with the library. It follows BAM, section 2 and Appendix
C, with SSMax over content and prior, or over content only.
"""

import math
from typing import Any

import torch
from torch import Tensor

EPSILON = 1e-5


def random_checkpoint(
    *,
    heads: int = 4,
    kv_heads: int = 4,
    width: int = 32,
    layers: int = 2,
    vocabulary: int = 40,
    intermediate: int = 48,
    shared: bool | None = True,
    ssmax: bool = True,
    names: tuple[str, str, str] = ("shape", "scale", "loc"),
    seed: int = 0,
) -> dict[str, Tensor]:
    """Return random weights. ``shared`` selects one prior for all layers, one per layer, or (None) no prior."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) / math.sqrt(columns) * 2

    def prior() -> dict[str, Tensor]:
        shape, scale, location = torch.randn(3, 1, heads, 1, 1, generator=generator).clone().unbind()
        return dict(zip(names, (shape, scale - 1, 0.5 * location), strict=True))

    head_dim = width // heads
    weights = {"tok_embeddings.weight": torch.randn(vocabulary, width, generator=generator)}
    for layer in range(layers):
        lead = f"layers.{layer}."
        weights |= {
            f"{lead}attention.wq.weight": matrix(heads * head_dim, width),
            f"{lead}attention.wk.weight": matrix(kv_heads * head_dim, width),
            f"{lead}attention.wv.weight": matrix(kv_heads * head_dim, width),
            f"{lead}attention.wo.weight": matrix(width, heads * head_dim),
            f"{lead}feed_forward.w1.weight": matrix(intermediate, width),
            f"{lead}feed_forward.w2.weight": matrix(width, intermediate),
            f"{lead}feed_forward.w3.weight": matrix(intermediate, width),
            f"{lead}attention_norm.weight": 1 + 0.2 * torch.randn(width, generator=generator),
            f"{lead}ffn_norm.weight": 1 + 0.2 * torch.randn(width, generator=generator),
        }
        if ssmax:
            weights[f"{lead}attention.seq_scale"] = 0.3 + 0.3 * torch.randn(1, heads, 1, 1, generator=generator)
        if shared is False:
            weights |= {f"{lead}attention.prior.{name}": value for name, value in prior().items()}
    if shared:
        weights |= {f"prior.{name}": value for name, value in prior().items()}
    return weights | {
        "norm.weight": 1 + 0.2 * torch.randn(width, generator=generator),
        "output.weight": matrix(vocabulary, width),
    }


def alibi_slopes(heads: int) -> list[float]:
    """Return the slopes of the ALiBi paper: ``2^(-8h/H)``, and between powers of two every second slope of the next
    power.
    """
    power = 2 ** math.floor(math.log2(heads))
    fine = [2 ** (-4 * h / power) for h in range(1, 2 * power + 1, 2)]
    return [2 ** (-8 * h / power) for h in range(1, power + 1)] + fine[: heads - power]


def forward(
    weights: dict[str, Tensor],
    ids: Tensor,
    heads: int,
    documents: Tensor | None = None,
    eps: float = 1e-5,
    *,
    scales_prior: bool = True,
    slopes: list[float] | None = None,
) -> Tensor:
    """Compute logits ``(B, L, vocabulary)`` in float64. ``slopes`` are ALiBi's, in nats per token."""
    w = {name: tensor.double() for name, tensor in weights.items()}
    batch, length = ids.shape
    place = torch.arange(length)
    allowed = (place <= place[:, None]).expand(batch, 1, length, length)
    if documents is not None:
        allowed = allowed & (documents[:, None, :, None] == documents[:, None, None, :])
    n = allowed.sum(-1, keepdim=True)

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * w[f"{name}.weight"]

    def log_prior(lead: str) -> Any:
        found: list[Any] = [
            next((w[f"{lead}prior.{name}"] for name in either if f"{lead}prior.{name}" in w), None)
            for either in (("shape", "theta_beta"), ("scale", "theta_alpha"), ("loc", "theta_mu"))
        ]
        if found[0] is None:
            return 0.0
        shape, scale, location = (x.reshape(1, heads, 1, 1) for x in found)
        behind = (place - place[:, None]).double() - (location.exp() - (-location).exp())
        return -scale.exp() * (behind.abs() + EPSILON) ** shape

    x = w["tok_embeddings.weight"][ids]
    layer = 0
    while f"layers.{layer}.attention.wq.weight" in w:
        lead = f"layers.{layer}."
        h = norm(x, f"{lead}attention_norm")
        q, k, v = (
            (h @ w[f"{lead}attention.{name}.weight"].T).view(
                batch, length, -1, w[f"{lead}attention.wq.weight"].shape[0] // heads
            )
            for name in ("wq", "wk", "wv")
        )
        k, v = (t.repeat_interleave(heads // t.shape[2], dim=2) for t in (k, v))
        scores = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(q.shape[-1])
        bias = log_prior("") + log_prior(f"{lead}attention.")
        if slopes is not None:
            bias = bias - torch.tensor(slopes).double().view(heads, 1, 1) * (place - place[:, None]).abs()
        scale: Any = 1.0
        if f"{lead}attention.seq_scale" in w:
            scale = n.double().log() * w[f"{lead}attention.seq_scale"].reshape(1, heads, 1, 1)
        scores = scale * (scores + bias) if scales_prior else scale * scores + bias
        weights_of_keys = scores.masked_fill(~allowed, -math.inf).softmax(-1)
        out = torch.einsum("bhij,bjhd->bihd", weights_of_keys, v).reshape(batch, length, -1)
        x = x + out @ w[f"{lead}attention.wo.weight"].T
        h = norm(x, f"{lead}ffn_norm")
        gate, up = h @ w[f"{lead}feed_forward.w1.weight"].T, h @ w[f"{lead}feed_forward.w3.weight"].T
        x = x + (gate * gate.sigmoid() * up) @ w[f"{lead}feed_forward.w2.weight"].T
        layer += 1
    return norm(x, "norm") @ w["output.weight"].T
