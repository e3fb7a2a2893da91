"""Floating-point numbers as integers in the same order, so that a number and where it stands make one key."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["order_of", "value_of"]


@triton.jit
def order_of(x):
    """int32 keys in the order of float32 ``x``: equal for equal numbers (-0 and 0), NaN above all."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(x != x, 0x7FFFFFFF, order)


@triton.jit
def value_of(order):
    """The float32 of a key."""
    return tl.where(order < 0, order ^ 0x7FFFFFFF, order).to(tl.float32, bitcast=True)
