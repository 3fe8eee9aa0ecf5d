"""Kernels of the Triton backend; ``backend.py`` prepares their arguments.

``i`` is the slot of a query, ``j`` the slot of a key. Their distance is ``d = position of i - position of j``. Their
log-prior is entry ``highest - d`` of the head's table. ``ROW_SCALE`` multiplies content and log-prior, or the content
alone. Tables, biases of keys, logits and log-sum-exps are in bits, because the device computes powers of two; with
``FAR``, they are in nats. Arguments that are None are compiled out.

Sums are accumulated in float32. Every number is written by a single program, or is an integer to which programs add
atomically, so results are deterministic.

All kernels share these arguments for masks and positions:

``lowest``, ``farthest``, ``REACH``
    Range of visible distances. ``REACH`` holds two numbers that narrow the range to a window.
``FIRST``, ``LAST``
    Range of key slots that each query may see, ``(B, Lq)``, for contiguous documents. In the kernel of keys, the range
    of query slots that see each key.
``QUERY_POSITIONS``, ``KEY_POSITIONS``, ``QUERY_DOCUMENTS``, ``KEY_DOCUMENTS``
    Positions and documents, ``(B, L)``, if slots do not determine them. ``offset`` is then unused.
``PADDING``
    Hidden keys, ``(B, Lk)``.
``FAR``
    Rows whose numbers are too large for float32, ``(B, H, Lq)``. With it, a kernel computes only these rows, in
    float64. It writes the results of queries, and adds to the gradients of keys and values.
``COUNTS``, ``SLOTS``
    Number of slots of ``SLOT`` keys (or queries) that each slot of queries (or keys) visits, ``(B, H, n)``, and the
    indices of these slots, ``(B, H, n, m)``. Other slots are skipped.
"""

# Triton compiles the source of these functions, which a type checker does not accept as Python.
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false, reportArgumentType=false, reportOperatorIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from attention_priors import precision
from attention_priors.attention.triton import fragments

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)
NEAR: tl.constexpr = tl.constexpr(precision.NEAR)
INTERPRETED: tl.constexpr = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""Whether Triton's interpreter runs these kernels on the CPU."""
SIZES = ["num_queries", "num_keys", "offset", "highest", "lowest", "farthest"]
"""Integer arguments on which kernels are not specialised, so that new values do not cause recompilation."""


# ---- helpers


@triton.jit
def _dot(a, b):
    if INTERPRETED:
        # The interpreter would multiply the bit patterns of bfloat16. Products of two bfloat16 are exact in float32.
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _read(
    table, entries, visible,
    TILED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WARPS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Read log-priors of a tile from a table, in float32 directly into registers; return 0 without a table.

    In a loop, ``tl.load`` would prefetch them into shared memory in pieces of four bytes. That takes more instructions
    than the matrix product to which they are added, and more memory than keys and values. ``TILED`` reads all entries
    of a thread from a single address; ``STEP`` is the difference between the entries of neighbouring columns.
    """
    if table is None:
        return 0.0
    elif TILED:
        # Hidden pairs at the edges of the tile read the table's padding.
        return tl.inline_asm_elementwise(
            fragments.loads(ROWS, COLUMNS, WARPS, STEP),
            fragments.load_registers(ROWS, COLUMNS, WARPS),
            [(table + entries).to(tl.int64)],
            dtype=tl.float32,
            is_pure=True,
            pack=fragments.number_of(ROWS, COLUMNS, WARPS),
        )
    else:
        if visible is not None:
            # A hidden pair may have no entry in the table.
            entries = tl.where(visible, entries, 0)
        places = table + entries
        if INTERPRETED or places.dtype.element_ty != tl.float32:
            return tl.load(places)
        else:
            return tl.inline_asm_elementwise(
                "ld.global.nc.f32 $0, [$1];", "=f,l", [places.to(tl.int64)], dtype=tl.float32, is_pure=True, pack=1
            )


@triton.jit  # noqa: RET503
def _load(pointer, places, default=None):
    """Load numbers; without a pointer, return ``default``, or None without a default."""
    # Triton 3.5 and 3.6 cannot compile ``return None`` or None in a returned tuple, but they accept a missing return.
    if pointer is not None:
        return tl.load(pointer + places)
    elif default is not None:
        return default


@triton.jit
def _load_rows(pointer, slots, stride, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr):
    """Load rows of a matrix with contiguous columns, padded with zero columns to ``BLOCK_WIDTH``."""
    columns = tl.arange(0, BLOCK_WIDTH)
    places = pointer + slots.to(tl.int64)[:, None] * stride + columns[None, :]
    if WIDTH == BLOCK_WIDTH:
        return tl.load(places)
    return tl.load(places, mask=columns[None, :] < WIDTH, other=0.0)


@triton.jit
def _store_rows(pointer, slots, here, numbers, ADD: tl.constexpr, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr):
    """Store rows of a contiguous matrix or, with ``ADD``, add to them. ``here`` masks the rows."""
    columns = tl.arange(0, BLOCK_WIDTH)
    places = pointer + slots.to(tl.int64)[:, None] * WIDTH + columns[None, :]
    mask = here[:, None] & (columns[None, :] < WIDTH)
    if ADD:
        numbers += tl.load(places, mask=mask, other=0.0).to(tl.float32)
    tl.store(places, numbers.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def _reach(lowest, farthest, REACH):
    if REACH is not None:
        lowest = tl.maximum(lowest, tl.load(REACH))
        farthest = tl.minimum(farthest, tl.load(REACH + 1))
    return lowest, farthest


class Side(NamedTuple):
    """Data of a tile's queries (as a column) or keys (as a row).

    Without documents or biases in the problem, these fields are integer zeros.
    """

    position: Any
    document: Any
    high: Any
    """High part of a key's bias, or of the number that a query subtracts from all biases. The full number is
    ``high + low``, or ``high`` alone in float64."""
    low: Any


@triton.jit
def _side(slots, offset, POSITIONS, DOCUMENTS, HIGH, LOW, batch, both, number):
    """Load the data of slots, out of ``number`` queries or keys; ``both`` is the flat index of example and head."""
    in_batch, in_head = batch * number + slots, both * number + slots
    position = slots + offset if POSITIONS is None else tl.load(POSITIONS + in_batch)
    document = _load(DOCUMENTS, in_batch, slots * 0)
    return Side(position, document, _load(HIGH, in_head, slots * 0), _load(LOW, in_head, slots * 0))


@triton.jit
def _visible(slots, number, d, lowest, farthest, first, last, queries, keys, padded):
    """Return the mask of visible pairs; ``slots`` are the slots of the walked side."""
    visible = (slots < number) & (d >= lowest) & (d <= farthest) & (queries.document == keys.document)
    if first is not None:
        visible = visible & (slots >= first) & (slots < last)
    if padded is not None:
        visible = visible & (padded == 0)
    return visible


@triton.jit
def _biased(products, bias, queries, keys, visible, row_scale, softmax_scale, SCALES_PRIOR: tl.constexpr):
    """Return logits, and their part that the row scale multiplies. ``visible`` is None if all pairs are visible."""
    scaled = products * softmax_scale
    if keys.low.dtype.is_floating():
        bias += (keys.high - queries.high) + (keys.low - queries.low)
    elif keys.high.dtype.is_floating():
        bias += keys.high
    if row_scale is None:
        logits = scaled + bias
    elif SCALES_PRIOR:
        scaled = scaled + bias
        logits = scaled * row_scale
    else:
        logits = scaled * row_scale + bias
    if visible is not None:
        logits = tl.where(visible, logits, float("-inf"))
    return logits, scaled


@triton.jit
def _in_bits(difference, FAR):
    """Return a difference of logits in bits, in float32."""
    if FAR is None:
        return difference
    else:
        return (difference * LOG2_E).to(tl.float32)


@triton.jit
def _add_diagonals(places, tile, units, TILED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Add the sums of a tile's diagonals, in integers, to ``places``: the first is that of the tile's first number.

    Each row is one place after the row above.
    """
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    if TILED:
        # Inside a condition, which is always true, Triton can move this around in its software pipeline.
        if units > 0:
            tl.inline_asm_elementwise(
                fragments.diagonal_sums(COLUMNS),
                fragments.sum_registers(COLUMNS),
                [tile, (places + (row - column)).to(tl.int64), units],
                dtype=tl.int32,
                is_pure=False,
                pack=COLUMNS // 2,
            )
    else:
        # Rotate row r by r places. Diagonals become columns; numbers that wrap around belong to another diagonal.
        place = row - column + COLUMNS
        turned = tl.gather(tile, place % COLUMNS, axis=1)
        for block in tl.static_range((ROWS - 1) // COLUMNS + 2):
            sums = tl.sum(tl.where(place // COLUMNS == block, turned, 0.0), 0)
            of_block = places + (block - 1) * COLUMNS + tl.arange(0, COLUMNS)
            tl.atomic_add(of_block, (sums.to(tl.float64) * units).to(tl.int64), sem="relaxed")


class Walk(NamedTuple):
    """Blocks of keys that a block of queries visits, or vice versa: first the unmasked blocks, then the masked blocks.

    The blocks are contiguous, with the unmasked blocks as one run between masked blocks. Alternatively, a list names
    the blocks, and all of them are masked.
    """

    begin: Any
    """First slot of the first block, or a pointer to the list."""
    before: Any
    """Number of masked blocks before the unmasked blocks."""
    inner_steps: Any
    """Number of unmasked blocks."""
    masked_steps: Any
    """Number of masked blocks."""


@triton.jit
def _walk(
    first_slot, num_own, number, first, last, offset, lowest, farthest, some, both, POSITIONS, COUNTS, SLOTS,
    OWN: tl.constexpr, BLOCK: tl.constexpr, SLOT: tl.constexpr, MASK_ALL: tl.constexpr,
):  # fmt: skip
    """Plan the walk of a block of ``OWN`` queries, out of ``num_own``, over blocks of ``number`` keys.

    For a block of keys that walks queries, negate all distances. ``some`` is 0 for an empty walk, else 1.
    """
    if SLOTS is not None:
        place = both * tl.cdiv(num_own, SLOT) + first_slot // SLOT
        steps = tl.load(COUNTS + place) * (SLOT // BLOCK) * some
        return Walk(SLOTS + place * tl.cdiv(number, SLOT), 0, 0, steps)
    else:
        last_slot = tl.minimum(first_slot + OWN, num_own) - 1
        # Blocks in [some_from, some_to) may hold visible pairs. Blocks in [inner_from, inner_to) hold no hidden pairs.
        some_from, some_to = number * 0, number
        if POSITIONS is None:
            some_from = first_slot + offset - farthest
            some_to = last_slot + offset - lowest + 1
        if first is not None:
            some_from = tl.maximum(some_from, tl.min(first))
            some_to = tl.minimum(some_to, tl.max(last))
        begin = tl.maximum(some_from, 0) // BLOCK * BLOCK
        steps = tl.cdiv(tl.maximum(tl.minimum(some_to, number) - begin, 0), BLOCK)
        before, inner_steps = steps * 0, steps * 0
        if not MASK_ALL:
            inner_from = tl.maximum(tl.cdiv(tl.maximum(last_slot + offset - farthest, 0), BLOCK) * BLOCK, begin)
            inner_to = tl.maximum(tl.minimum(first_slot + offset - lowest + 1, number), 0) // BLOCK * BLOCK
            # Slots after the last one are hidden.
            whole = (first_slot + OWN <= num_own).to(tl.int32)
            inner_steps = tl.maximum(inner_to - inner_from, 0) // BLOCK * whole
            before = (inner_from - begin) // BLOCK
        return Walk(begin, before, inner_steps * some, (steps - inner_steps) * some)


@triton.jit
def _start(step, walk, SLOTS, MASKED: tl.constexpr, SLOT: tl.constexpr, BLOCK: tl.constexpr):
    """Return the first slot of the block that a step visits."""
    if not MASKED:
        return walk.begin + (walk.before + step) * BLOCK
    elif SLOTS is not None:
        return tl.load(walk.begin + step // (SLOT // BLOCK)) * SLOT + step % (SLOT // BLOCK) * BLOCK
    else:
        return walk.begin + (step + tl.where(step < walk.before, 0, walk.inner_steps)) * BLOCK


@triton.jit
def _is_far(lse):
    """Return which rows are NaN or beyond ``NEAR``, except rows that see no key."""
    return ((tl.abs(lse).to(tl.float32) <= NEAR) | (lse == float("-inf"))) == 0


# ---- forward


@triton.jit(do_not_specialize=SIZES)
def forward_kernel(
    QUERY, KEY, VALUE, OUT, LSE, IS_FAR, TABLE, KEY_HIGH, KEY_LOW, OWN_HIGH, OWN_LOW, ROW_SCALE, REACH, FIRST, LAST,
    QUERY_POSITIONS, KEY_POSITIONS, QUERY_DOCUMENTS, KEY_DOCUMENTS, PADDING, COUNTS, SLOTS, FAR,
    query_batch, query_head, query_row, key_batch, key_head, key_row, value_batch, value_head, value_row,
    table_head,
    heads, group, num_queries, num_keys, offset, highest, lowest, farthest, softmax_scale,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, SLOT: tl.constexpr, SCALES_PRIOR: tl.constexpr,
    TILED: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Compute output and log-sum-exp of a block of queries over one of ``S`` shares of its keys.

    Their shapes are ``(B, H, S, Lq, Dv)`` and ``(B, H, S, Lq)``. For a single share, the log-sum-exp is stored in
    float64 and in nats, and ``IS_FAR`` becomes the rows for the launch in float64.
    """
    # Start with the last queries, which see the most keys under a causal mask.
    first_slot = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS
    batch, head = (tl.program_id(1) // heads).to(tl.int64), tl.program_id(1) % heads
    both = tl.program_id(1).to(tl.int64)
    lowest, farthest = _reach(lowest, farthest, REACH)
    unit = softmax_scale * LOG2_E if FAR is None else softmax_scale
    MASK_ALL: tl.constexpr = not (FIRST is None and QUERY_POSITIONS is None and PADDING is None and SLOTS is None)
    table = None if TABLE is None else TABLE + head.to(tl.int64) * table_head
    keys = KEY + batch * key_batch + (head // group).to(tl.int64) * key_head
    values = VALUE + batch * value_batch + (head // group).to(tl.int64) * value_head

    i = first_slot + tl.arange(0, ROWS)
    # Rows after the last query are copies of its row and are not stored.
    row = tl.minimum(i, num_queries - 1)
    queries = QUERY + batch * query_batch + head.to(tl.int64) * query_head
    q = _load_rows(queries, row, query_row, D, BLOCK_D)
    row_scale = _load(ROW_SCALE, both * num_queries + row[:, None])
    first = _load(FIRST, batch * num_queries + row[:, None])
    last = _load(LAST, batch * num_queries + row[:, None])
    own = _side(row[:, None], offset, QUERY_POSITIONS, QUERY_DOCUMENTS, OWN_HIGH, OWN_LOW, batch, both, num_queries)
    here, some = i < num_queries, 1
    if FAR is not None:
        here = here & (tl.load(FAR + both * num_queries + row) != 0)
        some = tl.max(here.to(tl.int32), 0)
    walk = _walk(
        first_slot, num_queries, num_keys, first, last, offset, lowest, farthest, some, both,
        QUERY_POSITIONS, COUNTS, SLOTS, ROWS, KEYS, SLOT, MASK_ALL,
    )  # fmt: skip
    share, shares = tl.program_id(2), tl.num_programs(2)

    top = tl.full((ROWS,), float("-inf"), tl.float32 if FAR is None else tl.float64)
    total = tl.zeros((ROWS,), tl.float32)
    out = tl.zeros((ROWS, BLOCK_DV), tl.float32)
    # First the unmasked blocks, if there are any, then the masked blocks.
    for MASKED in tl.static_range(1 if MASK_ALL else 0, 2):
        steps = walk.masked_steps if MASKED else walk.inner_steps
        for step in range(steps * share // shares, steps * (share + 1) // shares):
            j = _start(step, walk, SLOTS, MASKED, SLOT, KEYS) + tl.arange(0, KEYS)
            column = tl.minimum(j, num_keys - 1)
            their = _side(column[None, :], 0, KEY_POSITIONS, KEY_DOCUMENTS, KEY_HIGH, KEY_LOW, batch, both, num_keys)
            d = own.position - their.position
            visible = None
            if MASKED:
                padded = _load(PADDING, batch * num_keys + column[None, :])
                visible = _visible(j[None, :], num_keys, d, lowest, farthest, first, last, own, their, padded)
            k = _load_rows(keys, column, key_row, D, BLOCK_D)
            bias = _read(table, highest - d, visible, TILED, ROWS, KEYS, WARPS, 1)
            products = _dot(q, tl.trans(k))
            logits, _ = _biased(products, bias, own, their, visible, row_scale, unit, SCALES_PRIOR)
            new_top = tl.maximum(top, tl.max(logits, 1))
            # For a row without a visible key so far, -inf minus -inf would be nan.
            base = tl.where(new_top == float("-inf"), 0.0, new_top) if MASKED else new_top
            weights = tl.exp2(_in_bits(logits - base[:, None], FAR))
            fade = tl.exp2(_in_bits(top - base, FAR))
            total = total * fade + tl.sum(weights, 1)
            v = _load_rows(values, column, value_row, DV, BLOCK_DV)
            out = out * fade[:, None] + _dot(weights.to(v.dtype), v)
            top = new_top

    blind = total == 0.0
    out = out / tl.where(blind, 1.0, total)[:, None]
    bits = tl.log2(tl.where(blind, 1.0, total))
    lse = tl.where(blind, float("-inf"), top + (bits if FAR is None else bits * LN_2))
    both = both * shares + share
    if IS_FAR is not None:
        lse = lse.to(tl.float64) * LN_2
        tl.store(IS_FAR + both * num_queries + i, _is_far(lse).to(tl.int8), mask=here)
    tl.store(LSE + both * num_queries + i, lse, mask=here)
    _store_rows(OUT + both * num_queries * DV, i, here, out, False, DV, BLOCK_DV)


# ---- backward


@triton.jit(do_not_specialize=["num_queries"])
def rows_kernel(
    OUT, OUT_GRAD, LSE, LSE_GRAD, SHIFT, CONSTANT, NEAR_LSE, FAR_LSE, IS_FAR, LARGEST,
    grad_batch, grad_head, grad_row, heads, num_queries,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Prepare the rows for the kernels below, for both launches.

    ``LSE`` is in float64 and in nats; ``SHIFT`` is the part of it that the first launch subtracts. ``CONSTANT`` becomes
    an estimate of ``Σ P dP - dlse``. ``NEAR_LSE`` and ``FAR_LSE`` become the log-sum-exps for the two launches, which
    are infinite for all other rows, and ``IS_FAR`` the rows of the second launch. ``LARGEST`` becomes three maxima, as
    integers or the bits of float32: of ``IS_FAR``, of the norms of ``dO``, and of ``|dlse|``.
    """
    batch, head = (tl.program_id(1) // heads).to(tl.int64), tl.program_id(1) % heads
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    here, row = i < num_queries, tl.minimum(i, num_queries - 1)
    first = tl.program_id(1).to(tl.int64) * num_queries
    out = _load_rows(OUT + first * DV, row, DV, DV, BLOCK_DV).to(tl.float32)
    out_grads = OUT_GRAD + batch * grad_batch + head.to(tl.int64) * grad_head
    out_grad = _load_rows(out_grads, row, grad_row, DV, BLOCK_DV).to(tl.float32)
    lse_grad, lse = tl.load(LSE_GRAD + first + row), tl.load(LSE + first + row)
    own = lse if SHIFT is None else lse - tl.load(SHIFT + first + row)
    far = _is_far(own)
    near_lse = tl.where(far | (own == float("-inf")), float("inf"), own * LOG2_E)
    tl.store(CONSTANT + first + i, tl.sum(out * out_grad, 1) - lse_grad, mask=here)
    tl.store(NEAR_LSE + first + i, near_lse.to(tl.float32), mask=here)
    tl.store(FAR_LSE + first + i, tl.where(far, lse, float("inf")), mask=here)
    tl.store(IS_FAR + first + i, far.to(tl.int8), mask=here)
    tl.atomic_max(LARGEST, tl.max(far.to(tl.int32), 0), sem="relaxed")
    # The bits of positive numbers have the same order as the numbers.
    norm = tl.abs(tl.sqrt(tl.max(tl.sum(out_grad * out_grad, 1), 0)))
    tl.atomic_max(LARGEST + 1, norm.to(tl.int32, bitcast=True), sem="relaxed")
    tl.atomic_max(LARGEST + 2, tl.max(tl.abs(lse_grad), 0).to(tl.int32, bitcast=True), sem="relaxed")


@triton.jit(do_not_specialize=SIZES)
def query_grad_kernel(
    QUERY, KEY, VALUE, OUT_GRAD, LSE, LSE_GRAD, CONSTANT, REST, QUERY_GRAD, SCALE_GRAD, TABLE, KEY_HIGH, KEY_LOW,
    OWN_HIGH, OWN_LOW, ROW_SCALE, REACH, FIRST, LAST, QUERY_POSITIONS, KEY_POSITIONS, QUERY_DOCUMENTS,
    KEY_DOCUMENTS, PADDING, COUNTS, SLOTS, FAR,
    query_batch, query_head, query_row, key_batch, key_head, key_row, value_batch, value_head, value_row,
    grad_batch, grad_head, grad_row, table_head,
    heads, group, num_queries, num_keys, offset, highest, lowest, farthest, softmax_scale,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, SLOT: tl.constexpr, SCALES_PRIOR: tl.constexpr,
    TILED: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a block of queries and of its row scales, and the row constants of the other kernels.

    The gradient of the logits is ``dS = P (dP - c)`` with ``c = Σ P dP - dlse``. On entry, ``CONSTANT`` is an estimate
    of ``c`` from the stored outputs, which may be in half precision. The kernel corrects it by the row's sum of ``dS``,
    for the gradients of the prior. ``LSE`` is infinite for rows without visible keys and rows of the other launch.
    ``REST`` becomes a correction of the log-sum-exp in bits, so that weights sum to 1: at 300 nats, float32 is accurate
    to only 2e-5.
    """
    first_slot = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS
    batch, head = (tl.program_id(1) // heads).to(tl.int64), tl.program_id(1) % heads
    both = tl.program_id(1).to(tl.int64)
    lowest, farthest = _reach(lowest, farthest, REACH)
    unit = softmax_scale * LOG2_E if FAR is None else softmax_scale
    MASK_ALL: tl.constexpr = not (FIRST is None and QUERY_POSITIONS is None and PADDING is None and SLOTS is None)
    table = None if TABLE is None else TABLE + head.to(tl.int64) * table_head
    keys = KEY + batch * key_batch + (head // group).to(tl.int64) * key_head
    values = VALUE + batch * value_batch + (head // group).to(tl.int64) * value_head

    i = first_slot + tl.arange(0, ROWS)
    row = tl.minimum(i, num_queries - 1)
    q = _load_rows(QUERY + batch * query_batch + head.to(tl.int64) * query_head, row, query_row, D, BLOCK_D)
    o = _load_rows(OUT_GRAD + batch * grad_batch + head.to(tl.int64) * grad_head, row, grad_row, DV, BLOCK_DV)
    lse = tl.load(LSE + both * num_queries + row)
    lse_grad = tl.load(LSE_GRAD + both * num_queries + row)
    constant = tl.load(CONSTANT + both * num_queries + row)
    row_scale = _load(ROW_SCALE, both * num_queries + row[:, None])
    first = _load(FIRST, batch * num_queries + row[:, None])
    last = _load(LAST, batch * num_queries + row[:, None])
    own = _side(row[:, None], offset, QUERY_POSITIONS, QUERY_DOCUMENTS, OWN_HIGH, OWN_LOW, batch, both, num_queries)
    here, some = i < num_queries, 1
    if FAR is not None:
        here = here & (tl.load(FAR + both * num_queries + row) != 0)
        some = tl.max(here.to(tl.int32), 0)
    walk = _walk(
        first_slot, num_queries, num_keys, first, last, offset, lowest, farthest, some, both,
        QUERY_POSITIONS, COUNTS, SLOTS, ROWS, KEYS, SLOT, MASK_ALL,
    )  # fmt: skip

    query_grad = tl.zeros((ROWS, BLOCK_D), tl.float32)
    mass = tl.zeros((ROWS,), tl.float32)
    found = tl.zeros((ROWS,), tl.float32)
    mean = tl.zeros((ROWS,), tl.float32)
    scale_grad = tl.zeros((ROWS,), tl.float32)
    for MASKED in tl.static_range(1 if MASK_ALL else 0, 2):
        for step in range(walk.masked_steps if MASKED else walk.inner_steps):
            j = _start(step, walk, SLOTS, MASKED, SLOT, KEYS) + tl.arange(0, KEYS)
            column = tl.minimum(j, num_keys - 1)
            their = _side(column[None, :], 0, KEY_POSITIONS, KEY_DOCUMENTS, KEY_HIGH, KEY_LOW, batch, both, num_keys)
            d = own.position - their.position
            visible = None
            if MASKED:
                padded = _load(PADDING, batch * num_keys + column[None, :])
                visible = _visible(j[None, :], num_keys, d, lowest, farthest, first, last, own, their, padded)
            k = _load_rows(keys, column, key_row, D, BLOCK_D)
            v = _load_rows(values, column, value_row, DV, BLOCK_DV)
            bias = _read(table, highest - d, visible, TILED, ROWS, KEYS, WARPS, 1)
            products = _dot(q, tl.trans(k))
            logits, scaled = _biased(products, bias, own, their, visible, row_scale, unit, SCALES_PRIOR)
            weights = tl.exp2(_in_bits(logits - lse[:, None], FAR))
            logits_grad = weights * (_dot(o, tl.trans(v)) - constant[:, None])
            mass += tl.sum(weights, 1)
            found += tl.sum(logits_grad, 1)
            if SCALE_GRAD is not None:
                mean += tl.sum(weights * scaled, 1).to(tl.float32)
                scale_grad += tl.sum(logits_grad * scaled, 1).to(tl.float32)
            query_grad += _dot(logits_grad.to(k.dtype), k)

    blind = mass == 0.0
    inverse = tl.where(blind, 0.0, 1.0 / tl.where(blind, 1.0, mass))
    # The sum of dS must be dlse. The excess is the error of the constant.
    lack = tl.where(blind, 0.0, found * inverse - lse_grad)
    tl.store(CONSTANT + both * num_queries + i, constant + lack, mask=here)
    tl.store(REST + both * num_queries + i, tl.where(blind, 0.0, -tl.log2(tl.where(blind, 1.0, mass))), mask=here)
    if SCALE_GRAD is not None:
        scale_grad = scale_grad * inverse - lack * (mean * inverse)
        scale_grad = scale_grad * LN_2 if FAR is None else scale_grad
        tl.store(SCALE_GRAD + both * num_queries + i, scale_grad, mask=here)
    query_grad = query_grad * (inverse * softmax_scale)[:, None]
    if row_scale is not None:
        query_grad = query_grad * row_scale
    _store_rows(QUERY_GRAD + both * num_queries * D, i, here, query_grad, False, D, BLOCK_D)


@triton.jit(do_not_specialize=SIZES)
def key_grad_kernel(
    QUERY, KEY, VALUE, OUT_GRAD, LSE, LSE_GRAD, CONSTANT, REST, KEY_GRAD, VALUE_GRAD, BIAS_GRAD, TABLE_GRAD, UNITS,
    TABLE, KEY_HIGH, KEY_LOW, OWN_HIGH, OWN_LOW, ROW_SCALE, REACH, FIRST, LAST, QUERY_POSITIONS, KEY_POSITIONS,
    QUERY_DOCUMENTS, KEY_DOCUMENTS, PADDING, COUNTS, SLOTS, FAR,
    query_batch, query_head, query_row, key_batch, key_head, key_row, value_batch, value_head, value_row,
    grad_batch, grad_head, grad_row, table_head,
    heads, group, num_queries, num_keys, offset, highest, lowest, farthest, softmax_scale,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, SLOT: tl.constexpr, SCALES_PRIOR: tl.constexpr,
    TILED: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a block of keys and values, over all query heads that share them.

    The kernel also adds to the gradient of the table: sums of ``dS`` along diagonals or, if slots do not determine
    positions, each ``dS`` for itself. The sums are integers, in units of ``1 / UNITS``, so that they do not depend on
    the order of programs. ``FAR`` is a single number here: whether any row needs float64.
    """
    # The first keys, which the most queries see under a causal mask, start first without reordering.
    first_slot = tl.program_id(0) * KEYS
    kv_heads = heads // group
    batch, kv_head = (tl.program_id(1) // kv_heads).to(tl.int64), tl.program_id(1) % kv_heads
    lowest, farthest = _reach(lowest, farthest, REACH)
    unit = softmax_scale * LOG2_E if FAR is None else softmax_scale
    MASK_ALL: tl.constexpr = not (FIRST is None and QUERY_POSITIONS is None and PADDING is None and SLOTS is None)

    j = first_slot + tl.arange(0, KEYS)
    column = tl.minimum(j, num_keys - 1)
    k = _load_rows(KEY + batch * key_batch + kv_head.to(tl.int64) * key_head, column, key_row, D, BLOCK_D)
    v = _load_rows(VALUE + batch * value_batch + kv_head.to(tl.int64) * value_head, column, value_row, DV, BLOCK_DV)
    first = _load(FIRST, batch * num_keys + column[:, None])
    last = _load(LAST, batch * num_keys + column[:, None])
    place = _side(column[:, None], 0, KEY_POSITIONS, KEY_DOCUMENTS, None, None, batch, 0, num_keys)
    padded = _load(PADDING, batch * num_keys + column[:, None])
    some = 1 if FAR is None else tl.load(FAR).to(tl.int32)
    here = j < num_keys * some

    key_grad = tl.zeros((KEYS, BLOCK_D), tl.float32)
    value_grad = tl.zeros((KEYS, BLOCK_DV), tl.float32)
    for member in range(group):
        head = kv_head * group + member
        both = batch * heads + head
        queries = QUERY + batch * query_batch + head.to(tl.int64) * query_head
        out_grads = OUT_GRAD + batch * grad_batch + head.to(tl.int64) * grad_head
        table = None if TABLE is None else TABLE + head.to(tl.int64) * table_head
        high = _load(KEY_HIGH, both * num_keys + column[:, None], place.high)
        low = _load(KEY_LOW, both * num_keys + column[:, None], place.low)
        own = Side(place.position, place.document, high, low)
        bias_grad = tl.zeros((KEYS,), tl.float32)
        walk = _walk(
            first_slot, num_keys, num_queries, first, last, -offset, -farthest, -lowest, some, both,
            QUERY_POSITIONS, COUNTS, SLOTS, KEYS, ROWS, SLOT, MASK_ALL,
        )  # fmt: skip
        for MASKED in tl.static_range(1 if MASK_ALL else 0, 2):
            for step in range(walk.masked_steps if MASKED else walk.inner_steps):
                start = _start(step, walk, SLOTS, MASKED, SLOT, ROWS)
                i = start + tl.arange(0, ROWS)
                row = tl.minimum(i, num_queries - 1)
                row_scale = _load(ROW_SCALE, both * num_queries + row[None, :])
                q = _load_rows(queries, row, query_row, D, BLOCK_D)
                o = _load_rows(out_grads, row, grad_row, DV, BLOCK_DV)
                rest = tl.load(REST + both * num_queries + row)
                lse = tl.load(LSE + both * num_queries + row)
                constant = tl.load(CONSTANT + both * num_queries + row)
                products = _dot(k, tl.trans(q))
                their = _side(
                    row[None, :], offset, QUERY_POSITIONS, QUERY_DOCUMENTS, OWN_HIGH, OWN_LOW, batch, both, num_queries
                )
                d = their.position - own.position
                visible = None
                if MASKED:
                    visible = _visible(i[None, :], num_queries, d, lowest, farthest, first, last, their, own, padded)
                    visible = visible & here[:, None]
                bias = _read(table, highest - d, visible, TILED, KEYS, ROWS, WARPS, -1)
                logits, _ = _biased(products, bias, their, own, visible, row_scale, unit, SCALES_PRIOR)
                weights = tl.exp2(_in_bits(logits - lse[None, :], FAR) + rest[None, :])
                logits_grad = _dot(v, tl.trans(o)) - constant[None, :]
                if TABLE_GRAD is not None:
                    # If a weight is 1, this difference is rounding noise, which may be multiplied by 1e30, the
                    # derivative of a log-prior at a distance that only this pair has. The exact value is dlse.
                    lse_grad = tl.load(LSE_GRAD + both * num_queries + row)
                    logits_grad = tl.where(weights < 1.0, logits_grad, lse_grad[None, :])
                logits_grad *= weights
                value_grad += _dot(weights.to(o.dtype), o)
                scaled_grad = logits_grad if row_scale is None else logits_grad * row_scale
                key_grad += _dot(scaled_grad.to(q.dtype), q)
                prior_grad = scaled_grad if SCALES_PRIOR else logits_grad
                if BIAS_GRAD is not None:
                    bias_grad += tl.sum(prior_grad, 1)
                if TABLE_GRAD is not None:
                    places = TABLE_GRAD + head.to(tl.int64) * table_head + highest
                    if QUERY_POSITIONS is None:
                        places += first_slot - offset - start
                        _add_diagonals(places, prior_grad, tl.load(UNITS), TILED, KEYS, ROWS)
                    else:
                        units = (prior_grad.to(tl.float64) * tl.load(UNITS)).to(tl.int64)
                        tl.atomic_add(places - d, units, mask=visible, sem="relaxed")
        if BIAS_GRAD is not None:
            places = BIAS_GRAD + both * num_keys + j
            if FAR is not None:
                bias_grad += tl.load(places, mask=here, other=0.0)
            tl.store(places, bias_grad, mask=here)

    both = tl.program_id(1).to(tl.int64)
    key_grad = key_grad * softmax_scale
    ADD: tl.constexpr = FAR is not None
    _store_rows(KEY_GRAD + both * num_keys * D, j, here, key_grad, ADD, D, BLOCK_D)
    _store_rows(VALUE_GRAD + both * num_keys * DV, j, here, value_grad, ADD, DV, BLOCK_DV)
