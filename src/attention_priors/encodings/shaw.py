"""Shaw's relative vectors."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from attention_priors.checks import check_booleans, check_positive_integers
from attention_priors.encodings.base import Encoding


class ShawVectors(Encoding):
    """Learned vector per clipped offset, added to the keys and values that query ``i`` sees.

    ``content_ij = q_i · (k_j + a^K_c) · softmax_scale`` and ``o_i = Σ_j p_ij (v_j + a^V_c)`` with ``c = clip(j - i, -k,
    k)``. The content match itself depends on position, so this encoding is not a log-prior. Pass it to
    :func:`attention_priors.attend` as ``relative``. All heads share the vectors.

    Source: Shaw, Uszkoreit and Vaswani (NAACL 2018), equations 3 to 5.

    Args:
        head_dim: width of queries, keys and values.
        max_offset: largest offset ``k`` in tokens.
        values: whether values have vectors too.
    """

    name = "shaw"

    def __init__(self, head_dim: int, max_offset: int = 16, values: bool = True) -> None:
        super().__init__()
        check_positive_integers(head_dim=head_dim, max_offset=max_offset)
        check_booleans(values=values)
        self.head_dim = head_dim
        self.max_offset = max_offset
        self.values = values
        self.key_vectors = nn.Parameter(torch.empty(2 * max_offset + 1, head_dim))
        self.value_vectors = nn.Parameter(torch.empty(2 * max_offset + 1, head_dim)) if values else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reset the vectors to N(0, 0.02²)."""
        with torch.no_grad():
            self.key_vectors.normal_(std=0.02)
            if self.value_vectors is not None:
                self.value_vectors.normal_(std=0.02)

    def index(self, distance: Tensor) -> Tensor:
        """Return the index of the vector of each distance ``d = i - j``."""
        return (-distance).clamp(-self.max_offset, self.max_offset) + self.max_offset
