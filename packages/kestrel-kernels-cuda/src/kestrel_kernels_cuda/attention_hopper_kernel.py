"""The kernel of vision attention for sm_90: one warp loads, groups of four warps each attend from 64 queries.

Every program stays on its multiprocessor and takes unit after unit: the GROUPS · 64 queries of one head of one item
that share its keys. A head dim of 72 is cut into 64 + 16 columns, the last of which are zeros from beyond the tensor.
The products of the next scores and of the last weights run while weights are made of the scores between.

Source: Shah et al. 2024, arXiv 2407.08608, "FlashAttention-3", algorithms 1 and 2.
Letters: N items, S positions of each, H heads, D head dim.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

__all__ = ["FIRST", "ROWS", "hopper_kernel"]

ROWS = 64  # queries of a group of four warps
FIRST = 64  # columns of the first part of a head

_ROWS = gl.constexpr(ROWS)


@gluon.jit
def exponential(x):
    """2^x, results below the smallest normal number as zero."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def highest(scores, N: gl.constexpr):
    """The maximum of each row, in short chains: a thread's numbers four by four."""
    parts = gl.reshape(scores, [scores.shape[0], N // 32, 4, 4, 2])
    parts = gl.max(gl.max(gl.max(parts, 4), 1), 1)
    found = gl.max(parts, 1)
    return gl.convert_layout(found, gl.SliceLayout(1, scores.type.layout))


@gluon.jit
def load(descriptor, item, row, head, column, ready, place):
    """Starts to bring a block of one head to ``place``."""
    whole = place._reinterpret(descriptor.dtype, descriptor.block_type.shape, descriptor.layout)
    tma.async_copy_global_to_shared(descriptor, [item, row, head, column], ready, whole)


@gluon.jit
def producer(
    inputs, places, barriers, length, tiles, heads, units,
    GROUPS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    HAS_SECOND: gl.constexpr,
):  # fmt: skip
    """Loads what the units of this program need, as soon as there is room."""
    q1, q2, k1, k2, v1, v2 = inputs
    q1_at, q2_at, k1_at, k2_at, v1_at, v2_at = places
    q_full, q_free, k_full, k_free, v_full, v_free, _ = barriers
    blocks = gl.cdiv(length, BLOCK_N)
    q_bytes: gl.constexpr = q1.block_type.nbytes + (q2.block_type.nbytes if HAS_SECOND else 0)
    k_bytes: gl.constexpr = k1.block_type.nbytes + (k2.block_type.nbytes if HAS_SECOND else 0)
    done = 0
    turn = 0
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        head = unit // tiles % heads
        item = unit // tiles // heads
        row = unit % tiles * (GROUPS * _ROWS)
        for c in gl.static_range(GROUPS):
            place = 2 * c + turn % 2
            mbarrier.wait(q_free.index(place), (turn // 2 & 1) ^ 1)
            mbarrier.expect(q_full.index(place), q_bytes)
            load(q1, item, row + c * _ROWS, head, 0, q_full.index(place), q1_at.index(place))
            if HAS_SECOND:
                load(q2, item, row + c * _ROWS, head, 64, q_full.index(place), q2_at.index(place))
        for i in range(blocks):
            stage = done % STAGES
            phase = (done // STAGES & 1) ^ 1
            at = (blocks - 1 - i) * BLOCK_N
            mbarrier.wait(k_free.index(stage), phase)
            mbarrier.expect(k_full.index(stage), k_bytes)
            load(k1, item, at, head, 0, k_full.index(stage), k1_at.index(stage))
            if HAS_SECOND:
                load(k2, item, at, head, 64, k_full.index(stage), k2_at.index(stage))
            mbarrier.wait(v_free.index(stage), phase)
            mbarrier.expect(v_full.index(stage), k_bytes)
            load(v1, item, at, head, 0, v_full.index(stage), v1_at.index(stage))
            if HAS_SECOND:
                load(v2, item, at, head, 64, v_full.index(stage), v2_at.index(stage))
            done += 1
        turn += 1  # noqa: SIM113


@gluon.jit
def scores_of(q1, q2, k1, k2, zeros, HAS_SECOND: gl.constexpr):
    """Scores of queries and keys, on their way."""
    scores = warpgroup_mma(q1, k1.permute((1, 0)), zeros, use_acc=False, is_async=True)
    if HAS_SECOND:
        scores = warpgroup_mma(q2, k2.permute((1, 0)), scores, is_async=True)
    return scores


@gluon.jit
def weights_of(scores, top, post):
    """2^((scores - top) · post)."""
    return exponential(scores * post - gl.expand_dims(top * post, 1))


@gluon.jit
def scaled(sums, factor):
    """Each row of ``sums`` times its ``factor``."""
    return sums * gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, sums.type.layout)), 1)


@gluon.jit
def add_values(weights, v1, v2, acc1, acc2, HAS_SECOND: gl.constexpr):
    """Sums of weighted values, on their way."""
    first = gl.convert_layout(weights, gl.DotOperandLayout(0, acc1.type.layout, 2))
    second = gl.convert_layout(weights, gl.DotOperandLayout(0, acc2.type.layout, 2))
    acc1 = warpgroup_mma(first, v1, acc1, is_async=True)
    if HAS_SECOND:
        acc2 = warpgroup_mma(second, v2, acc2, is_async=True)
    return acc1, acc2


@gluon.jit
def send(descriptor, item, row, head, column, place):
    """Starts to write a block of outputs, of which nothing lands beyond the tensor."""
    whole = place._reinterpret(descriptor.dtype, descriptor.block_type.shape, descriptor.layout)
    tma.async_copy_shared_to_global(descriptor, [item, row, head, column], whole)


@gluon.jit
def consumer(
    c: gl.constexpr, outputs, places, results, barriers, length, tiles, heads, units, post,
    GROUPS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    SECOND: gl.constexpr, TAKES_TURNS: gl.constexpr,
):  # fmt: skip
    """Attends from group ``c`` of the queries of each unit. The block of keys that may be part empty comes first."""
    o1, o2 = outputs
    q1_at, q2_at, k1_at, k2_at, v1_at, v2_at = places
    o1_at, o2_at = results
    q_full, q_free, k_full, k_free, v_full, v_free, turns = barriers
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O1: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    O2: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16 if SECOND == 0 else SECOND, 16])
    HAS_SECOND: gl.constexpr = SECOND > 0
    PRODUCTS: gl.constexpr = 2 if HAS_SECOND else 1  # that make up one of scores or of values
    WIDTH: gl.constexpr = 16 if SECOND == 0 else SECOND
    KIND: gl.constexpr = o1.dtype
    blocks = gl.cdiv(length, BLOCK_N)
    zeros = gl.zeros([_ROWS, BLOCK_N], gl.float32, S)
    columns = gl.arange(0, BLOCK_N, gl.SliceLayout(0, S))
    done = 0
    turn = 0
    step = 0
    if TAKES_TURNS and c == GROUPS - 1:
        mbarrier.arrive(turns.index(0), count=1)
    mbarrier.wait(q_full.index(2 * c), 0)
    mbarrier.wait(k_full.index(0), 0)
    scores = scores_of(
        q1_at.index(2 * c), q2_at.index(2 * c), k1_at.index(0), k2_at.index(0), zeros, HAS_SECOND
    )
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        place = 2 * c + turn % 2
        q1 = q1_at.index(place)
        q2 = q2_at.index(place)
        scores = warpgroup_mma_wait(0, [scores])
        mbarrier.arrive(k_free.index(done % STAGES), count=1)
        live = columns < length - (blocks - 1) * BLOCK_N
        scores = gl.where(gl.expand_dims(live, 0), scores, float("-inf"))
        top = highest(scores, BLOCK_N)
        weights = weights_of(scores, top, post)
        total = gl.sum(weights, 1)
        narrow = weights.to(KIND)
        acc1 = gl.zeros([_ROWS, 64], gl.float32, O1)
        acc2 = gl.zeros([_ROWS, WIDTH], gl.float32, O2)
        after = done + 1
        mbarrier.wait(k_full.index(after % STAGES), after // STAGES & 1, pred=blocks > 1)
        for i in range(1, blocks):
            last = done % STAGES
            last_phase = done // STAGES & 1
            done += 1
            stage = done % STAGES
            if TAKES_TURNS:
                mbarrier.wait(turns.index(c), step & 1)
            scores = scores_of(q1, q2, k1_at.index(stage), k2_at.index(stage), zeros, HAS_SECOND)
            mbarrier.wait(v_full.index(last), last_phase)
            acc1, acc2 = add_values(narrow, v1_at.index(last), v2_at.index(last), acc1, acc2, HAS_SECOND)
            if TAKES_TURNS:
                mbarrier.arrive(turns.index((c + 1) % GROUPS), count=1)
                step += 1
            scores = warpgroup_mma_wait(PRODUCTS, [scores])
            mbarrier.arrive(k_free.index(stage), count=1)
            higher = gl.maximum(top, highest(scores, BLOCK_N))
            weights = weights_of(scores, higher, post)
            shrink = exponential((top - higher) * post)
            top = higher
            total = total * shrink + gl.sum(weights, 1)
            narrow = weights.to(KIND)
            # the assembler would wait for the products first, were there not the wait for the next keys between
            after = done + 1
            mbarrier.wait(k_full.index(after % STAGES), after // STAGES & 1, pred=i + 1 < blocks)
            if HAS_SECOND:
                acc1, acc2, shrink = warpgroup_mma_wait(0, [acc1, acc2, shrink])
                acc2 = scaled(acc2, shrink)
            else:
                acc1, shrink = warpgroup_mma_wait(0, [acc1, shrink])
            mbarrier.arrive(v_free.index(last), count=1)
            acc1 = scaled(acc1, shrink)
        mbarrier.arrive(q_free.index(place), count=1)
        last = done % STAGES
        last_phase = done // STAGES & 1
        done += 1
        turn += 1  # noqa: SIM113
        # the next unit's first scores are made while this one's outputs are written; of the last unit, of what is there
        place = 2 * c + turn % 2
        stage = done % STAGES
        has_next = unit + gl.num_programs(0) < units
        mbarrier.wait(v_full.index(last), last_phase)
        mbarrier.wait(q_full.index(place), turn // 2 & 1, pred=has_next)
        mbarrier.wait(k_full.index(stage), done // STAGES & 1, pred=has_next)
        if TAKES_TURNS:
            mbarrier.wait(turns.index(c), step & 1)
        acc1, acc2 = add_values(narrow, v1_at.index(last), v2_at.index(last), acc1, acc2, HAS_SECOND)
        scores = scores_of(
            q1_at.index(place), q2_at.index(place), k1_at.index(stage), k2_at.index(stage), zeros, HAS_SECOND
        )
        if TAKES_TURNS:
            mbarrier.arrive(turns.index((c + 1) % GROUPS), count=1)
            step += 1
        if HAS_SECOND:
            acc1, acc2 = warpgroup_mma_wait(PRODUCTS, [acc1, acc2])
        else:
            acc1 = warpgroup_mma_wait(PRODUCTS, [acc1])
        mbarrier.arrive(v_free.index(last), count=1)
        share = 1.0 / total
        tma.store_wait(0)
        o1_at.index(c).store(scaled(acc1, share).to(KIND))
        if HAS_SECOND:
            o2_at.index(c).store(scaled(acc2, share).to(KIND))
        fence_async_shared()
        head = unit // tiles % heads
        item = unit // tiles // heads
        row = unit % tiles * (GROUPS * _ROWS) + c * _ROWS
        send(o1, item, row, head, 0, o1_at.index(c))
        if HAS_SECOND:
            send(o2, item, row, head, 64, o2_at.index(c))
    warpgroup_mma_wait(0, [scores])
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["length", "tiles", "heads", "units"])
def hopper_kernel(
    q1, q2, k1, k2, v1, v2, o1, o2, post, length, tiles, heads, units,
    SECOND: gl.constexpr, GROUPS: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, TAKES_TURNS: gl.constexpr,
):  # fmt: skip
    """Units of this program, ``units`` in all: ``tiles`` of queries for each head of each item."""
    HAS_SECOND: gl.constexpr = SECOND > 0
    WIDTH: gl.constexpr = 16 if SECOND == 0 else SECOND
    KIND: gl.constexpr = q1.dtype
    WIDE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    SLIM: gl.constexpr = gl.NVMMASharedLayout(2 * WIDTH, 16, 2)
    LOADS: gl.constexpr = STAGES if HAS_SECOND else 1
    READS: gl.constexpr = GROUPS if HAS_SECOND else 1
    q1_at = gl.allocate_shared_memory(KIND, [2 * GROUPS, _ROWS, 64], WIDE)
    q2_at = gl.allocate_shared_memory(KIND, [2 * READS, _ROWS, WIDTH], SLIM)
    k1_at = gl.allocate_shared_memory(KIND, [STAGES, BLOCK_N, 64], WIDE)
    k2_at = gl.allocate_shared_memory(KIND, [LOADS, BLOCK_N, WIDTH], SLIM)
    v1_at = gl.allocate_shared_memory(KIND, [STAGES, BLOCK_N, 64], WIDE)
    v2_at = gl.allocate_shared_memory(KIND, [LOADS, BLOCK_N, WIDTH], SLIM)
    o1_at = gl.allocate_shared_memory(KIND, [GROUPS, _ROWS, 64], WIDE)
    o2_at = gl.allocate_shared_memory(KIND, [READS, _ROWS, WIDTH], SLIM)
    q_full = gl.allocate_shared_memory(gl.int64, [2 * GROUPS, 1], mbarrier.MBarrierLayout())
    q_free = gl.allocate_shared_memory(gl.int64, [2 * GROUPS, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    for c in gl.static_range(GROUPS):
        mbarrier.init(turns.index(c), count=1)
    for c in gl.static_range(2 * GROUPS):
        mbarrier.init(q_full.index(c), count=1)
        mbarrier.init(q_free.index(c), count=1)
    for s in gl.static_range(STAGES):
        mbarrier.init(k_full.index(s), count=1)
        mbarrier.init(k_free.index(s), count=GROUPS)
        mbarrier.init(v_full.index(s), count=1)
        mbarrier.init(v_free.index(s), count=GROUPS)
    fence_async_shared()
    outputs, places, results = (o1, o2), (q1_at, q2_at, k1_at, k2_at, v1_at, v2_at), (o1_at, o2_at)
    barriers = (q_full, q_free, k_full, k_free, v_full, v_free, turns)
    inputs = (q1, q2, k1, k2, v1, v2)
    if GROUPS == 3:
        gl.warp_specialize(
            [
                (consumer, (0, outputs, places, results, barriers, length, tiles, heads, units, post,
                            GROUPS, BLOCK_N, STAGES, SECOND, TAKES_TURNS)),
                (consumer, (1, outputs, places, results, barriers, length, tiles, heads, units, post,
                            GROUPS, BLOCK_N, STAGES, SECOND, TAKES_TURNS)),
                (consumer, (2, outputs, places, results, barriers, length, tiles, heads, units, post,
                            GROUPS, BLOCK_N, STAGES, SECOND, TAKES_TURNS)),
                (producer, (inputs, places, barriers, length, tiles, heads, units,
                            GROUPS, BLOCK_N, STAGES, HAS_SECOND)),
            ],
            [4, 4, 1], [160, 160, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (consumer, (0, outputs, places, results, barriers, length, tiles, heads, units, post,
                            GROUPS, BLOCK_N, STAGES, SECOND, TAKES_TURNS)),
                (consumer, (1, outputs, places, results, barriers, length, tiles, heads, units, post,
                            GROUPS, BLOCK_N, STAGES, SECOND, TAKES_TURNS)),
                (producer, (inputs, places, barriers, length, tiles, heads, units,
                            GROUPS, BLOCK_N, STAGES, HAS_SECOND)),
            ],
            [4, 1], [240, 24],
        )  # fmt: skip
