"""Catalogue of encodings by name. A new encoding is a new file and a new line here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attention_priors.config import build
from attention_priors.encodings.additive import LearnedTable, LinearToy, Sinusoidal
from attention_priors.encodings.base import Encoding
from attention_priors.encodings.rotary import Rotary
from attention_priors.encodings.shaw import ShawVectors

ENCODINGS: dict[str, type[Encoding]] = {
    encoding.name: encoding for encoding in (Sinusoidal, LearnedTable, Rotary, ShawVectors, LinearToy)
}


def encoding_from_config(config: Mapping[str, Any] | str | None, **known: Any) -> Encoding | None:
    """Build an encoding from its plain description; return None for None.

    Args:
        config: ``{"name": ..., <constructor arguments>}``, a bare name, or None.
        known: ``width`` of the embeddings and ``head_dim``, for encodings that take them.

    Raises:
        ValueError: unknown name or argument, or invalid value. The message lists the valid ones.
    """
    return None if config is None else build("encoding", ENCODINGS, config, **known)
