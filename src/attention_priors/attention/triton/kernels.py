"""The kernels of the Triton backend, and nothing else: ``triton_backend.py`` prepares what they read.

``i`` is a query's slot, ``j`` a key's; the distance is ``d = position of i - position of j``, and the log-prior of a
pair stands at place ``highest - d`` of its head's table. ``ROW_SCALE`` multiplies content and log-prior, or the content
alone. Logits are in nats. A pointer that is None is left out of the compiled kernel. Everything is accumulated in
float32, and each number is written by one program, or is an integer that several add to: results can be repeated.

What a pair of blocks needs beside content and table is told by these arguments, the same in every kernel:

``lowest``, ``farthest``, ``REACH``
    distances that are seen; ``REACH`` holds two numbers that narrow them down (a window).
``FIRST``, ``LAST``
    the key slots that each query may see, ``(B, Lq)`` (documents that are runs of slots); the other way round in
    the kernel that walks keys.
``QUERY_POSITIONS``, ``KEY_POSITIONS``, ``QUERY_DOCUMENTS``, ``KEY_DOCUMENTS``
    ``(B, L)``, where slots do not say it all; then ``offset`` has no meaning.
``PADDING``
    ``(B, Lk)``: keys nobody sees.
``FAR``
    ``(B, H, Lq)``: rows whose numbers are too large for float32. With it, a kernel computes those alone, in float64: it
    writes their rows, and adds to keys' and values'.
``COUNTS``, ``SLOTS``
    how many slots of ``SLOT`` keys (or queries) each slot of queries (or keys) has to visit, ``(B, H, n)``, and which,
    ``(B, H, n, m)``. Others are left out.
"""

# Triton compiles these functions from their source; to a type checker they are not quite Python.
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false, reportArgumentType=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
INTERPRETED: tl.constexpr = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""Whether Triton's interpreter runs these kernels, on the CPU."""
SIZES = ["num_queries", "num_keys", "offset", "highest", "lowest", "farthest"]
"""Integers that differ from call to call: no kernel is compiled anew for them."""


# ---- pieces


@triton.jit
def _dot(a, b):
    if INTERPRETED:
        # The interpreter would multiply the bits of a bfloat16. Products of two of them are exact in float32.
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _read(places):
    """Single numbers of a table, in float32 straight to where they are used.

    ``tl.load`` in a loop would have them copied to shared memory ahead of time, four bytes by four, which takes more
    instructions than the multiplications they are added to, and more room than keys and values.
    """
    if INTERPRETED or places.dtype.element_ty != tl.float32:
        return tl.load(places)
    else:
        return tl.inline_asm_elementwise(
            "ld.global.nc.f32 $0, [$1];", "=f,l", [places.to(tl.int64)], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def _load(pointer, places):
    return None if pointer is None else tl.load(pointer + places)


@triton.jit
def _load_rows(pointer, slots, stride, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr):
    """Some rows of a matrix whose columns lie side by side, zeros after the last column."""
    columns = tl.arange(0, BLOCK_WIDTH)
    places = pointer + slots.to(tl.int64)[:, None] * stride + columns[None, :]
    if WIDTH == BLOCK_WIDTH:
        return tl.load(places)
    return tl.load(places, mask=columns[None, :] < WIDTH, other=0.0)


@triton.jit
def _store_rows(pointer, slots, here, numbers, ADD: tl.constexpr, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr):
    """Write some rows of a matrix, or add to them; ``here`` says which."""
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


@triton.jit
def _visible(slots, number, d, lowest, farthest, first, last, query_document, key_document, padded):
    """Which pairs see each other; ``slots`` are those of the side that is walked."""
    visible = (slots < number) & (d >= lowest) & (d <= farthest)
    if first is not None:
        visible = visible & (slots >= first) & (slots < last)
    if query_document is not None:
        visible = visible & (query_document == key_document)
    if padded is not None:
        visible = visible & (padded == 0)
    return visible


@triton.jit
def _of_key(high, low, own_high, own_low):
    """A number of keys less one of queries, each a sum of two float32 numbers; or a float64 number of keys."""
    return high if low is None else (high - own_high) + (low - own_low)


@triton.jit
def _biased(
    products, d, visible, table, of_key, row_scale, highest, softmax_scale, SCALES_PRIOR: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Logits from dot products, and what the row's scale multiplied."""
    scaled = products * softmax_scale
    bias = 0.0
    if table is not None:
        # A pair that is not seen may have no place in the table.
        bias = _read(table + (tl.where(visible, highest - d, 0) if MASKED else highest - d))
    if of_key is not None:
        bias += of_key
    if row_scale is None:
        logits = scaled + bias
    elif SCALES_PRIOR:
        scaled = scaled + bias
        logits = scaled * row_scale
    else:
        logits = scaled * row_scale + bias
    if MASKED:
        logits = tl.where(visible, logits, float("-inf"))
    return logits, scaled


@triton.jit
def _power(nats):
    """``e`` to the power of it, in float32."""
    return tl.exp2((nats * LOG2_E).to(tl.float32))


@triton.jit
def _walk(some_from, all_from, all_to, some_to, number, BLOCK: tl.constexpr):
    """How to walk blocks: those in ``[some_from, some_to)`` hold visible pairs, ``[all_from, all_to)`` no others.

    Returns:
        Where the blocks without masks begin, how many they are, where those with masks begin, how many of them
        come before those without, and how many they are in all.
    """
    begin = tl.maximum(some_from, 0) // BLOCK * BLOCK
    end = tl.minimum(some_to, number)
    inner_from = tl.maximum((tl.maximum(all_from, 0) + BLOCK - 1) // BLOCK * BLOCK, begin)
    inner_to = tl.maximum(tl.minimum(all_to, number), 0) // BLOCK * BLOCK
    none = inner_to <= inner_from
    inner_from = tl.where(none, begin, inner_from)
    inner_to = tl.where(none, begin, inner_to)
    before = (inner_from - begin) // BLOCK
    after = (tl.maximum(end - inner_to, 0) + BLOCK - 1) // BLOCK
    return inner_from, (inner_to - inner_from) // BLOCK, begin, before, before + after


@triton.jit
def _whole_walk(some_from, some_to, number, BLOCK: tl.constexpr):
    """The same, all of them with masks."""
    begin = tl.maximum(some_from, 0) // BLOCK * BLOCK
    steps = (tl.maximum(tl.minimum(some_to, number) - begin, 0) + BLOCK - 1) // BLOCK
    return begin, 0, begin, 0, steps


@triton.jit
def _walk_along(
    first_slot, last_slot, first, last, offset, lowest, farthest, number, IRREGULAR, MASK_ALL, BLOCK: tl.constexpr
):
    """The walk over the keys of a block of queries; with the sign of each distance turned, over the queries of keys."""
    if IRREGULAR:
        return _whole_walk(number * 0, number, number, BLOCK)
    some_from = first_slot + offset - farthest
    some_to = last_slot + offset - lowest + 1
    if first is not None:
        some_from = tl.maximum(some_from, tl.min(first))
        some_to = tl.minimum(some_to, tl.max(last))
    if MASK_ALL:
        return _whole_walk(some_from, some_to, number, BLOCK)
    return _walk(some_from, last_slot + offset - farthest, first_slot + offset - lowest + 1, some_to, number, BLOCK)


@triton.jit
def _start(step, begin, before, inner, steps_inner, slots, SLOT: tl.constexpr, BLOCK: tl.constexpr):
    """The first slot of a block with masks: a listed one, or one before or after those without."""
    if slots is not None:
        return tl.load(slots + step // (SLOT // BLOCK)) * SLOT + step % (SLOT // BLOCK) * BLOCK
    return tl.where(step < before, begin + step * BLOCK, inner + (steps_inner + step - before) * BLOCK)


# ---- forward


@triton.jit(do_not_specialize=SIZES)
def forward_kernel(
    QUERY, KEY, VALUE, OUT, LSE, TABLE, KEY_HIGH, KEY_LOW, OWN_HIGH, OWN_LOW, ROW_SCALE, REACH, FIRST, LAST,
    QUERY_POSITIONS, KEY_POSITIONS, QUERY_DOCUMENTS, KEY_DOCUMENTS, PADDING, COUNTS, SLOTS, FAR,
    query_batch, query_head, query_row, key_batch, key_head, key_row, value_batch, value_head, value_row,
    table_head,
    heads, group, num_queries, num_keys, offset, highest, lowest, farthest, softmax_scale,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, SLOT: tl.constexpr, SCALES_PRIOR: tl.constexpr,
):  # fmt: skip
    """Output and log-sum-exp of a block of queries over one of ``S`` shares of what it sees, ``(B, H, S, Lq, ...)``."""
    # The last queries of a causal problem see the most keys: they go first.
    first_slot = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS
    batch, head = (tl.program_id(1) // heads).to(tl.int64), tl.program_id(1) % heads
    both = tl.program_id(1).to(tl.int64)
    lowest, farthest = _reach(lowest, farthest, REACH)
    table = None if TABLE is None else TABLE + head.to(tl.int64) * table_head
    keys = KEY + batch * key_batch + (head // group).to(tl.int64) * key_head
    values = VALUE + batch * value_batch + (head // group).to(tl.int64) * value_head

    i = first_slot + tl.arange(0, ROWS)
    # Rows after the last are copies of it, and are not stored.
    row = tl.minimum(i, num_queries - 1)
    queries = QUERY + batch * query_batch + head.to(tl.int64) * query_head
    q = _load_rows(queries, row, query_row, D, BLOCK_D)
    row_scale = _load(ROW_SCALE, both * num_queries + row[:, None])
    own_high = _load(OWN_HIGH, both * num_queries + row[:, None])
    own_low = _load(OWN_LOW, both * num_queries + row[:, None])
    first = _load(FIRST, batch * num_queries + row[:, None])
    last = _load(LAST, batch * num_queries + row[:, None])
    own = row + offset if QUERY_POSITIONS is None else tl.load(QUERY_POSITIONS + batch * num_queries + row)
    document = _load(QUERY_DOCUMENTS, batch * num_queries + row[:, None])

    MASK_ALL: tl.constexpr = (
        FIRST is not None or QUERY_POSITIONS is not None or PADDING is not None or SLOTS is not None
    )
    inner, inner_steps, begin, before, masked_steps = _walk_along(
        first_slot, tl.minimum(first_slot + ROWS, num_queries) - 1, first, last, offset, lowest, farthest, num_keys,
        QUERY_POSITIONS is not None, MASK_ALL, KEYS,
    )  # fmt: skip
    slots = None
    if SLOTS is not None:
        place = both * tl.cdiv(num_queries, SLOT) + first_slot // SLOT
        masked_steps = tl.load(COUNTS + place) * (SLOT // KEYS)
        slots = SLOTS + place * tl.cdiv(num_keys, SLOT)

    here = i < num_queries
    if FAR is not None:
        here = here & (tl.load(FAR + both * num_queries + row) != 0)
        some = tl.max(here.to(tl.int32), 0)
        inner_steps, masked_steps = inner_steps * some, masked_steps * some
    share, shares = tl.program_id(2), tl.num_programs(2)

    top = tl.full((ROWS,), float("-inf"), tl.float32 if FAR is None else tl.float64)
    total = tl.zeros((ROWS,), tl.float32)
    out = tl.zeros((ROWS, BLOCK_DV), tl.float32)
    for MASKED in tl.static_range(2):
        if MASKED == 1 or not MASK_ALL:
            steps = masked_steps if MASKED == 1 else inner_steps
            for step in range(steps * share // shares, steps * (share + 1) // shares):
                if MASKED == 1:
                    start = _start(step, begin, before, inner, inner_steps, slots, SLOT, KEYS)
                else:
                    start = inner + step * KEYS
                j = start + tl.arange(0, KEYS)
                column = tl.minimum(j, num_keys - 1)
                their = column if KEY_POSITIONS is None else tl.load(KEY_POSITIONS + batch * num_keys + column)
                d = own[:, None] - their[None, :]
                visible = None
                if MASKED == 1:
                    theirs = _load(KEY_DOCUMENTS, batch * num_keys + column[None, :])
                    padded = _load(PADDING, batch * num_keys + column[None, :])
                    visible = _visible(j[None, :], num_keys, d, lowest, farthest, first, last, document, theirs, padded)
                high = _load(KEY_HIGH, both * num_keys + column[None, :])
                low = _load(KEY_LOW, both * num_keys + column[None, :])
                of_key = None if KEY_HIGH is None else _of_key(high, low, own_high, own_low)
                k = _load_rows(keys, column, key_row, D, BLOCK_D)
                logits, _ = _biased(
                    _dot(q, tl.trans(k)), d, visible, table, of_key, row_scale, highest, softmax_scale, SCALES_PRIOR,
                    MASKED == 1,
                )  # fmt: skip
                new_top = tl.maximum(top, tl.max(logits, 1))
                # A row that has seen nothing yet: -inf less -inf would be nan.
                base = tl.where(new_top == float("-inf"), 0.0, new_top) if MASKED == 1 else new_top
                weights = _power(logits - base[:, None])
                fade = _power(top - base)
                total = total * fade + tl.sum(weights, 1)
                v = _load_rows(values, column, value_row, DV, BLOCK_DV)
                out = out * fade[:, None] + _dot(weights.to(v.dtype), v)
                top = new_top

    blind = total == 0.0
    out = out / tl.where(blind, 1.0, total)[:, None]
    lse = tl.where(blind, float("-inf"), top + tl.log(tl.where(blind, 1.0, total)))
    both = both * shares + share
    tl.store(LSE + both * num_queries + i, lse, mask=here)
    _store_rows(OUT + both * num_queries * DV, i, here, out, False, DV, BLOCK_DV)


# ---- backward


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
):  # fmt: skip
    """Gradients of a block of queries and of its row scales; then what the other kernels need to know of its rows.

    ``dS = P (dP - c)`` with ``c = Σ P dP - dlse``. ``CONSTANT`` comes in with an estimate of ``c``, made of the stored
    outputs, which may be in half precision; the row's own sum of ``dS`` says how wrong it is, and it is corrected for
    the gradients of the prior. ``LSE`` is infinite for rows that see nothing, or are another run's. ``REST`` becomes
    what the log-sum-exp lacks, in bits: a float32 of 300 nats is only good to 2e-5, and weights are to sum to 1.
    """
    first_slot = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS
    batch, head = (tl.program_id(1) // heads).to(tl.int64), tl.program_id(1) % heads
    both = tl.program_id(1).to(tl.int64)
    lowest, farthest = _reach(lowest, farthest, REACH)
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
    own_high = _load(OWN_HIGH, both * num_queries + row[:, None])
    own_low = _load(OWN_LOW, both * num_queries + row[:, None])
    first = _load(FIRST, batch * num_queries + row[:, None])
    last = _load(LAST, batch * num_queries + row[:, None])
    own = row + offset if QUERY_POSITIONS is None else tl.load(QUERY_POSITIONS + batch * num_queries + row)
    document = _load(QUERY_DOCUMENTS, batch * num_queries + row[:, None])

    MASK_ALL: tl.constexpr = (
        FIRST is not None or QUERY_POSITIONS is not None or PADDING is not None or SLOTS is not None
    )
    inner, inner_steps, begin, before, masked_steps = _walk_along(
        first_slot, tl.minimum(first_slot + ROWS, num_queries) - 1, first, last, offset, lowest, farthest, num_keys,
        QUERY_POSITIONS is not None, MASK_ALL, KEYS,
    )  # fmt: skip
    slots = None
    if SLOTS is not None:
        place = both * tl.cdiv(num_queries, SLOT) + first_slot // SLOT
        masked_steps = tl.load(COUNTS + place) * (SLOT // KEYS)
        slots = SLOTS + place * tl.cdiv(num_keys, SLOT)

    here = i < num_queries
    if FAR is not None:
        here = here & (tl.load(FAR + both * num_queries + row) != 0)
        some = tl.max(here.to(tl.int32), 0)
        inner_steps, masked_steps = inner_steps * some, masked_steps * some

    query_grad = tl.zeros((ROWS, BLOCK_D), tl.float32)
    mass = tl.zeros((ROWS,), tl.float32)
    found = tl.zeros((ROWS,), tl.float32)
    mean = tl.zeros((ROWS,), tl.float32)
    scale_grad = tl.zeros((ROWS,), tl.float32)
    for MASKED in tl.static_range(2):
        if MASKED == 1 or not MASK_ALL:
            for step in range(masked_steps if MASKED == 1 else inner_steps):
                if MASKED == 1:
                    start = _start(step, begin, before, inner, inner_steps, slots, SLOT, KEYS)
                else:
                    start = inner + step * KEYS
                j = start + tl.arange(0, KEYS)
                column = tl.minimum(j, num_keys - 1)
                their = column if KEY_POSITIONS is None else tl.load(KEY_POSITIONS + batch * num_keys + column)
                d = own[:, None] - their[None, :]
                visible = None
                if MASKED == 1:
                    theirs = _load(KEY_DOCUMENTS, batch * num_keys + column[None, :])
                    padded = _load(PADDING, batch * num_keys + column[None, :])
                    visible = _visible(j[None, :], num_keys, d, lowest, farthest, first, last, document, theirs, padded)
                high = _load(KEY_HIGH, both * num_keys + column[None, :])
                low = _load(KEY_LOW, both * num_keys + column[None, :])
                of_key = None if KEY_HIGH is None else _of_key(high, low, own_high, own_low)
                k = _load_rows(keys, column, key_row, D, BLOCK_D)
                v = _load_rows(values, column, value_row, DV, BLOCK_DV)
                logits, scaled = _biased(
                    _dot(q, tl.trans(k)), d, visible, table, of_key, row_scale, highest, softmax_scale, SCALES_PRIOR,
                    MASKED == 1,
                )  # fmt: skip
                weights = _power(logits - lse[:, None])
                logits_grad = weights * (_dot(o, tl.trans(v)) - constant[:, None])
                mass += tl.sum(weights, 1)
                found += tl.sum(logits_grad, 1)
                if SCALE_GRAD is not None:
                    mean += tl.sum(weights * scaled, 1).to(tl.float32)
                    scale_grad += tl.sum(logits_grad * scaled, 1).to(tl.float32)
                query_grad += _dot(logits_grad.to(k.dtype), k)

    blind = mass == 0.0
    inverse = tl.where(blind, 0.0, 1.0 / tl.where(blind, 1.0, mass))
    # The sum of dS is dlse, and what it has over is what the constant lacks.
    lack = tl.where(blind, 0.0, found * inverse - lse_grad)
    tl.store(CONSTANT + both * num_queries + i, constant + lack, mask=here)
    tl.store(REST + both * num_queries + i, tl.where(blind, 0.0, -tl.log2(tl.where(blind, 1.0, mass))), mask=here)
    if SCALE_GRAD is not None:
        scale_grad = scale_grad * inverse - lack * (mean * inverse)
        tl.store(SCALE_GRAD + both * num_queries + i, scale_grad, mask=here)
    query_grad = query_grad * (inverse * softmax_scale)[:, None]
    if row_scale is not None:
        query_grad = query_grad * row_scale
    _store_rows(QUERY_GRAD + both * num_queries * D, i, here, query_grad, False, D, BLOCK_D)


@triton.jit(do_not_specialize=SIZES)
def key_grad_kernel(
    QUERY, KEY, VALUE, OUT_GRAD, LSE, CONSTANT, REST, KEY_GRAD, VALUE_GRAD, BIAS_GRAD, TABLE_GRAD, UNITS, TABLE,
    KEY_HIGH, KEY_LOW, OWN_HIGH, OWN_LOW, ROW_SCALE, REACH, FIRST, LAST, QUERY_POSITIONS, KEY_POSITIONS,
    QUERY_DOCUMENTS, KEY_DOCUMENTS, PADDING, COUNTS, SLOTS, FAR,
    query_batch, query_head, query_row, key_batch, key_head, key_row, value_batch, value_head, value_row,
    grad_batch, grad_head, grad_row, table_head,
    heads, group, num_queries, num_keys, offset, highest, lowest, farthest, softmax_scale,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, SLOT: tl.constexpr, SCALES_PRIOR: tl.constexpr,
):  # fmt: skip
    """Gradients of a block of keys and values, over all query heads that share them.

    Where slots do not tell positions, also that of the table: in integers, whose sum is the same in any order;
    ``UNITS`` of them are 1. ``FAR`` is one number here: whether there are such rows.
    """
    # The first keys of a causal problem are seen by the most queries: they go first as it is.
    first_slot = tl.program_id(0) * KEYS
    kv_heads = heads // group
    batch, kv_head = (tl.program_id(1) // kv_heads).to(tl.int64), tl.program_id(1) % kv_heads
    lowest, farthest = _reach(lowest, farthest, REACH)

    j = first_slot + tl.arange(0, KEYS)
    column = tl.minimum(j, num_keys - 1)
    k = _load_rows(KEY + batch * key_batch + kv_head.to(tl.int64) * key_head, column, key_row, D, BLOCK_D)
    v = _load_rows(VALUE + batch * value_batch + kv_head.to(tl.int64) * value_head, column, value_row, DV, BLOCK_DV)
    first = _load(FIRST, batch * num_keys + column[:, None])
    last = _load(LAST, batch * num_keys + column[:, None])
    their = column if KEY_POSITIONS is None else tl.load(KEY_POSITIONS + batch * num_keys + column)
    theirs = _load(KEY_DOCUMENTS, batch * num_keys + column[:, None])
    padded = _load(PADDING, batch * num_keys + column[:, None])

    MASK_ALL: tl.constexpr = (
        FIRST is not None or QUERY_POSITIONS is not None or PADDING is not None or SLOTS is not None
    )
    inner, inner_steps, begin, before, masked_steps = _walk_along(
        first_slot, tl.minimum(first_slot + KEYS, num_keys) - 1, first, last, -offset, -farthest, -lowest, num_queries,
        QUERY_POSITIONS is not None, MASK_ALL, ROWS,
    )  # fmt: skip
    here = j < num_keys
    if FAR is not None:
        some = tl.load(FAR).to(tl.int32)
        here = j < num_keys * some
        inner_steps, masked_steps = inner_steps * some, masked_steps * some

    key_grad = tl.zeros((KEYS, BLOCK_D), tl.float32)
    value_grad = tl.zeros((KEYS, BLOCK_DV), tl.float32)
    for member in range(group):
        head = kv_head * group + member
        both = batch * heads + head
        queries = QUERY + batch * query_batch + head.to(tl.int64) * query_head
        out_grads = OUT_GRAD + batch * grad_batch + head.to(tl.int64) * grad_head
        table = None if TABLE is None else TABLE + head.to(tl.int64) * table_head
        high = _load(KEY_HIGH, both * num_keys + column[:, None])
        low = _load(KEY_LOW, both * num_keys + column[:, None])
        bias_grad = tl.zeros((KEYS,), tl.float32)
        slots = None
        if SLOTS is not None:
            place = both * tl.cdiv(num_keys, SLOT) + first_slot // SLOT
            masked_steps = tl.load(COUNTS + place) * (SLOT // ROWS)
            if FAR is not None:
                masked_steps = masked_steps * some
            slots = SLOTS + place * tl.cdiv(num_queries, SLOT)
        for MASKED in tl.static_range(2):
            if MASKED == 1 or not MASK_ALL:
                for step in range(masked_steps if MASKED == 1 else inner_steps):
                    if MASKED == 1:
                        start = _start(step, begin, before, inner, inner_steps, slots, SLOT, ROWS)
                    else:
                        start = inner + step * ROWS
                    i = start + tl.arange(0, ROWS)
                    row = tl.minimum(i, num_queries - 1)
                    if QUERY_POSITIONS is None:
                        own = row + offset
                    else:
                        own = tl.load(QUERY_POSITIONS + batch * num_queries + row)
                    d = own[None, :] - their[:, None]
                    visible = None
                    if MASKED == 1:
                        document = _load(QUERY_DOCUMENTS, batch * num_queries + row[None, :])
                        visible = _visible(
                            i[None, :], num_queries, d, lowest, farthest, first, last, document, theirs, padded
                        )
                    row_scale = _load(ROW_SCALE, both * num_queries + row[None, :])
                    q = _load_rows(queries, row, query_row, D, BLOCK_D)
                    o = _load_rows(out_grads, row, grad_row, DV, BLOCK_DV)
                    lse = tl.load(LSE + both * num_queries + row)
                    rest = tl.load(REST + both * num_queries + row)
                    constant = tl.load(CONSTANT + both * num_queries + row)
                    own_high = _load(OWN_HIGH, both * num_queries + row[None, :])
                    own_low = _load(OWN_LOW, both * num_queries + row[None, :])
                    of_key = None if KEY_HIGH is None else _of_key(high, low, own_high, own_low)
                    logits, _ = _biased(
                        _dot(k, tl.trans(q)), d, visible, table, of_key, row_scale, highest, softmax_scale,
                        SCALES_PRIOR, MASKED == 1,
                    )  # fmt: skip
                    weights = tl.exp2(((logits - lse[None, :]) * LOG2_E).to(tl.float32) + rest[None, :])
                    logits_grad = weights * (_dot(v, tl.trans(o)) - constant[None, :])
                    value_grad += _dot(weights.to(o.dtype), o)
                    scaled_grad = logits_grad if row_scale is None else logits_grad * row_scale
                    key_grad += _dot(scaled_grad.to(q.dtype), q)
                    prior_grad = scaled_grad if SCALES_PRIOR else logits_grad
                    if BIAS_GRAD is not None:
                        bias_grad += tl.sum(prior_grad, 1)
                    if TABLE_GRAD is not None:
                        places = TABLE_GRAD + head.to(tl.int64) * table_head + (highest - d)
                        units = (prior_grad.to(tl.float64) * tl.load(UNITS)).to(tl.int64)
                        tl.atomic_add(places, units, mask=visible & here[:, None], sem="relaxed")
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


@triton.jit(do_not_specialize=[*SIZES, "number", "strips_below"])
def table_grad_kernel(
    QUERY, KEY, VALUE, OUT_GRAD, LSE, LSE_GRAD, CONSTANT, REST, PARTS, TABLE, KEY_HIGH, KEY_LOW, OWN_HIGH, OWN_LOW,
    ROW_SCALE, REACH, FIRST, LAST, PADDING, KEPT, FAR,
    query_batch, query_head, query_row, key_batch, key_head, key_row, value_batch, value_head, value_row,
    grad_batch, grad_head, grad_row, table_head,
    heads, group, num_queries, num_keys, number, strips_below, offset, highest, lowest, farthest, softmax_scale,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, SLOT: tl.constexpr, SCALES_PRIOR: tl.constexpr,
):  # fmt: skip
    """The sums of ``dS`` along the diagonals of one strip of tiles, ``PARTS (B · H, strips, ROWS / KEYS + 1, KEYS)``.

    Tiles whose first key lies equally far from their first query hold the same distances, place by place. Their
    ``dS`` add up in registers, and diagonals are summed once, at the end. The log-prior of all of them is the same too:
    it is read once.
    """
    shift = (tl.program_id(0) - strips_below) * KEYS  # first key less first query
    batch, head = (tl.program_id(1) // heads).to(tl.int64), tl.program_id(1) % heads
    both = tl.program_id(1).to(tl.int64)
    lowest, farthest = _reach(lowest, farthest, REACH)
    queries = QUERY + batch * query_batch + head.to(tl.int64) * query_head
    out_grads = OUT_GRAD + batch * grad_batch + head.to(tl.int64) * grad_head
    keys = KEY + batch * key_batch + (head // group).to(tl.int64) * key_head
    values = VALUE + batch * value_batch + (head // group).to(tl.int64) * value_head

    local_i, local_j = tl.arange(0, ROWS), tl.arange(0, KEYS)
    d = offset - shift + local_i[:, None] - local_j[None, :]
    # Tiles at the edges hold pairs of tokens that are not there, at distances that are not in the table.
    entry = highest - d
    in_table = (entry >= 0) & (entry < number)
    bias = tl.load(TABLE + head.to(tl.int64) * table_head + entry, mask=in_table, other=0.0)

    # Tiles whose first query is in [begin, end) hold a key. All sizes are multiples of KEYS: none begins before one.
    begin = (tl.maximum(1 - KEYS - shift, 0) + ROWS - 1) // ROWS * ROWS
    end = tl.minimum(num_queries, num_keys - shift)
    if (offset - shift + ROWS - 1 < lowest) | (offset - shift - KEYS + 1 > farthest):
        end = begin
    if FAR is not None:
        end = tl.where(tl.load(FAR) != 0, end, begin)
    grad = tl.zeros((ROWS, KEYS), tl.float32)
    for first_slot in range(begin, end, ROWS):
        i = first_slot + local_i
        j = first_slot + shift + local_j
        row, column = tl.minimum(i, num_queries - 1), tl.minimum(j, num_keys - 1)
        first = _load(FIRST, batch * num_queries + row[:, None])
        last = _load(LAST, batch * num_queries + row[:, None])
        work = True
        if FIRST is not None:
            work = (tl.min(first) < first_slot + shift + KEYS) & (tl.max(last) > first_slot + shift)
        if KEPT is not None:
            place = (both * tl.cdiv(num_queries, SLOT) + first_slot // SLOT) * tl.cdiv(num_keys, SLOT)
            kept = tl.load(KEPT + place + (first_slot + shift) // SLOT) != 0
            work = kept if FIRST is None else work & kept
        if work:
            padded = _load(PADDING, batch * num_keys + column[None, :])
            visible = _visible(j[None, :], num_keys, d, lowest, farthest, first, last, None, None, padded)
            visible = visible & (i[:, None] < num_queries)
            q = _load_rows(queries, row, query_row, D, BLOCK_D)
            o = _load_rows(out_grads, row, grad_row, DV, BLOCK_DV)
            k = _load_rows(keys, column, key_row, D, BLOCK_D)
            v = _load_rows(values, column, value_row, DV, BLOCK_DV)
            logits = _dot(q, tl.trans(k)) * softmax_scale
            whole = bias
            if KEY_HIGH is not None:
                high = tl.load(KEY_HIGH + both * num_keys + column)[None, :]
                low = _load(KEY_LOW, both * num_keys + column[None, :])
                own_high = _load(OWN_HIGH, both * num_queries + row[:, None])
                own_low = _load(OWN_LOW, both * num_queries + row[:, None])
                whole = bias + _of_key(high, low, own_high, own_low)
            if ROW_SCALE is not None:
                row_scale = tl.load(ROW_SCALE + both * num_queries + row)[:, None]
                logits = (logits + whole) * row_scale if SCALES_PRIOR else logits * row_scale + whole
            else:
                logits = logits + whole
            logits = tl.where(visible, logits, float("-inf"))
            lse = tl.load(LSE + both * num_queries + row)
            rest = tl.load(REST + both * num_queries + row)
            constant = tl.load(CONSTANT + both * num_queries + row)
            lse_grad = tl.load(LSE_GRAD + both * num_queries + row)
            weights = tl.exp2(((logits - lse[:, None]) * LOG2_E).to(tl.float32) + rest[:, None])
            # Where a weight is 1 the rest is rounding noise, and what it would be multiplied by may be 1e30: the
            # derivative of a log-prior that only this pair has.
            logits_grad = tl.where(weights < 1.0, _dot(o, tl.trans(v)) - constant[:, None], lse_grad[:, None])
            logits_grad *= weights
            if SCALES_PRIOR:
                logits_grad *= row_scale
            grad += logits_grad

    # Turn row i by i places: diagonals become columns, those that ran over the edge one block of columns lower.
    turned = tl.gather(grad, (local_i[:, None] + local_j[None, :]) % KEYS, axis=1)
    lower = local_i[:, None] // KEYS + (local_i[:, None] % KEYS + local_j[None, :]) // KEYS
    parts = PARTS + (both * tl.num_programs(0) + tl.program_id(0)) * (ROWS + KEYS)
    for block in tl.static_range(ROWS // KEYS + 1):
        tl.store(parts + block * KEYS + local_j, tl.sum(tl.where(lower == block, turned, 0.0), 0))
