"""PTX for the fragments of a matrix product that threads hold, to read and to sum tiles along their diagonals.

On devices of compute capability 8 and 9, each warp holds 16 rows of a tile, or more. Of each 16 rows and 8 columns,
lane ``4 r + c`` holds the numbers of rows ``r`` and ``r + 8`` in columns ``2 c`` and ``2 c + 1``, in this order.
Triton's ``inline_asm_elementwise`` passes all numbers of a thread at once, first along the columns, then along further
rows.
"""

from __future__ import annotations

import triton


@triton.constexpr_function
def _places(rows, columns, warps):
    """Return column less row of each number of a thread, relative to its first."""
    return [
        8 * column + right - 8 * below - 16 * warps * row
        for row in range(rows // (16 * warps))
        for column in range(columns // 8)
        for below in range(2)
        for right in range(2)
    ]


@triton.constexpr_function
def number_of(rows, columns, warps):
    """Return how many numbers of a tile a thread holds."""
    return rows * columns // (32 * warps)


@triton.constexpr_function
def loads(rows, columns, warps, step):
    """Return PTX that loads float32 entries of a table for each number, given their addresses.

    ``step`` is the distance of the entries of neighbouring columns, and minus that of neighbouring rows. All entries
    therefore lie at constant distances from the first, and about half of them are equal to another.
    """
    places = [step * place for place in _places(rows, columns, warps)]
    first = {place: index for index, place in reversed(list(enumerate(places)))}
    return " ".join(
        f"ld.global.nc.f32 ${index}, [${len(places)}+{4 * place}];"
        if first[place] == index
        else f"mov.f32 ${index}, ${first[place]};"
        for index, place in enumerate(places)
    )


@triton.constexpr_function
def load_registers(rows, columns, warps):
    """Return the constraints of :func:`loads`: results in registers of their own, then addresses."""
    number = rows * columns // (32 * warps)
    return ",".join(["=&f"] * number + ["l"] * number)


@triton.constexpr_function
def diagonal_sums(columns):
    """Return PTX that adds the sums of a warp's diagonals to int64 numbers, 16 rows at a time.

    It is given the float32 numbers, the address that belongs to each, and how many units of the integers make one.
    The address of the next column is 8 bytes lower, that of the next row 8 bytes higher. Results are zeros.

    First, each lane adds what it holds of a diagonal. Then lanes of a row exchange numbers, so that all eight lanes
    with equal ``c`` hold numbers of the same diagonals, in blocks of 8 diagonals. Then these lanes add up, and each
    keeps every eighth block.
    """
    blocks, lines = columns // 8, []
    number = 4 * blocks

    def new(instruction: str, *operands: str) -> str:
        name = f"x{len(lines)}"
        lines.append(f"{instruction} {name}, {', '.join(operands)};")
        return name

    def own(block: int, below: int, right: int) -> str:
        return f"${number + 4 * block + 2 * below + right}"

    zero = "0f00000000"
    # sums[t][e]: columns 2 c + e of the blocks of 8 columns that begin 8 (t - 1) columns after the rows' block.
    sums = [[own(0, 1, right) for right in range(2)]]
    for block in range(blocks - 1):
        sums.append([new("add.f32", own(block, 0, right), own(block + 1, 1, right)) for right in range(2)])
    sums.append([own(blocks - 1, 0, right) for right in range(2)])
    # Row r moves by r columns to the left: to another lane of the row, and some into the block to the left.
    moved = []
    for left, right in sums:
        swapped = new("selp.f32", right, left, "odd"), new("selp.f32", left, right, "odd")
        moved.append([new("shfl.sync.idx.b32", swapped[e], f"from{e}", "31", "-1") for e in range(2)])
    ends = [[zero, zero], *moved, [zero, zero]]
    found = {k: [new("selp.f32", ends[k + 1][e], ends[k][e], f"wrap{e}") for e in range(2)] for k in range(blocks + 2)}
    for bit in (4, 2, 1):
        half = {}
        for k in [k for k in range(blocks + 2) if not k & bit and (k in found or k | bit in found)]:
            low, high = (found.get(x, [zero, zero]) for x in (k, k | bit))
            kept = [new("selp.f32", high[e], low[e], f"bit{bit}") for e in range(2)]
            sent = [new("selp.f32", low[e], high[e], f"bit{bit}") for e in range(2)]
            theirs = [new("shfl.sync.bfly.b32", sent[e], str(4 * bit), "31", "-1") for e in range(2)]
            half[k] = [new("add.f32", kept[e], theirs[e]) for e in range(2)]
        found = half
    # The first number of lane (r, c) is on diagonal 2 c - r, its sums on diagonals 8 (r + k - 2) + 2 c + e.
    for k, pair in found.items():
        for e in range(2):
            lines += [
                f"cvt.f64.f32 exact, {pair[e]};",
                f"mul.f64 exact, exact, ${3 * number};",
                "cvt.rni.s64.f64 units, exact;",
                f"@some{k} red.relaxed.gpu.global.add.u64 [place+{8 * (16 - 8 * k - e)}], units;",
            ]
    return " ".join(
        [
            "{ .reg .b32 lane, r, c, odd_row, to0, to1, from0, from1, edge0, edge1, here;",
            f".reg .pred odd, wrap0, wrap1, bit4, bit2, bit1, {', '.join(f'some{k}' for k in found)};",
            f".reg .f32 x<{len(lines)}>; .reg .f64 exact; .reg .b64 units, place, far;",
            "mov.u32 lane, %laneid; shr.u32 r, lane, 2; and.b32 c, lane, 3;",
            "and.b32 odd_row, r, 1; setp.ne.u32 odd, odd_row, 0;",
            *(f"and.b32 here, r, {bit}; setp.ne.u32 bit{bit}, here, 0;" for bit in (4, 2, 1)),
            "shr.u32 to0, r, 1; add.u32 to1, r, 1; shr.u32 to1, to1, 1; shl.b32 edge0, c, 1; add.u32 edge0, edge0, r;",
            "add.u32 edge1, edge0, 1; setp.ge.u32 wrap0, edge0, 8; setp.ge.u32 wrap1, edge1, 8;",
            *(
                f"add.u32 to{e}, to{e}, c; and.b32 to{e}, to{e}, 3; "
                f"sub.u32 from{e}, lane, c; add.u32 from{e}, from{e}, to{e};"
                for e in range(2)
            ),
            *(f"setp.lt.u32 some{k}, r, {blocks + 2 - k};" for k in found),
            f"mul.wide.u32 far, r, 72; sub.s64 place, ${2 * number}, far;",
            *lines,
            *(f"mov.b32 ${index}, 0;" for index in range(number)),
            "}",
        ]
    )


@triton.constexpr_function
def sum_registers(columns):
    """Return the constraints of :func:`diagonal_sums`: zeros, numbers, addresses, and units."""
    number = columns // 2
    return ",".join(["=r"] * number + ["f"] * number + ["l"] * number + ["d"] * number)
