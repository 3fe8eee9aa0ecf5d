"""``PriorAttention``: ``torch.nn.MultiheadAttention`` with a positional prior."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from attention_priors.attention import NullKey, SSMax, attend, attend_with_weights
from attention_priors.attention.problem import check_modules
from attention_priors.checks import check_share
from attention_priors.priors import Prior


class PriorAttention(nn.Module):
    """Multi-head attention with a prior over positions, with the interface of :class:`torch.nn.MultiheadAttention`.

    Parameters have the names and shapes of ``nn.MultiheadAttention``. Without a prior and with
    ``num_kv_heads == num_heads``, state dicts of the two classes are interchangeable.

    Args:
        embed_dim: width of queries and of the output.
        num_heads: number of heads ``H``. It must divide ``embed_dim``.
        dropout: dropout probability of attention weights in training.
        bias: whether the projections have biases.
        kdim: width of keys. ``embed_dim`` by default.
        vdim: width of values. ``embed_dim`` by default.
        batch_first: whether inputs are ``(B, L, width)`` rather than ``(L, B, width)``.
        device: device of the parameters.
        dtype: dtype of the projections. Parameters of a prior are always float32.
        prior: log-prior over positions. None for the uniform prior.
        logit_scale: :class:`SSMax`, or None.
        num_kv_heads: number of key and value heads (GQA). Equals ``num_heads`` by default.
        add_zero_attn: whether to append a zero key and value, a null key of logit 0. Returned weights exclude it.
        null_key: :class:`NullKey` with a logit per head, or None.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        prior: Prior | None = None,
        logit_scale: SSMax | None = None,
        num_kv_heads: int | None = None,
        add_zero_attn: bool = False,
        null_key: NullKey | None = None,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if embed_dim < 1 or num_heads < 1 or embed_dim % num_heads:
            raise ValueError(f"embed_dim={embed_dim} must be a positive multiple of num_heads={num_heads}")
        if num_kv_heads < 1 or num_heads % num_kv_heads:
            raise ValueError(f"num_heads={num_heads} must be a multiple of num_kv_heads={num_kv_heads}")
        check_share(dropout=dropout)
        check_modules(prior, logit_scale)
        if add_zero_attn and null_key is not None:
            raise ValueError("add_zero_attn and null_key are mutually exclusive: both add a null key")
        for name, module in (("prior", prior), ("logit_scale", logit_scale), ("null_key", null_key)):
            if module is not None and module.num_heads != num_heads:
                raise ValueError(f"{name} has num_heads={module.num_heads}, expected {num_heads}")
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = embed_dim // num_heads
        self.kdim = embed_dim if kdim is None else kdim
        self.vdim = embed_dim if vdim is None else vdim
        self.dropout = dropout
        self.batch_first = batch_first
        self.prior = prior
        self.logit_scale = logit_scale
        self.null_key = null_key
        self.add_zero_attn = add_zero_attn

        kv_dim = self.head_dim * num_kv_heads
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        self._same_widths = self.kdim == embed_dim and self.vdim == embed_dim
        if self._same_widths:
            self.in_proj_weight = nn.Parameter(torch.empty(embed_dim + 2 * kv_dim, embed_dim, **options))
        else:
            self.q_proj_weight = nn.Parameter(torch.empty(embed_dim, embed_dim, **options))
            self.k_proj_weight = nn.Parameter(torch.empty(kv_dim, self.kdim, **options))
            self.v_proj_weight = nn.Parameter(torch.empty(kv_dim, self.vdim, **options))
        self.in_proj_bias = nn.Parameter(torch.empty(embed_dim + 2 * kv_dim, **options)) if bias else None
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, **options)
        self.reset_parameters()

    @property
    def _qkv_same_embed_dim(self) -> bool:
        # PyTorch's TransformerEncoderLayer has a fast path that ignores priors; False disables it.
        return False

    def reset_parameters(self) -> None:
        """Reset the projections as ``nn.MultiheadAttention`` does. The prior keeps its parameters."""
        for name, parameter in self.named_parameters(recurse=False):
            if name.endswith("weight"):
                nn.init.xavier_uniform_(parameter)
        if self.in_proj_bias is not None:
            nn.init.zeros_(self.in_proj_bias)
            nn.init.zeros_(self.out_proj.bias)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        query_positions: Tensor | None = None,
        key_positions: Tensor | None = None,
        document_ids: Tensor | None = None,
        key_bias: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute attention.

        Args:
            query: queries. ``(B, Lq, embed_dim)`` if ``batch_first``, else ``(Lq, B, embed_dim)``; ``(Lq, embed_dim)``
                for a single sequence.
            key: keys in the layout of ``query``. ``(B, Lk, kdim)`` if ``batch_first``.
            value: values in the layout of ``query``. ``(B, Lk, vdim)`` if ``batch_first``.
            key_padding_mask: ``(B, Lk)`` or ``(Lk,)``. A boolean mask is True for keys to ignore; a floating-point mask
                is added to the logits.
            need_weights: whether to return the attention weights, a dense matrix. Without them memory is linear in
                length.
            attn_mask: ``(Lq, Lk)`` or ``(B · num_heads, Lq, Lk)``. A boolean mask is True where attention is forbidden;
                a floating-point mask is added. A 2-D mask applies to all heads.
            average_attn_weights: whether the returned weights are averaged over heads.
            is_causal: whether a query sees only keys at positions up to its own. Unlike the hint of
                ``nn.MultiheadAttention``, this flag masks without ``attn_mask``.
            query_positions: as in :func:`attend`. Cross-attention with a prior over distances needs both kinds of
                positions. By default queries are aligned with the last keys.
            key_positions: as in :func:`attend`.
            document_ids: as in :func:`attend`.
            key_bias: bias of each key as in :func:`attend`. ``(B, num_heads, Lk)``; a single sequence also needs the
                batch dimension.

        Returns:
            Output in the shape of ``query``, and the weights before dropout. Weights have shape ``(B, Lq, Lk)``, or
                ``(B, num_heads, Lq, Lk)`` if not averaged, or are None.
        """
        single = query.dim() == 2
        if query.dim() not in (2, 3) or key.dim() != query.dim() or value.dim() != query.dim():
            shapes = ", ".join(str(tuple(x.shape)) for x in (query, key, value))
            raise ValueError(f"query, key and value must all have 3 dimensions (2 without a batch), got {shapes}")
        for name, tensor, width in (
            ("query", query, self.embed_dim),
            ("key", key, self.kdim),
            ("value", value, self.vdim),
        ):
            if tensor.shape[-1] != width:
                raise ValueError(f"{name} must have width {width}, got shape {tuple(tensor.shape)}")
        if single:
            query, key, value = query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0)
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not self.batch_first:
            query, key, value = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)
        q, k, v = self._project(query, key, value)
        batch, _, num_queries, _ = q.shape
        if attn_mask is not None and attn_mask.dim() == 3:
            if attn_mask.shape[0] != batch * self.num_heads:
                raise ValueError(
                    f"attn_mask must have shape (Lq, Lk) or ({batch * self.num_heads}, Lq, Lk), got "
                    f"{tuple(attn_mask.shape)}"
                )
            attn_mask = attn_mask.unflatten(0, (batch, self.num_heads))
        if key_padding_mask is not None and key_padding_mask.is_floating_point():
            added = key_padding_mask[:, None, None, :]
            if attn_mask is not None and attn_mask.dtype == torch.bool:
                attn_mask = torch.zeros_like(attn_mask, dtype=added.dtype).masked_fill(attn_mask, float("-inf"))
            attn_mask = added.expand(-1, 1, num_queries, -1) if attn_mask is None else attn_mask + added
            key_padding_mask = None
        options: dict[str, Any] = {
            "causal": is_causal,
            "logit_scale": self.logit_scale,
            "query_positions": query_positions,
            "key_positions": key_positions,
            "document_ids": document_ids,
            "key_padding_mask": key_padding_mask,
            "attn_mask": attn_mask,
            "dropout_p": self.dropout if self.training else 0.0,
            "key_bias": key_bias,
            "null_logit": torch.zeros(self.num_heads, device=q.device) if self.add_zero_attn else self.null_key,
        }
        weights = None
        if need_weights:
            out, weights = attend_with_weights(q, k, v, self.prior, **options)
            weights = weights.mean(1) if average_attn_weights else weights
        else:
            out = attend(q, k, v, self.prior, **options)
        out = self.out_proj(out.transpose(1, 2).flatten(-2))
        if single:
            return out.squeeze(0), None if weights is None else weights.squeeze(0)
        return out if self.batch_first else out.transpose(0, 1), weights

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries ``(B, H, Lq, D)``, and keys and values ``(B, Hkv, Lk, D)``."""
        kv_dim = self.head_dim * self.num_kv_heads
        sizes = [self.embed_dim, kv_dim, kv_dim]
        if self._same_widths:
            weights = self.in_proj_weight.split(sizes)
        else:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        biases = (None, None, None) if self.in_proj_bias is None else self.in_proj_bias.split(sizes)
        q, k, v = (
            linear(x, weight, bias).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for x, weight, bias in zip((query, key, value), weights, biases, strict=True)
        )
        return q, k, v
