"""The kernel of products of a few rows for sm_90: the memory unit streams the weight, tensor cores keep up.

A program takes ROWS rows of the weight (gated: of each half) as the left operand and all rows of the input as the
right one. Weights do not depend on the kernel before: they are on their way before this one waits for it, and little
enough shared memory is used that the next product's programs find room beside these.

Letters: M rows of the input, N outputs, K inputs of each.
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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = ["stream_kernel"]


@gluon.jit
def load_weight(w, w_at, up_at, ready, row, half, column, pred, GATED: gl.constexpr, BYTES: gl.constexpr):
    """Starts to bring a block of the weight; ``ready`` will have seen BYTES, the input's included."""
    mbarrier.expect(ready, BYTES, pred=pred)
    tma.async_copy_global_to_shared(w, [row, column], ready, w_at, pred=pred)
    if GATED:
        tma.async_copy_global_to_shared(w, [half + row, column], ready, up_at, pred=pred)


@gluon.jit
def sigmoid(x):
    """1 / (1 + e^-x)."""
    return 1.0 / (1.0 + gl.exp(-x))


@gluon.jit
def activated(y, KIND: gl.constexpr):
    """``y`` in float32 through the activation of an epilogue of ``ops.linear``."""
    if KIND == "gelu_tanh" or KIND == "gelu_tanh_mul":
        return y * sigmoid(1.5957691216057308 * (y + 0.044715 * y * y * y))  # (1 + tanh u) / 2 = σ(2u)
    elif KIND == "gelu":
        return 0.5 * y * (1.0 + gl.erf(y * 0.7071067811865476))
    elif KIND == "silu_mul":
        return y * sigmoid(y)
    else:
        return y


@gluon.jit(do_not_specialize=["m"])
def stream_kernel(
    w, x, bias_ptr, residual_ptr, out_ptr, m, n, residual_stride,
    K: gl.constexpr, SPLIT: gl.constexpr, STAGES: gl.constexpr, EPILOGUE: gl.constexpr, BIAS: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """``out`` [m, n] = epilogue(``x`` [m, K] · ``w`` [n or 2n, K] transposed), blocks as the descriptors have them.

    SPLIT programs share a tile's inputs; then ``out`` [SPLIT, m, n] is float32, for ``parts_kernel``.
    """
    ROWS: gl.constexpr = w.block_type.shape[0]
    BK: gl.constexpr = w.block_type.shape[1]
    BM: gl.constexpr = x.block_type.shape[0]
    GATED: gl.constexpr = EPILOGUE == "silu_mul" or EPILOGUE == "gelu_tanh_mul"
    HALVES: gl.constexpr = 2 if GATED else 1
    BYTES: gl.constexpr = HALVES * w.block_type.nbytes + x.block_type.nbytes
    KIND: gl.constexpr = x.dtype
    STEPS: gl.constexpr = K // BK
    WARPS: gl.constexpr = gl.num_warps()
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BM, 16])
    LANES: gl.constexpr = ROWS // 8 if ROWS < 256 else 32
    ACROSS: gl.constexpr = gl.BlockedLayout([8, 1], [LANES, 32 // LANES], [1, WARPS], [0, 1])
    if PDL:
        gdc_launch_dependents()
    tile = gl.program_id(0)
    part = gl.program_id(1)
    first = STEPS * part // SPLIT
    steps = STEPS * (part + 1) // SPLIT - first
    row = tile * ROWS
    w_at = gl.allocate_shared_memory(KIND, [STAGES, ROWS, BK], w.layout)
    up_at = w_at
    if GATED:
        up_at = gl.allocate_shared_memory(KIND, [STAGES, ROWS, BK], w.layout)
    x_at = gl.allocate_shared_memory(KIND, [STAGES, BM, BK], x.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(ready.index(s), count=1)
    fence_async_shared()
    for s in gl.static_range(STAGES):
        column = (first + s) * BK
        load_weight(w, w_at.index(s), up_at.index(s), ready.index(s), row, n, column, s < steps, GATED, BYTES)
    if PDL:
        gdc_wait()
    for s in gl.static_range(STAGES):
        column = (first + s) * BK
        tma.async_copy_global_to_shared(x, [0, column], ready.index(s), x_at.index(s), pred=s < steps)
    acc = gl.zeros([ROWS, BM], gl.float32, SUMS)
    acc_up = gl.zeros([ROWS, BM], gl.float32, SUMS)
    for i in range(steps):
        at = i % STAGES
        mbarrier.wait(ready.index(at), i // STAGES & 1)
        inputs = x_at.index(at).permute((1, 0))
        acc = warpgroup_mma(w_at.index(at), inputs, acc, is_async=True)
        if GATED:
            acc_up = warpgroup_mma(up_at.index(at), inputs, acc_up, is_async=True)
            acc, acc_up = warpgroup_mma_wait(0, [acc, acc_up])
        else:
            acc = warpgroup_mma_wait(0, [acc])
        more = i + STAGES < steps
        column = (first + i + STAGES) * BK
        load_weight(w, w_at.index(at), up_at.index(at), ready.index(at), row, n, column, more, GATED, BYTES)
        tma.async_copy_global_to_shared(x, [0, column], ready.index(at), x_at.index(at), pred=more)
    y = gl.convert_layout(acc, ACROSS)
    outputs = row + gl.arange(0, ROWS, gl.SliceLayout(1, ACROSS))[:, None]
    tokens = gl.arange(0, BM, gl.SliceLayout(0, ACROSS))[None, :]
    live = (outputs < n) & (tokens < m)
    if SPLIT > 1:
        gl.static_assert(not GATED, "gated products are not split")
        gl.store(out_ptr + (part * m + tokens) * n + outputs, y, mask=live)
        return
    if BIAS:
        y += gl.load(bias_ptr + outputs, mask=outputs < n, other=0.0).to(gl.float32)
    if GATED:
        up = gl.convert_layout(acc_up, ACROSS)
        if BIAS:
            up += gl.load(bias_ptr + n + outputs, mask=outputs < n, other=0.0).to(gl.float32)
        y = activated(y, EPILOGUE) * up
    elif EPILOGUE == "residual":
        y += gl.load(residual_ptr + tokens * residual_stride + outputs, mask=live, other=0.0).to(gl.float32)
    else:
        y = activated(y, EPILOGUE)
    gl.store(out_ptr + tokens * n + outputs, y.to(KIND), mask=live)
