"""Results of an attention problem, and their errors against the float64 reference."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from attention_cases import Case, in_blocks_of
from attention_oracle import oracle, positions_of
from torch import Tensor

from attention_priors.priors import Prior, Structure
from attention_priors.priors.base import ScaledDistance

ROUNDING = 2.0**-24
"""Relative error of one rounding to float32."""


@dataclass(frozen=True)
class Result:
    """Results of one computation."""

    out: Tensor
    lse: Tensor
    grads: dict[str, Tensor]


@dataclass(frozen=True)
class Cotangents:
    """Gradients with respect to output and log-sum-exp."""

    out: Tensor
    lse: Tensor

    @classmethod
    def of(cls, out: Tensor, lse: Tensor) -> Cotangents:
        """Draw random gradients.

        A key at distance 0 may lower a log-sum-exp by up to 1e30 nats. The gradient of such a number would dominate all
        others, so it is divided by the number's size.
        """
        generator = torch.Generator().manual_seed(0)
        size = 1 + lse.detach().double().clamp(min=-1e38).abs().masked_fill(torch.isneginf(lse), 0.0)
        normal = torch.randn(lse.shape, generator=generator, dtype=torch.float64)
        normal = (normal.to(lse.device) / size).masked_fill(torch.isneginf(lse), 0.0)
        return cls(torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.device), normal)


def compute(case: Case, backend: str, cotangents: Cotangents | None = None) -> Result:
    """Compute output, log-sum-exp and every gradient. Gradients of the results are random by default."""
    case = replace(case, **{n: getattr(case, n).detach().requires_grad_() for n in case.given()})
    leaves = case.leaves()
    with in_blocks_of(case.small_blocks):
        out, lse = case.attend(backend)
        cotangents = Cotangents.of(out, lse) if cotangents is None else cotangents
        grads = torch.autograd.grad(
            [out, lse],
            list(leaves.values()),
            [cotangents.out.to(out.dtype), cotangents.lse.to(lse.dtype)],
            allow_unused=True,
        )
    found = zip(leaves, leaves.values(), grads, strict=True)
    return Result(out.detach(), lse.detach(), {n: torch.zeros_like(x) if g is None else g for n, x, g in found})


def gradient_scales(case: Case, cotangents: Cotangents) -> dict[str, Tensor]:
    """Return the size of the terms that are summed in each gradient.

    A gradient is a sum over pairs ``(i, j)``, and its terms may cancel. For example, the gradient of a bias that is
    equal for all keys is 0, but every float32 computation leaves rounding errors of the terms. Errors are therefore
    measured relative to the terms. In the gradient of each logit, ``p (dp - Σ p dp + dlse)``, the sum of the absolute
    values of the parts replaces the sum. Its sign is random, as the signs of rounding errors are.
    """
    case = case.to(torch.float64)
    case = replace(case, **{n: getattr(case, n).requires_grad_() for n in case.given()})
    leaves = case.leaves()
    exact = oracle(case)
    with torch.no_grad():
        weights_grad = cotangents.out.abs() @ exact.value.abs().mT
        mean = (exact.weights * weights_grad).sum(-1, keepdim=True)
        all_parts = exact.weights * (weights_grad + mean + cotangents.lse.abs().unsqueeze(-1))
        # A row that sees one key gives it the weight 1, whatever the logit is. A log-prior of -1e30 nats then affects
        # only the log-sum-exp.
        alone = exact.seen.sum(-1, keepdim=True) == 1
        parts = torch.where(alone, exact.weights * cotangents.lse.abs().unsqueeze(-1), all_parts)
    content = [name for name in leaves if not name.startswith("prior.")]
    positional = [name for name in leaves if name.startswith("prior.")]
    sums = [(exact.logits, all_parts, content), (exact.logits, parts, positional)]
    for term in () if case.prior is None else case.prior.terms():
        scale = exact.prior_scale.detach().abs()
        if Structure.OF_KEYS in term.structure:
            # A term of a sum may be much larger than the sum.
            numbers = term.log_prior_of_key(positions_of(case)[1], torch.float64).movedim(0, -2).unsqueeze(-2)
            sums.append((numbers.expand_as(parts), scale * parts, positional))
        if Structure.SCALED_DISTANCE in term.structure:
            # The row's part and the distance's part may cancel.
            network = network_of(term, case)
            for part in ("row", "distance"):
                alone = network._replace(**{part: getattr(network, part).detach()})
                sums.append((alone.log_prior().transpose(0, 1), scale * parts, positional))
        if Structure.FACTORED in term.structure:
            # Lanes may cancel each other.
            lanes = term.lanes(*positions_of(case), dtype=torch.float64)
            products = lanes.query.unsqueeze(-2) * lanes.key[..., None, None, :, :]
            sums.append((products, (scale * parts).unsqueeze(-1).expand(*parts.shape, products.shape[-1]), positional))
    generator = torch.Generator().manual_seed(0)
    scales = {name: torch.zeros((), dtype=torch.float64) for name in leaves}
    for total, sizes, names in sums:
        for _ in range(3 if total.requires_grad and names else 0):
            signs = torch.randint(0, 2, sizes.shape, generator=generator) * 2 - 1
            chosen = [leaves[name] for name in names]
            grads = torch.autograd.grad(total, chosen, signs * sizes, allow_unused=True, retain_graph=True)
            for name, grad in zip(names, grads, strict=True):
                if grad is not None:
                    scales[name] = torch.maximum(scales[name], grad.double().abs().max())
    value_grad = exact.weights.detach().mT @ cotangents.out.abs()
    group = case.query.shape[1] // case.value.shape[1]
    scales["value"] = value_grad.unflatten(1, (-1, group)).sum(2).abs().max()
    return scales


def tolerance_of(case: Case, dtype: torch.dtype = torch.float32) -> float:
    """Return the allowed relative error of a computation: 1e-5 (float64: 1e-10), or more where rounding exceeds it.

    A logit ``z`` in float32 is wrong by up to ``2^-24 |z|``, which changes its weight by ``p (1 - p)`` times as much.
    Example: a logit scale of 8 on a log-prior of -50 nats that is almost equal for all keys. No float32 bias is more
    exact. Lanes of priors that are not stationary round other numbers than tables do.
    """
    exact = oracle(case.to(torch.float64))
    with torch.no_grad():
        size = exact.logits.abs()
        if case.key_bias is not None:
            # With a key bias, the log-sum-exp of each row is subtracted first.
            size = (exact.logits - exact.lse.nan_to_num(neginf=0.0).unsqueeze(-1)).abs()
        for term in () if case.prior is None else case.prior.terms():
            if Structure.SCALED_DISTANCE in term.structure:
                size = size + exact.prior_scale.abs() * network_sizes(term, case)
            elif not term.structure & (Structure.STATIONARY | Structure.OF_KEYS):
                parts = term.lanes(*positions_of(case), dtype=torch.float64)
                size = size + exact.prior_scale.abs() * (parts.query @ parts.key.unsqueeze(-3).mT).abs()
        moved = (exact.weights * (1 - exact.weights) * size).sum(-1)
        # In float32, key biases are exact to 1e-4 nats.
        least = 1e-10 if dtype == torch.float64 else 1e-5 if case.key_bias is None else 5e-5
        return least + torch.finfo(dtype).eps * float(moved.max())


def network_of(term: Prior, case: Case) -> ScaledDistance:
    """Return the network of a scaled distance for all pairs of a case."""
    queries, keys = positions_of(case)
    return term.scaled_distance(queries, queries.unsqueeze(-1) - keys.unsqueeze(-2))


def network_sizes(term: Prior, case: Case) -> Tensor:
    """Return the size of the terms of a scaled distance's network for each pair, ``(B, H, Lq, Lk)``."""
    network = network_of(term, case)
    parts = network._replace(hidden=network.hidden.abs(), outer=network.outer.abs())
    return parts.log_prior().transpose(0, 1)


def errors(result: Result, expected: Result, scales: dict[str, Tensor]) -> dict[str, float]:
    """Return the error of each part, relative to its size: the largest number of the tensor or, for gradients, of its
    terms.
    """
    found: dict[str, float] = {}
    for name, tensor in (("out", result.out), ("lse", result.lse)):
        assert torch.isfinite(tensor[~torch.isneginf(tensor)]).all(), name
    found["out"] = _relative(result.out, expected.out, torch.zeros(()))
    blind = torch.isneginf(expected.lse)
    assert torch.equal(torch.isneginf(result.lse), blind), "other rows see nothing"
    assert (result.out[blind] == 0).all(), "a row that sees nothing gives zeros"
    # The error of a log-sum-exp is absolute, in nats, unless the log-sum-exp is huge.
    error = (result.lse.double() - expected.lse.double()).abs() / expected.lse.double().abs().clamp(min=1)
    found["lse"] = float(error.masked_fill(blind, 0.0).max())
    assert set(result.grads) == set(expected.grads)
    for name, grad in result.grads.items():
        assert torch.isfinite(grad).all(), name
        assert grad.shape == expected.grads[name].shape, name
        found[name] = _relative(grad, expected.grads[name], scales[name])
    return found


def _relative(tensor: Tensor, expected: Tensor, scale: Tensor) -> float:
    if tensor.numel() == 0:
        return 0.0
    error = (tensor.double() - expected.double()).abs().max()
    size = torch.maximum(expected.double().abs().max(), scale.double())
    return 0.0 if error == 0 else float(error / size.clamp(min=1e-30))
