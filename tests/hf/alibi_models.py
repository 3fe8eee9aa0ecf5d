"""Tiny BLOOM and MPT models with random weights, large enough for logits to differ by more than rounding."""

from typing import Any

import torch
from torch import Tensor
from transformers import BloomConfig, BloomForCausalLM, MptConfig, MptForCausalLM

VOCABULARY = 40
TOLERANCE = 1e-4
"""Largest error of float32 logits whose size is of the order of 10."""


def bloom(heads: int = 4, **changes: Any) -> BloomForCausalLM:
    torch.manual_seed(0)
    config = {
        "vocab_size": VOCABULARY,
        "hidden_size": 8 * heads,
        "n_layer": 2,
        "n_head": heads,
        "initializer_range": 0.3,
    }
    return BloomForCausalLM(BloomConfig(**config | changes)).eval()


def mpt(heads: int = 4, **changes: Any) -> MptForCausalLM:
    torch.manual_seed(0)
    config: dict[str, Any] = {"vocab_size": VOCABULARY, "d_model": 8 * heads, "n_layers": 2, "n_heads": heads}
    config |= {"initializer_range": 0.3, "max_seq_len": 64, "use_cache": True}
    return MptForCausalLM(MptConfig(**config | changes)).eval()


MODELS = {
    "bloom": bloom,
    "bloom, post-norm residuals": lambda **changes: bloom(apply_residual_connection_post_layernorm=True, **changes),
    "bloom, sliced": lambda **changes: bloom(pretraining_tp=2, slow_but_exact=True, **changes),
    "mpt": mpt,
    "mpt, clipped and scaled": lambda **changes: mpt(attn_config={"clip_qkv": 1.5, "softmax_scale": 0.2}, **changes),
}


def tokens(batch: int = 3, length: int = 9, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def padded(batch: int = 3, length: int = 9) -> Tensor:
    """Return an attention mask with the first text padded on the left, the second on the right, and the others
    unpadded.
    """
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[0, :3] = 0
    mask[1, length - 2 :] = 0
    return mask


def difference(a: Tensor, b: Tensor, mask: Tensor | None = None) -> float:
    assert a.shape == b.shape
    gap = (a - b).detach().abs().amax(-1)
    return float(gap.max() if mask is None else gap[mask.bool()].max())


def logits(model: Any, ids: Tensor, **kwargs: Any) -> Tensor:
    with torch.no_grad():
        return model(ids, **kwargs).logits
