"""Part of a tile's bias that is a ReLU network of a scaled distance, and its gradients.

On one tile the scaled distances ``x = u(i) · ψ(i - j)`` lie in a short range. A hidden unit whose kink lies outside is
0 or linear there. All of these units together are one line ``slope · x + constant`` for each head. Only the units with
a kink inside are computed pair by pair, once for several heads. A matrix product then adds up line and units: nothing
is approximated.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from attention_priors.attention.tiles.bias import KEPT_NUMBERS, Distances, Scratch
from attention_priors.attention.tiles.tiling import Tile
from attention_priors.priors.base import ScaledDistance


class ScaledBias:
    """Network's part of the bias of any tile, with queries in reverse order.

    Args:
        scaled: network in float64, with ``row (1 or B, Lq)`` and ``distance (N,)``.
        distances: distances of the entries of ``distance``.
        dtype: dtype of the bias.
        unit: value of one nat in the bias.
    """

    def __init__(self, scaled: ScaledDistance, distances: Distances, dtype: torch.dtype, unit: float = 1.0) -> None:
        self.distances, self.dtype, self.hidden, self.outer = distances, dtype, scaled.hidden, scaled.outer * unit
        self.row = scaled.row.to(dtype)
        self.table = pad(scaled.distance.to(dtype), (0, distances.overhang)).unsqueeze(0)
        geometry = distances.geometry
        self.is_shared = len(self.row) == 1 and (geometry.offset is not None or len(geometry.key_positions) == 1)
        """Whether all rows of the batch have the same bias."""

    def write(self, out: Tensor, tile: Tile, heads: slice, *, added: bool) -> Tensor:
        """Write a tile's part to ``out (b, h, n, e)``, contiguous, or add it if ``added``."""
        texts = [tile] if self.is_shared else tile.texts()
        for text, part in zip(texts, [out] if self.is_shared else out.split(1), strict=True):
            if not out.numel():
                break
            features = self._features(text)
            on, inside = self._split(features[0])
            line = self._line(on)[heads]
            for number, units in enumerate(inside.split(len(features) - 2)):
                used = self._evaluate(features, units)
                factors = torch.cat([line, self.outer[heads, units]], 1).to(self.dtype)
                for matrix in part.view(*part.shape[:2], -1):
                    matrix.addmm_(factors, used, beta=float(added or number > 0))
                line = torch.zeros_like(line)
        return out

    def zero_gradients(self) -> ScaledDistance:
        """Return zeros for the gradients of one row of the batch."""
        row, distance = self.row.new_zeros(self.row.shape[1]), self.row.new_zeros(1, self.distances.number)
        # Sums over all pairs are in float64.
        return ScaledDistance(row, distance, torch.zeros_like(self.hidden), torch.zeros_like(self.outer))

    def add_gradients(self, found: ScaledDistance, text: Tile, heads: slice, logits: Tensor) -> None:
        """Add a tile's part of the gradients to ``found``, from the logits' gradient of some heads.

        Args:
            found: gradients of one row of the batch, from :meth:`zero_gradients`.
            text: tile of this row of the batch.
            heads: heads of the logits.
            logits: gradient of the logits, ``(h, n, e)``.
        """
        if not logits.numel():
            return
        features = self._features(text)
        on, inside = self._split(features[0])
        outer, line, (rows, keys) = self.outer[heads], self._line(on)[heads], text.shape
        outer_grad, by_row = found.outer[heads], logits.transpose(0, 1)
        # One product for each query, because the rounding of longer products depends on the number of threads.
        x_grad = logits.new_zeros(rows, 1, keys)
        for number, units in enumerate(inside.split(len(features) - 2)):
            used = self._evaluate(features, units).view(-1, rows, keys).transpose(0, 1)
            factors = torch.cat([line[:, :1], outer[:, units]], 1).to(self.dtype).T.expand(rows, -1, -1)
            grads = Scratch("network's gradient", self.dtype, logits.device).of(rows, 1 + len(units), keys)
            torch.bmm(factors, by_row, out=grads)
            of_units = torch.ops.aten.threshold_backward(grads[:, 1:], used[:, 2:], 0)
            sums = torch.bmm(by_row, used.mT).double().sum(0)
            outer_grad[:, units] += sums[:, 2:]
            found.hidden[:, units] += torch.bmm(used[:, :2], of_units.mT).double().sum(0)
            if number == 0:
                x_grad += grads[:, :1]
                outer_grad[:, :-1] += (sums[:, :2] @ self.hidden) * on
                outer_grad[:, -1] += sums[:, 1]
                found.hidden.add_((outer[:, :-1].T @ sums[:, :2]).T * on)
            x_grad.baddbmm_(self.hidden[:1, units].to(self.dtype).expand(rows, -1, -1), of_units)
        row, table = self._read(text)
        x_grad = x_grad.view(1, rows, keys)
        found.row[text.rows] += torch.linalg.vecdot(x_grad, table).squeeze(0).flip(-1)
        self.distances.add(found.distance, text, (x_grad * row).unsqueeze(0))

    def _read(self, text: Tile) -> tuple[Tensor, Tensor]:
        """Return ``u`` of the tile's queries, ``(1, n, 1)``, and ``ψ`` of its pairs, ``(1, n, e)``."""
        row = self.row[text.batches] if len(self.row) > 1 else self.row
        return row[:, text.rows].flip(-1).unsqueeze(-1), self.distances.read(self.table, text)[:1, 0]

    def _features(self, text: Tile) -> Tensor:
        """Return rows of ``n e`` numbers, valid until the next call: ``x`` of all pairs, ones, and room for units."""
        rows, keys = text.shape
        number = min(2 + self.hidden.shape[1], max(3, KEPT_NUMBERS // (rows * keys)))
        features = Scratch("features", self.dtype, self.row.device).of(number, rows * keys)
        row, table = self._read(text)
        torch.mul(row, table, out=features[0].view(1, rows, keys))
        features[1] = 1
        return features

    def _evaluate(self, features: Tensor, units: Tensor) -> Tensor:
        """Compute units from the first two rows, write them to the next rows, and return all rows in use."""
        used = features[: 2 + len(units)]
        torch.mm(self.hidden[:, units].T.to(self.dtype), features[:2], out=used[2:]).relu_()
        return used

    def _split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return which units are linear on all of ``x``, boolean, and the indices of units with a kink inside."""
        weight, constant = self.hidden
        low, high = (weight * torch.stack(x.aminmax()).double().unsqueeze(-1) + constant).aminmax(dim=0)
        # A unit that is NaN is computed, and makes the result NaN.
        return low > 0, (~((low > 0) | (high <= 0))).nonzero().squeeze(-1)

    def _line(self, on: Tensor) -> Tensor:
        """Return slope and constant of the linear units together, ``(H, 2)``."""
        line = (self.outer[:, :-1] * on) @ self.hidden.T
        line[:, 1] += self.outer[:, -1]
        return line


def sum_gradients(found: Sequence[ScaledDistance], batch: int) -> ScaledDistance:
    """Sum the gradients of parts. ``found`` has equally many parts per row of the batch, one row after another."""
    row, *others = (torch.stack(parts) for parts in zip(*found, strict=True))
    distance, hidden, outer = (parts.sum(0) for parts in others)
    return ScaledDistance(row.unflatten(0, (batch, -1)).sum(1), distance.squeeze(0), hidden, outer)
