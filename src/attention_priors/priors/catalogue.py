"""The catalogue: every prior by its name. A new prior is one new file and one line here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attention_priors.config import build
from attention_priors.priors.axial import Axial, Radial, Spectral2d
from attention_priors.priors.base import Prior
from attention_priors.priors.clipped_offsets import ClippedOffsets
from attention_priors.priors.generalized_gaussian import GeneralizedGaussian
from attention_priors.priors.key_sink import KeySink
from attention_priors.priors.key_sink_2d import KeySink2d
from attention_priors.priors.laplace import Laplace
from attention_priors.priors.relative_buckets import RelativeBuckets
from attention_priors.priors.spectral import Spectral
from attention_priors.priors.sum import Sum
from attention_priors.priors.uniform import Uniform
from attention_priors.priors.window import Window

CATALOGUE: dict[str, type[Prior]] = {
    prior.name: prior
    for prior in (
        Uniform,
        Laplace,
        GeneralizedGaussian,
        Spectral,
        KeySink,
        RelativeBuckets,
        ClippedOffsets,
        Window,
        Axial,
        Spectral2d,
        Radial,
        KeySink2d,
    )
}


def prior_from_config(
    config: Mapping[str, Any] | Sequence[Mapping[str, Any] | str] | str, num_heads: int | None = None
) -> Prior:
    """Build a prior from its plain description.

    Args:
        config: ``{"name": ..., <constructor arguments>}`` as :meth:`Prior.to_config` gives it, a bare
            name, or a list of these (their sum).
        num_heads: used where the description does not state ``num_heads``; must agree where it does.

    Raises:
        ValueError: if the name or an argument is unknown, or a value is impossible; it says what is allowed.
    """
    if isinstance(config, Sequence) and not isinstance(config, str):
        return Sum([prior_from_config(part, num_heads) for part in config])
    if isinstance(config, Mapping) and config.get("name") == Sum.name:
        if set(config) != {"name", "priors"}:
            raise ValueError(f"a sum's description holds 'name' and 'priors' alone, got {sorted(config)}")
        if not isinstance(config["priors"], Sequence) or isinstance(config["priors"], str):
            raise ValueError(f"priors must be a list of descriptions, got {config['priors']!r}")
        return Sum([prior_from_config(part, num_heads) for part in config["priors"]])
    known = {} if num_heads is None else {"num_heads": num_heads}
    return build("prior", CATALOGUE, config, **known)
