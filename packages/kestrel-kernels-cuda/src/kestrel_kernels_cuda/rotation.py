"""What kernels share to norm and rotate heads: each dimension needs its own value and its partner's."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["gains", "partner", "prepared", "rotated"]


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


@triton.jit
def gains(
    weight, head, heads, DIM: tl.constexpr, ROTATED: tl.constexpr, BLOCK: tl.constexpr, ADD_ONE: tl.constexpr
):
    """(factors of the norm of heads ``head`` [H, 1], those at the partners of their dimensions) [H, BLOCK], float32.

    Every head has the same; as a tile of the heads' shape, they need not be brought to it.
    """
    dim = tl.arange(0, BLOCK)[None, :] + 0 * head
    inside = (head < heads) & (dim < DIM)
    own = tl.load(weight + dim, mask=inside, other=0.0).to(tl.float32)
    other = own
    if ROTATED:
        turns = inside & (dim < ROTATED)
        other = tl.load(weight + partner(dim, ROTATED), mask=turns, other=0.0).to(tl.float32)
    if ADD_ONE:
        own += 1.0
        other += 1.0
    return own, other


@triton.jit
def prepared(
    x, gain, other_gain, cos, sin, token, head, heads, stride_t, stride_h, stride_cos, stride_sin, eps,
    DIM: tl.constexpr, ROTATED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Heads ``head`` [H, 1] of a token: normed when there are ``gains``, rotated when ROTATED; float32, zeros for those
    from ``heads`` on."""
    dim = tl.arange(0, BLOCK)[None, :] + 0 * head
    inside = (head < heads) & (dim < DIM)
    row = x + token * stride_t + head * stride_h
    value = tl.load(row + dim, mask=inside, other=0.0).to(tl.float32)
    other = value
    if ROTATED:
        turns = inside & (dim < ROTATED)
        other = tl.load(row + partner(dim, ROTATED), mask=turns, other=0.0).to(tl.float32)
    if gain is not None:
        scale = tl.rsqrt(tl.sum(value * value, axis=1)[:, None] / DIM + eps)
        value = value * scale * gain
        other = other * scale * other_gain
    if ROTATED:
        value = rotated(value, other, cos, sin, token, stride_cos, stride_sin, dim, ROTATED)
    return value
