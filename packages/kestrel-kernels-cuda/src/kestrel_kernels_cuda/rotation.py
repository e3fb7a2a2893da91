"""What kernels share to rotate heads: each dimension needs its own value and its partner's."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["partner", "rotated"]


@triton.jit
def partner(dim, ROTATED: tl.constexpr):
    """The dimension that ``dim`` is rotated with; itself where nothing is rotated."""
    half: tl.constexpr = ROTATED // 2
    return tl.where(dim < half, dim + half, tl.where(dim < ROTATED, dim - half, dim))


@triton.jit
def rotated(value, other, cos, sin, token, stride_cos, stride_sin, dim, ROTATED: tl.constexpr):
    """``value`` with its first dimensions rotated against ``other``, float32."""
    turns = dim < ROTATED
    c = tl.load(cos + token * stride_cos + dim, mask=turns, other=1.0)
    s = tl.load(sin + token * stride_sin + dim, mask=turns, other=0.0)
    return tl.where(turns, value * c + other * s, value)
