"""What keeps the memory busy before a product of torch's: its weight begins to arrive while smaller kernels run.

torch's kernels start when the one before has ended, and read nothing until then. A norm before a product, or a launch
that does nothing else, asks for the part of the weight that the product reads first.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kestrel_kernels_cuda.launch import Launch, power_of_two
from kestrel_kernels_cuda.linear_launch import Norm
from kestrel_kernels_cuda.linear_parts import start_next, wait_for_previous

__all__ = ["ahead_launch"]

PROGRAMS = 128  # that ask for the weight, about one to a processor
WARPS = 4


@triton.jit(do_not_specialize=["rows"])
def ahead_kernel(
    x_ptr, gain_ptr, shift_ptr, w_ptr, out_ptr, rows, n, x_stride, eps,
    K: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr, COLUMNS: tl.constexpr, PIECES: tl.constexpr,
    THREADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``out`` [rows, K] = norm(``x``), a program a row; and all programs together ask for COLUMNS numbers of each row
    of ``w`` [n, K], in PIECES that lie evenly in the row (0: of none)."""
    start_next(PDL)
    if COLUMNS > 0:
        for first in range(tl.program_id(0) * THREADS, n, tl.num_programs(0) * THREADS):
            row = tl.minimum(first + tl.arange(0, THREADS), n - 1).to(tl.int64)
            for piece in tl.static_range(PIECES):
                _bring(w_ptr + row * K + piece * (K // PIECES), COLUMNS // PIECES)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < K
    if NORM != "none":
        gain = tl.load(gain_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        if NORM == "rms_plus_one":
            gain += 1.0
        if NORM == "layer":
            shift = tl.load(shift_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    if NORM != "none":
        inside = inside & (row < rows)
        x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
        if NORM == "layer":
            x = tl.where(inside, x - tl.sum(x, 0) / K, 0.0)
        y = x * tl.rsqrt(tl.sum(x * x, 0) / K + eps) * gain
        if NORM == "layer":
            y += shift
        tl.store(out_ptr + row * K + columns, y.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _bring(pointers, COUNT: tl.constexpr):
    """Asks for COUNT 16-bit numbers from each of ``pointers`` on, one to a thread, for the second-level cache."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [pointers.to(tl.int64), tl.full(pointers.shape, COUNT * 2, tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


def ahead_launch(
    x: torch.Tensor, weight: torch.Tensor, norm: Norm | None, columns: int, pieces: int, *, overlaps: bool
) -> tuple[Launch, torch.Tensor]:
    """The launch that asks for ``columns`` numbers of each row of ``weight`` [n, K] in so many pieces, and norms ``x``
    [rows, K] meanwhile; and what it writes, [rows, K] (``x`` itself without a norm). ``overlaps``: whether it starts
    while the kernel before finishes; if not, it asks for nothing."""
    n, k = weight.shape
    rows = x.shape[0]
    out = x if norm is None else torch.empty((rows, k), dtype=x.dtype, device=x.device)
    meta: dict[str, Any] = {
        "K": k, "BLOCK": power_of_two(k), "NORM": "none" if norm is None else norm.kind,
        "COLUMNS": columns if overlaps and k % 8 == 0 else 0, "PIECES": pieces, "THREADS": 32 * WARPS,
        "PDL": overlaps, "num_warps": WARPS,
    }  # fmt: skip
    if overlaps:
        meta["launch_pdl"] = True
    gain = x if norm is None else norm.gain
    shift = x if norm is None or norm.shift is None else norm.shift
    args = (x, gain, shift, weight, out, rows, n, x.stride(0), 0.0 if norm is None else norm.eps)
    return Launch(ahead_kernel, (max(rows, PROGRAMS) if overlaps else rows,), args, meta), out
