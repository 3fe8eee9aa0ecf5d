"""PTX for fragments of tiles, interpreted here for the 32 lanes of a warp."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest

fragments = pytest.importorskip("attention_priors.attention.triton.fragments", reason="needs triton")

LANES = np.arange(32)
ROW, PAIR = LANES // 4, LANES % 4


def run(text: str, operands: list[np.ndarray], memory: np.ndarray) -> list[np.ndarray]:
    """Run PTX on all lanes. Names of operands start with ``$``, results first. Addresses count bytes of ``memory``."""
    registers: dict[str, np.ndarray] = {f"${index}": value for index, value in enumerate(operands)}
    size = memory.itemsize

    def value(name: str) -> np.ndarray:
        if name == "%laneid":
            return LANES
        if name == "0f00000000":
            return np.zeros(32, np.float32)
        return registers[name] if name in registers else np.full(32, int(name))

    def address(name: str) -> np.ndarray:
        base, offset = re.fullmatch(r"\[(.+?)\+(-?\d+)\]", name).groups()  # pyright: ignore[reportOptionalMemberAccess]
        places = value(base) + int(offset)
        assert (places % size == 0).all()
        return places // size

    plain: dict[str, Callable[..., np.ndarray]] = {
        "mov": lambda a: a,
        "add": lambda a, b: a + b,
        "sub": lambda a, b: a - b,
        "and": lambda a, b: a & b,
        "shr": lambda a, b: a >> b,
        "shl": lambda a, b: a << b,
        "setp.ne": lambda a, b: a != b,
        "setp.ge": lambda a, b: a >= b,
        "setp.lt": lambda a, b: a < b,
        "selp": lambda a, b, condition: np.where(condition, a, b),
        "mul": lambda a, b: a * b,
        "cvt.f64": lambda a: a.astype(np.float64),
        "cvt.rni": lambda a: np.rint(a).astype(np.int64),
        "shfl.sync.idx": lambda a, lane, *_: a[lane],
        "shfl.sync.bfly": lambda a, mask, *_: a[LANES ^ mask],
    }
    for line in (part.strip(" {}") for part in text.split(";")):
        if not line or line.startswith(".reg"):
            continue
        guard, line = line[1:].split(" ", 1) if line.startswith("@") else (None, line)
        name, rest = line.split(" ", 1)
        target, *sources = rest.split(", ")
        if name == "red.relaxed.gpu.global.add.u64":
            here = value(guard) if guard else np.full(32, True)
            np.add.at(memory, address(target)[here], value(sources[0])[here])
        elif name == "ld.global.nc.f32":
            registers[target] = memory[address(sources[0])]
        else:
            kind = next(kind for kind in sorted(plain, key=len, reverse=True) if name.startswith(kind))
            registers[target] = plain[kind](*map(value, sources))
    return [registers[f"${index}"] for index in range(len(operands))]


def of_lanes(tile: np.ndarray) -> list[np.ndarray]:
    """Split 16 rows into the numbers of each lane, in the order of its registers."""
    return [
        tile[ROW + 8 * below, 8 * block + 2 * PAIR + right]
        for block in range(tile.shape[1] // 8)
        for below in range(2)
        for right in range(2)
    ]


@pytest.mark.parametrize("columns", [32, 64, 128])
def test_diagonals_are_summed(columns: int) -> None:
    generator = np.random.default_rng(0)
    tile = generator.standard_normal((16, columns)).astype(np.float32)
    place = np.arange(16)[:, None] - np.arange(columns)  # rises along a column, falls along a row
    expected = np.zeros(400)
    np.add.at(expected, place + 200, tile)
    memory, number = np.zeros(400, np.int64), columns // 2
    operands = [np.zeros(32)] * number + of_lanes(tile) + of_lanes(8 * (place + 200)) + [np.full(32, 2.0**40)] * number
    results = run(fragments.diagonal_sums(columns), operands, memory)[:number]
    np.testing.assert_allclose(memory / 2.0**40, expected, rtol=0, atol=1e-5)
    assert all((result == 0).all() for result in results)


@pytest.mark.parametrize(("rows", "warps", "step"), [(64, 4, 1), (64, 4, -1), (128, 8, -1), (128, 4, 1)])
def test_tiles_are_read_in_register_order(rows: int, warps: int, step: int) -> None:
    columns = 64
    table = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    entries = step * (np.arange(columns) - np.arange(rows)[:, None]) + 500
    for warp in range(warps):
        # Rows of a warp. The next group of warps holds the next rows.
        parts = [entries[16 * (warp + warps * part) :][:16] for part in range(rows // (16 * warps))]
        held = [numbers for part in parts for numbers in of_lanes(part)]
        assert len(held) == fragments.number_of(rows, columns, warps)
        operands = [np.zeros(32)] * len(held) + [4 * numbers for numbers in held]
        found = run(fragments.loads(rows, columns, warps, step), operands, table)[: len(held)]
        for numbers, those in zip(found, held, strict=True):
            np.testing.assert_array_equal(numbers, table[those])
