"""Every engine of ``attend()`` beside the dense formula on one machine, as a table that can be pasted into an issue."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from attention_priors.attention.selftest import ALLOWED, VARIANTS, Variant, errors, in_a_line, worst
from attention_priors.lab.machine import processor, versions
from attention_priors.lab.tasks.subject import device_named

ENGINES = ("triton", "toeplitz", "blockwise")
"""Those that compute all of it: values, log-sum-exps and gradients."""


def compare_engines(device: str | None, write: Callable[[str], None]) -> bool:
    """Write one row for each engine and variant, as soon as it is known.

    Args:
        device: ``cpu``, ``cuda`` or ``cuda:N``; CUDA where there is some by default.
        write: takes a line of Markdown.

    Returns:
        Whether all were within rounding.

    Raises:
        ValueError: there is no such device.
    """
    place = device_named(device)
    card = torch.cuda.get_device_name(place) if place.type == "cuda" else processor()
    software = versions(("attention-priors", "torch", "triton"))
    write(", ".join([f"{card} ({place})", *(f"{name} {number}" for name, number in software.items() if number)]))
    write("")
    write("| engine | dtype | D | what | largest error | of | allowed | |")
    write("|---|---|---|---|---|---|---|---|")
    right, told = True, set()
    for variant in _variants(place):
        for engine in ENGINES:
            start = f"| {engine} | {str(variant.dtype).removeprefix('torch.')} | {variant.head_dim} | {variant} | "
            try:
                found = errors(variant, engine, place)
            except ValueError as refused:
                if (engine, str(refused)) not in told:  # once
                    write(f"{start}{str(refused).split(': ', 1)[-1]} | | | not here |")
                    told.add((engine, str(refused)))
                continue
            except Exception as failed:  # a compiler that fails: the table is there to tell of it
                write(f"{start}{in_a_line(failed)} | | | FAILED |")
                right = False
                continue
            name = worst(found)
            good = found[name] <= ALLOWED[variant.dtype]
            right = right and good
            write(
                f"{start}{found[name]:.1e} | {name} | {ALLOWED[variant.dtype]:.0e} | {'right' if good else 'WRONG'} |"
            )
    return right


def _variants(device: torch.device) -> Iterator[Variant]:
    """All in the dtype that is common on a device, and some in the others: each takes a compiler seconds."""
    usual, *others = torch.float32, torch.bfloat16, torch.float16
    if device.type == "cuda":
        usual, others = torch.bfloat16, [torch.float32, torch.float16]
    for variant in VARIANTS:
        yield variant._replace(dtype=usual)
    for dtype in others:
        yield VARIANTS[2]._replace(dtype=dtype)
