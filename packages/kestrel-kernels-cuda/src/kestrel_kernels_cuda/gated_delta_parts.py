"""What kernels of gated DeltaNet mixers share."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["add_pairs", "add_triples", "softplus", "stores_of"]


@triton.jit
def add_pairs(a, b, c, d):
    """Two sums at once."""
    return a + c, b + d


@triton.jit
def add_triples(a, b, c, d, e, f):
    """Three sums at once."""
    return a + d, b + e, c + f


@triton.jit
def softplus(x):
    """log(1 + e^x), exact to float32 for small results too."""
    small = tl.exp(-tl.abs(x))
    log1p = tl.where(small < 1e-3, small * (1.0 - 0.5 * small), tl.log(1.0 + small))
    return tl.maximum(x, 0.0) + log1p


@triton.jit
def stores_of(stores, num_stores, row):
    """How many checkpoints ``row`` has among ``stores`` [M, 3]."""
    found = tl.zeros((), tl.int32)
    for first in range(0, num_stores, 32):
        at = first + tl.arange(0, 32)
        inside = at < num_stores
        rows = tl.load(stores + at * 3, mask=inside, other=-1)
        counts = tl.load(stores + at * 3 + 1, mask=inside, other=0)
        found += tl.sum(((rows == row) & (counts > 0)).to(tl.int32))
    return found
