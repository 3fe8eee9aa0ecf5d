"""Self-test: a table that compares every engine of ``attend()`` with the dense formula, ready for an issue report."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from attention_priors.attention.selftest import ALLOWED, VARIANTS, Variant, errors, in_a_line, worst
from attention_priors.lab.machine import device_named, processor, versions

ENGINES = ("triton", "toeplitz", "blockwise")
"""Engines that compute values, log-sum-exps and gradients."""


def compare_engines(device: str | None, write: Callable[[str], None]) -> bool:
    """Compare engines with the dense formula, and write one table row for each engine and variant.

    Args:
        device: ``cpu``, ``cuda`` or ``cuda:N``; CUDA if available by default.
        write: Function that takes a line of Markdown.

    Returns:
        Whether all errors were within rounding.

    Raises:
        ValueError: The device does not exist.
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
                if (engine, str(refused)) not in told:  # each reason is shown once
                    write(f"{start}{str(refused).split(': ', 1)[-1]} | | | not here |")
                    told.add((engine, str(refused)))
                continue
            except Exception as failed:  # for example an error of a compiler, which the table must report
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
    """Yield all variants in the usual dtype of a device, and one in each other dtype, as compilation takes seconds."""
    usual, *others = torch.float32, torch.bfloat16, torch.float16
    if device.type == "cuda":
        usual, others = torch.bfloat16, [torch.float32, torch.float16]
    for variant in VARIANTS:
        yield variant._replace(dtype=usual)
    for dtype in others:
        yield VARIANTS[2]._replace(dtype=dtype)
