"""What the numbers of a run were made with and on: kept beside them, and united in the results."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from attention_priors.lab.machine import processor, versions

SOFTWARE = ("attention-priors", "torch", "transformers", "tokenizers", "accelerate")
"""The libraries that a decoder's numbers depend on."""

_PARTS = ("versions", "machine")


def environment(software: Iterable[str] = SOFTWARE) -> dict[str, dict[str, str | None]]:
    """``versions`` of libraries, and the ``machine``, here and now.

    Args:
        software: the libraries.
    """
    return {
        "versions": versions(software),
        "machine": {"platform": platform.platform(), "processor": processor(), "cores": str(os.cpu_count())},
    }


def environment_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """That which a file was written with; what it does not say is missing."""
    return {part: record[part] for part in _PARTS if part in record}


def united(environments: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, str]]:
    """What each thing was in any of them, listed where they differ.

    Runs may have been made on several machines, and asked more on others; results are collected on any.
    """
    found: dict[str, dict[str, str]] = {}
    for part in _PARTS:
        told = [one[part] for one in environments if part in one]
        keys = dict.fromkeys(key for one in told for key in one)
        found[part] = {key: ", ".join(dict.fromkeys(str(one.get(key)) for one in told)) for key in keys}
    return found
