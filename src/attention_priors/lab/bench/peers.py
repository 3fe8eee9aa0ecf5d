"""Implementations in other packages, called as documented, without their projections.

Each package is imported in the function that calls it, so that a missing package fails its own way alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from attention_priors.hf.goat import load_goat_attention
from attention_priors.lab.bench.way import CannotRunError, Case, Inputs, Prepared, learned, prepared
from attention_priors.priors import GeneralizedGaussian, Laplace, Prior

FLEX_BLOCK = 128
"""FlexAttention's default block size."""
GOAT_FREQUENCIES = 8
"""goat-attention's default number of frequencies, for each of its two spectra."""

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


# ---- FlexAttention


def flex_alibi(case: Case) -> tuple[Prior, Callable[[], ScoreMod]]:
    """Return ALiBi and a function that makes its score modification, with one slope per head."""
    prior = Laplace(case.heads).to(case.device)
    slopes, offset = prior.slope.detach(), case.offset
    return prior, lambda: lambda score, b, h, i, j: score - slopes[h] * (i + offset - j)


def flex_gaussian(case: Case) -> tuple[Prior, Callable[[], ScoreMod]]:
    """Return a learned GGD and a function that makes its score modification from a table by distance."""
    prior = GeneralizedGaussian(case.heads, init="spread", learn=True).to(case.device)
    distances, offset = torch.arange(case.length, device=case.device), case.offset

    def make() -> ScoreMod:
        table = prior.log_prior_at(distances)
        # A causal block also reads negative distances, which its mask then hides.
        return lambda score, b, h, i, j: score + table[h, (i + offset - j).clamp(min=0)]

    return prior, make


def flex(case: Case, inputs: Inputs, *, make_score: Callable[[Case], tuple[Prior, Callable[[], ScoreMod]]]) -> Prepared:
    """Prepare compiled FlexAttention."""
    from torch.nn.attention.flex_attention import flex_attention

    prior, make = make_score(case)
    # Without `fullgraph`, PyTorch would silently run uncompiled code after too many recompilations.
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    make_mask = cache(causal_blocks)

    def run() -> Tensor:
        # One query sees every key.
        mask = None if case.passing == "decode" else make_mask(case.length, case.device)
        out = compiled(*inputs, score_mod=make(), block_mask=mask)
        assert isinstance(out, Tensor)
        return out

    return prepared(case, inputs, run, prior)


def causal_blocks(length: int, device: str) -> Any:
    """Return FlexAttention's causal block mask, without the ``L x L`` matrix that ``create_block_mask`` makes."""
    from torch.nn.attention.flex_attention import BlockMask

    number = -(-length // FLEX_BLOCK)
    blocks = torch.arange(number, dtype=torch.int32, device=device)
    indices = blocks.view(1, 1, -1, 1).expand(1, 1, number, number).contiguous()
    return BlockMask.from_kv_blocks(
        # Row i sees block i in part, and the i blocks before it in full.
        torch.ones_like(blocks).view(1, 1, -1),
        indices,
        blocks.view(1, 1, -1).clone(),
        indices.mT.contiguous(),
        BLOCK_SIZE=FLEX_BLOCK,
        mask_mod=lambda b, h, i, j: i >= j,
        seq_lengths=(length, length),
    )


# ---- x-transformers


def x_transformers(case: Case, inputs: Inputs, *, flash: bool) -> Prepared:
    """Prepare x-transformers' attention with its ALiBi; ``flash`` passes the bias to PyTorch's attention."""
    from x_transformers.attend import Attend  # pyright: ignore[reportMissingImports]
    from x_transformers.x_transformers import AlibiPositionalBias  # pyright: ignore[reportMissingImports]

    attention = Attend(causal=True, heads=case.heads, flash=flash).to(case.device)
    alibi = AlibiPositionalBias(case.heads).to(case.device)

    def run() -> Tensor:
        # As in the package's layers. `alibi` caches the bias of the longest call.
        bias = alibi(case.num_queries, case.length).to(case.dtype)
        return attention(*inputs, attn_bias=bias)[0]

    return prepared(case, inputs, run, Laplace(case.heads).to(case.device))


# ---- transformers


class _FixedCache:
    """KV cache that already holds the new key, like a static cache."""

    def __init__(self, key: Tensor, value: Tensor) -> None:
        self.key, self.value = key, value

    def update(self, key: Tensor, value: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        return self.key, self.value


def bloom(case: Case, inputs: Inputs) -> Prepared:
    """Prepare BLOOM's attention module without its projections; BLOOM has eager attention only."""
    from transformers import BloomConfig
    from transformers.models.bloom.modeling_bloom import BloomAttention, build_alibi_tensor

    width = case.heads * case.head_dim
    module = BloomAttention(BloomConfig(hidden_size=width, n_head=case.heads), layer_idx=0).eval()
    module.query_key_value = module.dense = nn.Identity()  # pyright: ignore[reportAttributeAccessIssue]
    # The output of BLOOM's fused projection: (B, Lq, H, 3, D), flattened.
    parts = (inputs.query, inputs.key[:, :, case.offset :], inputs.value[:, :, case.offset :])
    fused = torch.stack([x.detach().transpose(1, 2) for x in parts], dim=3).flatten(2).requires_grad_(case.backward)
    past = _FixedCache(inputs.key, inputs.value) if case.passing == "decode" else None
    residual = torch.zeros(case.batch, case.num_queries, width, dtype=case.dtype, device=case.device)

    @cache
    def bias_and_mask() -> tuple[Tensor, Tensor | None]:
        # BLOOM's model makes both once for all layers.
        alibi = build_alibi_tensor(torch.ones(case.batch, case.length, device=case.device), case.heads, case.dtype)
        if case.passing == "decode":
            return alibi, None
        mask = torch.full((case.length, case.length), torch.finfo(case.dtype).min, device=case.device)
        return alibi, mask.to(case.dtype).triu_(1)[None, None]

    def run() -> Tensor:
        return module(fused, residual, *bias_and_mask(), layer_past=past)[0]

    return prepared(case, inputs, run, Laplace(case.heads).to(case.device), leaves=(fused,), flat=True)


# ---- goat-attention


def goat_content(case: Case) -> int:
    """Return the dimensions that goat-attention leaves to content: positions take 2 per frequency, the sink 1.

    Raises:
        CannotRunError: The head dimension has no room for content.
    """
    content = case.head_dim - 2 * GOAT_FREQUENCIES - 1
    if content < 1:
        raise CannotRunError(
            f"head_dim={case.head_dim} leaves no dimension for content; GOAT needs at least {2 * GOAT_FREQUENCIES + 2}"
        )
    return content


def goat(case: Case, inputs: Inputs, *, need_weights: bool) -> Prepared:
    """Prepare goat-attention without its projections. Its prior is :class:`Spectral` plus :class:`KeySink`."""
    from goat import GoatAttention  # pyright: ignore[reportMissingImports]

    content = goat_content(case)
    torch.manual_seed(case.seed)
    module = GoatAttention(
        case.heads * case.head_dim,
        case.heads,
        batch_first=True,
        pos_rank=GOAT_FREQUENCIES,
        abs_rank=GOAT_FREQUENCIES,
        training_seq_len=2048,
    ).to(case.device)
    with torch.no_grad():
        # Initial values near 0 would be invisible in the check of the output.
        module.lambda_asym.normal_(std=0.02)
        module.sink_bump.fill_(1.0)
        for layer in (module.key_bias.fc1, module.key_bias.fc2):
            layer.weight.normal_(std=0.5)
    prior = load_goat_attention(module, causal=True).prior
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        setattr(module, name, nn.Identity())
    # The gate's weights are not learned here.
    module.prior_gate_scale_raw.requires_grad_(False)
    module.prior_gate_bias.requires_grad_(False)
    query, key, value = (
        x.detach().transpose(1, 2).flatten(2).requires_grad_(case.backward)
        for x in (inputs.query, inputs.key[:, :, case.offset :], inputs.value[:, :, case.offset :])
    )
    past = _goat_cache(module, inputs) if case.passing == "decode" else None

    def run() -> Tensor:
        return module(query, key, value, is_causal=True, need_weights=need_weights, past_key_value=past)[0]

    narrow = Inputs(inputs.query[..., :content], inputs.key[..., :content], inputs.value)
    return prepared(case, narrow, run, prior, leaves=(query, key, value, *learned(module)), flat=True)


@torch.no_grad()
def _goat_cache(module: Any, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Return the package's cache of all tokens but the last: content, Fourier features and ``u(j)``."""
    key, value = (x[:, :, :-1].transpose(1, 2).flatten(2) for x in inputs[1:])
    # One pass over the past. Only its keys and values matter, so one query suffices.
    *_, past = module(
        key[:, :1], key, value, is_causal=True, need_weights=False, use_cache=True, return_present_kv=True
    )
    return past
