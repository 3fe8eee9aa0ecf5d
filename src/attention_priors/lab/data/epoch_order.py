"""An order for each epoch, drawn from a seed."""

from __future__ import annotations

import numpy as np


class EpochOrder:
    """Place ``i`` is a function of the seed and ``i`` alone, and each epoch has every one of ``count`` things once.

    Args:
        count: how many things there are.
        seed: and the epoch are what each permutation is drawn from.
    """

    def __init__(self, count: int, seed: int) -> None:
        self._count, self._seed = count, seed
        self._drawn: tuple[int, np.ndarray] | None = None

    def __getitem__(self, index: int) -> int:
        epoch, place = divmod(index, self._count)
        if self._drawn is None or self._drawn[0] != epoch:
            kind = np.uint32 if self._count < 2**32 else np.uint64
            order = np.random.default_rng([self._seed, epoch]).permutation(np.arange(self._count, dtype=kind))
            self._drawn = (epoch, order)
        return int(self._drawn[1][place])
