"""The kernels of the Triton backend, and nothing else: ``triton_backend.py`` prepares what they read.

``i`` is a query's slot, ``j`` a key's; the distance is ``d = position of i - position of j``, and the log-prior of a
pair stands at place ``highest - d`` of its head's table. Logits are in nats. A pointer that is None is left out of the
compiled kernel. Everything is accumulated in float32, and each number is written by one program: no atomics.

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
``COUNTS``, ``SLOTS``
    how many slots of ``SLOT`` keys (or queries) each slot of queries (or keys) has to visit, ``(B, H, n)``, and which,
    ``(B, H, n, m)``. Others are left out.
"""

# Triton compiles these functions from their source; to a type checker they are not quite Python.
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false

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
    """Single numbers of a float32 table, straight to where they are used.

    ``tl.load`` in a loop would have them copied to shared memory ahead of time, four bytes by four, which takes more
    instructions than the multiplications they are added to, and more room than keys and values.
    """
    if INTERPRETED:
        return tl.load(places)
    return tl.inline_asm_elementwise(
        "ld.global.nc.f32 $0, [$1];", "=f,l", [places.to(tl.int64)], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _load_rows(pointer, slots, stride, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr):
    """Some rows of a matrix whose columns lie side by side, zeros after the last column."""
    columns = tl.arange(0, BLOCK_WIDTH)
    places = pointer + slots.to(tl.int64)[:, None] * stride + columns[None, :]
    if WIDTH == BLOCK_WIDTH:
        return tl.load(places)
    return tl.load(places, mask=columns[None, :] < WIDTH, other=0.0)


@triton.jit
def _store_rows(pointer, slots, number, numbers, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr):
    columns = tl.arange(0, BLOCK_WIDTH)
    places = pointer + slots.to(tl.int64)[:, None] * WIDTH + columns[None, :]
    tl.store(places, numbers, mask=(slots[:, None] < number) & (columns[None, :] < WIDTH))


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
    """A number of keys less one of queries, each a sum of two float32 numbers."""
    return (high - own_high) + (low - own_low)


@triton.jit
def _biased(products, d, visible, table, of_key, row_scale, highest, softmax_scale, MASKED: tl.constexpr):
    """Logits from dot products, and the log-prior that was added to them."""
    logits = products * softmax_scale
    bias = 0.0
    if table is not None:
        # A pair that is not seen may have no place in the table.
        bias = _read(table + (tl.where(visible, highest - d, 0) if MASKED else highest - d))
    if of_key is not None:
        bias += of_key
    if table is not None or of_key is not None:
        if row_scale is not None:
            logits += bias * row_scale
        else:
            logits += bias
    if MASKED:
        logits = tl.where(visible, logits, float("-inf"))
    return logits, bias


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
def _key_walk(
    first_slot, last_slot, first, last, offset, lowest, farthest, num_keys, IRREGULAR, MASK_ALL, BLOCK: tl.constexpr
):
    """The walk over the keys of a block of queries."""
    if IRREGULAR:
        return _whole_walk(num_keys * 0, num_keys, num_keys, BLOCK)
    some_from = first_slot + offset - farthest
    some_to = last_slot + offset - lowest + 1
    if first is not None:
        some_from = tl.maximum(some_from, tl.min(first))
        some_to = tl.minimum(some_to, tl.max(last))
    if MASK_ALL:
        return _whole_walk(some_from, some_to, num_keys, BLOCK)
    return _walk(some_from, last_slot + offset - farthest, first_slot + offset - lowest + 1, some_to, num_keys, BLOCK)


@triton.jit
def _query_walk(
    first_slot, last_slot, first, last, offset, lowest, farthest, num_queries, IRREGULAR, MASK_ALL, BLOCK: tl.constexpr
):
    """The walk over the queries of a block of keys."""
    if IRREGULAR:
        return _whole_walk(num_queries * 0, num_queries, num_queries, BLOCK)
    some_from = first_slot - offset + lowest
    some_to = last_slot - offset + farthest + 1
    if first is not None:
        some_from = tl.maximum(some_from, tl.min(first))
        some_to = tl.minimum(some_to, tl.max(last))
    if MASK_ALL:
        return _whole_walk(some_from, some_to, num_queries, BLOCK)
    return _walk(
        some_from, last_slot - offset + lowest, first_slot - offset + farthest + 1, some_to, num_queries, BLOCK
    )


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
    QUERY_POSITIONS, KEY_POSITIONS, QUERY_DOCUMENTS, KEY_DOCUMENTS, PADDING, COUNTS, SLOTS,
    query_batch, query_head, query_row, key_batch, key_head, key_row, value_batch, value_head, value_row,
    table_head,
    heads, group, num_queries, num_keys, offset, highest, lowest, farthest, softmax_scale,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, SLOT: tl.constexpr,
):  # fmt: skip
    """Output ``(B, H, Lq, Dv)`` and log-sum-exp ``(B, H, Lq)`` of a block of queries."""
    # The last queries of a causal problem see the most keys: they go first.
    first_slot = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS
    batch, head = (tl.program_id(1) // heads).to(tl.int64), tl.program_id(1) % heads
    both = tl.program_id(1).to(tl.int64)
    lowest, farthest = _reach(lowest, farthest, REACH)
    table = None if TABLE is None else TABLE + head * table_head
    keys = KEY + batch * key_batch + (head // group).to(tl.int64) * key_head
    values = VALUE + batch * value_batch + (head // group).to(tl.int64) * value_head

    i = first_slot + tl.arange(0, ROWS)
    # Rows after the last are copies of it, and are not stored.
    row = tl.minimum(i, num_queries - 1)
    queries = QUERY + batch * query_batch + head.to(tl.int64) * query_head
    q = _load_rows(queries, row, query_row, D, BLOCK_D)
    row_scale = None if ROW_SCALE is None else tl.load(ROW_SCALE + both * num_queries + row)[:, None]
    own_high = None if KEY_HIGH is None else tl.load(OWN_HIGH + both * num_queries + row)[:, None]
    own_low = None if KEY_HIGH is None else tl.load(OWN_LOW + both * num_queries + row)[:, None]
    first = None if FIRST is None else tl.load(FIRST + batch * num_queries + row)[:, None]
    last = None if LAST is None else tl.load(LAST + batch * num_queries + row)[:, None]
    own = row + offset if QUERY_POSITIONS is None else tl.load(QUERY_POSITIONS + batch * num_queries + row)
    document = None if QUERY_DOCUMENTS is None else tl.load(QUERY_DOCUMENTS + batch * num_queries + row)[:, None]

    MASK_ALL: tl.constexpr = (
        FIRST is not None or QUERY_POSITIONS is not None or PADDING is not None or SLOTS is not None
    )
    inner, inner_steps, begin, before, masked_steps = _key_walk(
        first_slot, tl.minimum(first_slot + ROWS, num_queries) - 1, first, last, offset, lowest, farthest, num_keys,
        QUERY_POSITIONS is not None, MASK_ALL, KEYS,
    )  # fmt: skip
    slots = None
    if SLOTS is not None:
        place = both * tl.cdiv(num_queries, SLOT) + first_slot // SLOT
        masked_steps = tl.load(COUNTS + place) * (SLOT // KEYS)
        slots = SLOTS + place * tl.cdiv(num_keys, SLOT)

    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    out = tl.zeros((ROWS, BLOCK_DV), tl.float32)
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
                    theirs = (
                        None if KEY_DOCUMENTS is None else tl.load(KEY_DOCUMENTS + batch * num_keys + column)[None, :]
                    )
                    padded = None if PADDING is None else tl.load(PADDING + batch * num_keys + column)[None, :]
                    visible = _visible(j[None, :], num_keys, d, lowest, farthest, first, last, document, theirs, padded)
                high = None if KEY_HIGH is None else tl.load(KEY_HIGH + both * num_keys + column)[None, :]
                low = None if KEY_HIGH is None else tl.load(KEY_LOW + both * num_keys + column)[None, :]
                of_key = None if KEY_HIGH is None else _of_key(high, low, own_high, own_low)
                k = _load_rows(keys, column, key_row, D, BLOCK_D)
                logits, _ = _biased(
                    _dot(q, tl.trans(k)), d, visible, table, of_key, row_scale, highest, softmax_scale, MASKED == 1
                )
                new_top = tl.maximum(top, tl.max(logits, 1))
                # A row that has seen nothing yet: -inf less -inf would be nan.
                base = tl.where(new_top == float("-inf"), 0.0, new_top) if MASKED == 1 else new_top
                weights = tl.exp2((logits - base[:, None]) * LOG2_E)
                fade = tl.exp2((top - base) * LOG2_E)
                total = total * fade + tl.sum(weights, 1)
                v = _load_rows(values, column, value_row, DV, BLOCK_DV)
                out = out * fade[:, None] + _dot(weights.to(v.dtype), v)
                top = new_top

    blind = total == 0.0
    out = out / tl.where(blind, 1.0, total)[:, None]
    lse = tl.where(blind, float("-inf"), top + tl.log(tl.where(blind, 1.0, total)))
    tl.store(LSE + both * num_queries + i, lse, mask=i < num_queries)
    _store_rows(OUT + both * num_queries * DV, i, num_queries, out.to(OUT.dtype.element_ty), DV, BLOCK_DV)


# ---- backward


@triton.jit(do_not_specialize=SIZES)
def query_grad_kernel(
    QUERY, KEY, VALUE, OUT_GRAD, LSE, LSE_GRAD, CONSTANT, REST, QUERY_GRAD, SCALE_GRAD, TABLE, KEY_HIGH, KEY_LOW,
    OWN_HIGH, OWN_LOW, ROW_SCALE, REACH, FIRST, LAST, QUERY_POSITIONS, KEY_POSITIONS, QUERY_DOCUMENTS,
    KEY_DOCUMENTS, PADDING, COUNTS, SLOTS,
    query_batch, query_head, query_row, key_batch, key_head, key_row, value_batch, value_head, value_row,
    grad_batch, grad_head, grad_row, table_head,
    heads, group, num_queries, num_keys, offset, highest, lowest, farthest, softmax_scale,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, SLOT: tl.constexpr,
):  # fmt: skip
    """Gradients of a block of queries and of its row scales; then what the other kernels need to know of its rows.

    ``dS = P (dP - c)`` with ``c = Σ P dP - dlse``. ``CONSTANT`` comes in with an estimate of ``c``, made of the stored
    outputs, which may be in half precision; the row's own sum of ``dS`` says how wrong it is, and it is corrected for
    the gradients of the prior. ``LSE`` is 0 for rows that see nothing. ``REST`` becomes what the log-sum-exp lacks, in
    bits: a float32 of 1000 nats is only good to 6e-5, and weights are to sum to 1.
    """
    first_slot = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS
    batch, head = (tl.program_id(1) // heads).to(tl.int64), tl.program_id(1) % heads
    both = tl.program_id(1).to(tl.int64)
    lowest, farthest = _reach(lowest, farthest, REACH)
    table = None if TABLE is None else TABLE + head * table_head
    keys = KEY + batch * key_batch + (head // group).to(tl.int64) * key_head
    values = VALUE + batch * value_batch + (head // group).to(tl.int64) * value_head

    i = first_slot + tl.arange(0, ROWS)
    row = tl.minimum(i, num_queries - 1)
    q = _load_rows(QUERY + batch * query_batch + head.to(tl.int64) * query_head, row, query_row, D, BLOCK_D)
    o = _load_rows(OUT_GRAD + batch * grad_batch + head.to(tl.int64) * grad_head, row, grad_row, DV, BLOCK_DV)
    lse = tl.load(LSE + both * num_queries + row)
    lse_grad = tl.load(LSE_GRAD + both * num_queries + row)
    constant = tl.load(CONSTANT + both * num_queries + row)
    row_scale = None if ROW_SCALE is None else tl.load(ROW_SCALE + both * num_queries + row)[:, None]
    own_high = None if KEY_HIGH is None else tl.load(OWN_HIGH + both * num_queries + row)[:, None]
    own_low = None if KEY_HIGH is None else tl.load(OWN_LOW + both * num_queries + row)[:, None]
    first = None if FIRST is None else tl.load(FIRST + batch * num_queries + row)[:, None]
    last = None if LAST is None else tl.load(LAST + batch * num_queries + row)[:, None]
    own = row + offset if QUERY_POSITIONS is None else tl.load(QUERY_POSITIONS + batch * num_queries + row)
    document = None if QUERY_DOCUMENTS is None else tl.load(QUERY_DOCUMENTS + batch * num_queries + row)[:, None]

    MASK_ALL: tl.constexpr = (
        FIRST is not None or QUERY_POSITIONS is not None or PADDING is not None or SLOTS is not None
    )
    inner, inner_steps, begin, before, masked_steps = _key_walk(
        first_slot, tl.minimum(first_slot + ROWS, num_queries) - 1, first, last, offset, lowest, farthest, num_keys,
        QUERY_POSITIONS is not None, MASK_ALL, KEYS,
    )  # fmt: skip
    slots = None
    if SLOTS is not None:
        place = both * tl.cdiv(num_queries, SLOT) + first_slot // SLOT
        masked_steps = tl.load(COUNTS + place) * (SLOT // KEYS)
        slots = SLOTS + place * tl.cdiv(num_keys, SLOT)

    query_grad = tl.zeros((ROWS, BLOCK_D), tl.float32)
    mass = tl.zeros((ROWS,), tl.float32)
    found = tl.zeros((ROWS,), tl.float32)
    mean_bias = tl.zeros((ROWS,), tl.float32)
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
                    theirs = (
                        None if KEY_DOCUMENTS is None else tl.load(KEY_DOCUMENTS + batch * num_keys + column)[None, :]
                    )
                    padded = None if PADDING is None else tl.load(PADDING + batch * num_keys + column)[None, :]
                    visible = _visible(j[None, :], num_keys, d, lowest, farthest, first, last, document, theirs, padded)
                high = None if KEY_HIGH is None else tl.load(KEY_HIGH + both * num_keys + column)[None, :]
                low = None if KEY_HIGH is None else tl.load(KEY_LOW + both * num_keys + column)[None, :]
                of_key = None if KEY_HIGH is None else _of_key(high, low, own_high, own_low)
                k = _load_rows(keys, column, key_row, D, BLOCK_D)
                v = _load_rows(values, column, value_row, DV, BLOCK_DV)
                logits, bias = _biased(
                    _dot(q, tl.trans(k)), d, visible, table, of_key, row_scale, highest, softmax_scale, MASKED == 1
                )
                weights = tl.exp2((logits - lse[:, None]) * LOG2_E)
                logits_grad = weights * (_dot(o, tl.trans(v)) - constant[:, None])
                mass += tl.sum(weights, 1)
                found += tl.sum(logits_grad, 1)
                if SCALE_GRAD is not None:
                    mean_bias += tl.sum(weights * bias, 1)
                    scale_grad += tl.sum(logits_grad * bias, 1)
                query_grad += _dot(logits_grad.to(k.dtype), k)

    blind = mass == 0.0
    inverse = tl.where(blind, 0.0, 1.0 / tl.where(blind, 1.0, mass))
    # The sum of dS is dlse, and what it has over is what the constant lacks.
    lack = tl.where(blind, 0.0, found * inverse - lse_grad)
    inside = i < num_queries
    tl.store(CONSTANT + both * num_queries + i, constant + lack, mask=inside)
    tl.store(REST + both * num_queries + i, tl.where(blind, 0.0, -tl.log2(tl.where(blind, 1.0, mass))), mask=inside)
    if SCALE_GRAD is not None:
        scale_grad = scale_grad * inverse - lack * (mean_bias * inverse)
        tl.store(SCALE_GRAD + both * num_queries + i, scale_grad, mask=inside)
    query_grad = query_grad * (inverse * softmax_scale)[:, None]
    _store_rows(
        QUERY_GRAD + both * num_queries * D, i, num_queries, query_grad.to(QUERY_GRAD.dtype.element_ty), D, BLOCK_D
    )


@triton.jit(do_not_specialize=SIZES)
def key_grad_kernel(
    QUERY, KEY, VALUE, OUT_GRAD, LSE, CONSTANT, REST, KEY_GRAD, VALUE_GRAD, BIAS_GRAD, TABLE, KEY_HIGH, KEY_LOW,
    OWN_HIGH, OWN_LOW, ROW_SCALE, REACH, FIRST, LAST, QUERY_POSITIONS, KEY_POSITIONS, QUERY_DOCUMENTS,
    KEY_DOCUMENTS, PADDING, COUNTS, SLOTS,
    query_batch, query_head, query_row, key_batch, key_head, key_row, value_batch, value_head, value_row,
    grad_batch, grad_head, grad_row, table_head,
    heads, group, num_queries, num_keys, offset, highest, lowest, farthest, softmax_scale,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, SLOT: tl.constexpr,
):  # fmt: skip
    """Gradients of a block of keys and values, over all query heads that share them."""
    # The first keys of a causal problem are seen by the most queries: they go first as it is.
    first_slot = tl.program_id(0) * KEYS
    kv_heads = heads // group
    batch, kv_head = (tl.program_id(1) // kv_heads).to(tl.int64), tl.program_id(1) % kv_heads
    lowest, farthest = _reach(lowest, farthest, REACH)

    j = first_slot + tl.arange(0, KEYS)
    column = tl.minimum(j, num_keys - 1)
    k = _load_rows(KEY + batch * key_batch + kv_head.to(tl.int64) * key_head, column, key_row, D, BLOCK_D)
    v = _load_rows(VALUE + batch * value_batch + kv_head.to(tl.int64) * value_head, column, value_row, DV, BLOCK_DV)
    first = None if FIRST is None else tl.load(FIRST + batch * num_keys + column)[:, None]
    last = None if LAST is None else tl.load(LAST + batch * num_keys + column)[:, None]
    their = column if KEY_POSITIONS is None else tl.load(KEY_POSITIONS + batch * num_keys + column)
    theirs = None if KEY_DOCUMENTS is None else tl.load(KEY_DOCUMENTS + batch * num_keys + column)[:, None]
    padded = None if PADDING is None else tl.load(PADDING + batch * num_keys + column)[:, None]

    MASK_ALL: tl.constexpr = (
        FIRST is not None or QUERY_POSITIONS is not None or PADDING is not None or SLOTS is not None
    )
    inner, inner_steps, begin, before, masked_steps = _query_walk(
        first_slot, tl.minimum(first_slot + KEYS, num_keys) - 1, first, last, offset, lowest, farthest, num_queries,
        QUERY_POSITIONS is not None, MASK_ALL, ROWS,
    )  # fmt: skip
    key_grad = tl.zeros((KEYS, BLOCK_D), tl.float32)
    value_grad = tl.zeros((KEYS, BLOCK_DV), tl.float32)
    for member in range(group):
        head = kv_head * group + member
        both = batch * heads + head
        queries = QUERY + batch * query_batch + head.to(tl.int64) * query_head
        out_grads = OUT_GRAD + batch * grad_batch + head.to(tl.int64) * grad_head
        table = None if TABLE is None else TABLE + head * table_head
        high = None if KEY_HIGH is None else tl.load(KEY_HIGH + both * num_keys + column)[:, None]
        low = None if KEY_HIGH is None else tl.load(KEY_LOW + both * num_keys + column)[:, None]
        bias_grad = tl.zeros((KEYS,), tl.float32)
        slots = None
        if SLOTS is not None:
            place = both * tl.cdiv(num_keys, SLOT) + first_slot // SLOT
            masked_steps = tl.load(COUNTS + place) * (SLOT // ROWS)
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
                        document = None
                        if QUERY_DOCUMENTS is not None:
                            document = tl.load(QUERY_DOCUMENTS + batch * num_queries + row)[None, :]
                        visible = _visible(
                            i[None, :], num_queries, d, lowest, farthest, first, last, document, theirs, padded
                        )
                    row_scale = None if ROW_SCALE is None else tl.load(ROW_SCALE + both * num_queries + row)[None, :]
                    q = _load_rows(queries, row, query_row, D, BLOCK_D)
                    o = _load_rows(out_grads, row, grad_row, DV, BLOCK_DV)
                    lse = tl.load(LSE + both * num_queries + row)
                    rest = tl.load(REST + both * num_queries + row)
                    constant = tl.load(CONSTANT + both * num_queries + row)
                    own_high = None if KEY_HIGH is None else tl.load(OWN_HIGH + both * num_queries + row)[None, :]
                    own_low = None if KEY_HIGH is None else tl.load(OWN_LOW + both * num_queries + row)[None, :]
                    of_key = None if KEY_HIGH is None else _of_key(high, low, own_high, own_low)
                    logits, _ = _biased(
                        _dot(k, tl.trans(q)),
                        d,
                        visible,
                        table,
                        of_key,
                        row_scale,
                        highest,
                        softmax_scale,
                        MASKED == 1,  # pyright: ignore[reportArgumentType]
                    )
                    weights = tl.exp2((logits - lse[None, :]) * LOG2_E + rest[None, :])
                    logits_grad = weights * (_dot(v, tl.trans(o)) - constant[None, :])
                    value_grad += _dot(weights.to(o.dtype), o)
                    key_grad += _dot(logits_grad.to(q.dtype), q)
                    if BIAS_GRAD is not None:
                        bias_grad += tl.sum(logits_grad if row_scale is None else logits_grad * row_scale, 1)
        if BIAS_GRAD is not None:
            tl.store(BIAS_GRAD + both * num_keys + j, bias_grad, mask=j < num_keys)

    both = tl.program_id(1).to(tl.int64)
    key_grad = key_grad * softmax_scale
    _store_rows(KEY_GRAD + both * num_keys * D, j, num_keys, key_grad.to(KEY_GRAD.dtype.element_ty), D, BLOCK_D)
    _store_rows(
        VALUE_GRAD + both * num_keys * DV, j, num_keys, value_grad.to(VALUE_GRAD.dtype.element_ty), DV, BLOCK_DV
    )


@triton.jit(do_not_specialize=[*SIZES, "number", "strips_below"])
def table_grad_kernel(
    QUERY, KEY, VALUE, OUT_GRAD, LSE, LSE_GRAD, CONSTANT, REST, PARTS, TABLE, KEY_HIGH, KEY_LOW, OWN_HIGH, OWN_LOW,
    ROW_SCALE, REACH, FIRST, LAST, PADDING, KEPT,
    query_batch, query_head, query_row, key_batch, key_head, key_row, value_batch, value_head, value_row,
    grad_batch, grad_head, grad_row, table_head,
    heads, group, num_queries, num_keys, number, strips_below, offset, highest, lowest, farthest, softmax_scale,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, SLOT: tl.constexpr,
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
    bias = tl.load(TABLE + head * table_head + entry, mask=in_table, other=0.0)

    # Tiles whose first query is in [begin, end) hold a key. All sizes are multiples of KEYS: none begins before one.
    begin = (tl.maximum(1 - KEYS - shift, 0) + ROWS - 1) // ROWS * ROWS
    end = tl.minimum(num_queries, num_keys - shift)
    if (offset - shift + ROWS - 1 < lowest) | (offset - shift - KEYS + 1 > farthest):
        end = begin
    grad = tl.zeros((ROWS, KEYS), tl.float32)
    for first_slot in range(begin, end, ROWS):
        i = first_slot + local_i
        j = first_slot + shift + local_j
        row, column = tl.minimum(i, num_queries - 1), tl.minimum(j, num_keys - 1)
        first = None if FIRST is None else tl.load(FIRST + batch * num_queries + row)[:, None]
        last = None if LAST is None else tl.load(LAST + batch * num_queries + row)[:, None]
        work = True
        if FIRST is not None:
            work = (tl.min(first) < first_slot + shift + KEYS) & (tl.max(last) > first_slot + shift)
        if KEPT is not None:
            place = (both * tl.cdiv(num_queries, SLOT) + first_slot // SLOT) * tl.cdiv(num_keys, SLOT)
            kept = tl.load(KEPT + place + (first_slot + shift) // SLOT) != 0
            work = kept if FIRST is None else work & kept
        if work:
            padded = None if PADDING is None else tl.load(PADDING + batch * num_keys + column)[None, :]
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
                low = tl.load(KEY_LOW + both * num_keys + column)[None, :]
                own_high = tl.load(OWN_HIGH + both * num_queries + row)[:, None]
                own_low = tl.load(OWN_LOW + both * num_queries + row)[:, None]
                whole = bias + _of_key(high, low, own_high, own_low)
            if ROW_SCALE is not None:
                row_scale = tl.load(ROW_SCALE + both * num_queries + row)[:, None]
                logits += whole * row_scale
            else:
                logits += whole
            logits = tl.where(visible, logits, float("-inf"))
            lse = tl.load(LSE + both * num_queries + row)
            rest = tl.load(REST + both * num_queries + row)
            constant = tl.load(CONSTANT + both * num_queries + row)
            lse_grad = tl.load(LSE_GRAD + both * num_queries + row)
            weights = tl.exp2((logits - lse[:, None]) * LOG2_E + rest[:, None])
            # Where a weight is 1 the rest is rounding noise, and what it would be multiplied by may be 1e30: the
            # derivative of a log-prior that only this pair has.
            logits_grad = tl.where(weights < 1.0, _dot(o, tl.trans(v)) - constant[:, None], lse_grad[:, None])
            logits_grad *= weights
            if ROW_SCALE is not None:
                logits_grad *= row_scale
            grad += logits_grad

    # Turn row i by i places: diagonals become columns, those that ran over the edge one block of columns lower.
    turned = tl.gather(grad, (local_i[:, None] + local_j[None, :]) % KEYS, axis=1)
    lower = local_i[:, None] // KEYS + (local_i[:, None] % KEYS + local_j[None, :]) // KEYS
    parts = PARTS + (both * tl.num_programs(0) + tl.program_id(0)) * (ROWS + KEYS)
    for block in tl.static_range(ROWS // KEYS + 1):
        tl.store(parts + block * KEYS + local_j, tl.sum(tl.where(lower == block, turned, 0.0), 0))
