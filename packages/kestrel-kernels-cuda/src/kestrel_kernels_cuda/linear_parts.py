"""What the kernels of products share: activations, the epilogue of a tile, reading ahead."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["activate", "finish", "prefetch"]


@triton.jit
def activate(y, KIND: tl.constexpr):
    """``y`` in float32 through the activation of an epilogue of ``ops.linear``."""
    if KIND == "gelu_tanh" or KIND == "gelu_tanh_mul":
        return y * tl.sigmoid(1.5957691216057308 * (y + 0.044715 * y * y * y))  # (1 + tanh u) / 2 = σ(2u)
    elif KIND == "gelu":
        return 0.5 * y * (1.0 + tl.erf(y * 0.7071067811865476))
    elif KIND == "silu_mul":
        return y * tl.sigmoid(y)
    else:
        return y


@triton.jit
def finish(
    y, up, bias_ptr, residual_ptr, columns, places, live, half, EPILOGUE: tl.constexpr, BIAS: tl.constexpr
):
    """Sums ``y`` (and those of the other half, ``up``, when gated) to outputs, float32.

    ``columns``: of the output, broadcastable to y; ``places``: where y's elements are in ``residual_ptr``; ``live``:
    which of them exist; ``half``: columns of a gated output.
    """
    if BIAS:
        y += tl.load(bias_ptr + columns).to(tl.float32)
    if EPILOGUE == "silu_mul" or EPILOGUE == "gelu_tanh_mul":
        if BIAS:
            up += tl.load(bias_ptr + half + columns).to(tl.float32)
        return activate(y, EPILOGUE) * up
    elif EPILOGUE == "residual":
        return y + tl.load(residual_ptr + places, mask=live, other=0.0).to(tl.float32)
    else:
        return activate(y, EPILOGUE)


@triton.jit
def prefetch(pointers):
    """Asks for the cache lines at ``pointers`` to be brought into the second-level cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
