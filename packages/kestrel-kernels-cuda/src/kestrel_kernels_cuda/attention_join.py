"""How the keys of a decode row are divided over blocks, and how what the blocks found is joined.

Source: Milakov and Gimelshein 2018, arXiv 1805.02867 (how the parts of one softmax are joined).
Letters: B rows, K key/value heads, G heads of a group, padded, D head dim, S splits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kestrel.spi.batch import CrossView, PagedView
from kestrel_kernels_cuda.attention_parts import finish
from kestrel_kernels_cuda.linear_scratch import counters
from kestrel_kernels_cuda.overlap import start_next, wait_for_previous

__all__ = ["ANYWHERE", "INTEGERS", "arrivals_of", "join_group", "join_kernel", "share_of"]

INTEGERS = ("stride_table", "window", "wanted", "longest", "splits")
ANYWHERE = ("table", "lens")  # slices of buffers of many arrays, at any address


@triton.jit
def share_of(length, seen, wanted, longest, splits, HAS_WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """(first key of the first block, keys per block, blocks) of a row of ``length`` keys, seen from ``seen`` on: tiles
    over as many blocks as the row is worth, of 64 keys or more."""
    base = length * 0
    if HAS_WINDOW:
        base = tl.maximum(seen, 0) // BLOCK_N * BLOCK_N
    tiles = tl.cdiv(length - base, BLOCK_N)
    pieces = tl.cdiv(tiles, max(1, 64 // BLOCK_N))
    blocks = tl.maximum(tl.minimum(wanted, pieces), tl.cdiv(tiles, longest))
    each = tl.maximum(tl.cdiv(tiles, tl.maximum(tl.minimum(blocks, splits), 1)), 1)
    return base, each * BLOCK_N, tl.cdiv(tiles, each)


@triton.jit
def join_group(
    sums, tops, gate, out, row, first_head, members, blocks, splits, stride_gt, stride_gh,
    HEADS: tl.constexpr, D: tl.constexpr, D_P: tl.constexpr, GROUP_J: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Writes the outputs of ``members`` heads of a row from ``first_head`` on: CHUNK of its blocks at a time, in
    order."""
    member, at_d, at_s = tl.arange(0, GROUP_J), tl.arange(0, D_P), tl.arange(0, CHUNK)
    live_G = member < members
    heads_G = row.to(tl.int64) * HEADS + first_head + member
    top_G = tl.full([GROUP_J], float("-inf"), tl.float32)
    total_G = tl.zeros([GROUP_J], tl.float32)
    acc_GD = tl.zeros([GROUP_J, D_P], tl.float32)
    for first in range(0, blocks, CHUNK):
        block = first + at_s
        place_SG = heads_G[None, :] * splits + block[:, None]
        held_SG = (block < blocks)[:, None] & live_G[None, :]
        at_SGD = place_SG[:, :, None] * D + at_d[None, None, :]
        mask_SGD = held_SG[:, :, None] & (at_d < D)[None, None, :]
        sums_SGD = tl.load(sums + at_SGD, mask=mask_SGD, other=0.0, cache_modifier=".cg")
        tops_SG = tl.load(tops + place_SG * 2, mask=held_SG, other=float("-inf"), cache_modifier=".cg")
        totals_SG = tl.load(tops + place_SG * 2 + 1, mask=held_SG, other=0.0, cache_modifier=".cg")
        new_top_G = tl.maximum(top_G, tl.max(tops_SG, 0))
        safe_G = tl.where(new_top_G == float("-inf"), 0.0, new_top_G)
        shrink_G, factors_SG = tl.exp2(top_G - safe_G), tl.exp2(tops_SG - safe_G[None, :])
        total_G = total_G * shrink_G + tl.sum(totals_SG * factors_SG, 0)
        acc_GD = acc_GD * shrink_G[:, None] + tl.sum(sums_SGD * factors_SG[:, :, None], 0)
        top_G = new_top_G
    mask_GD = live_G[:, None] & (at_d < D)[None, :]
    gate_rows = row.to(tl.int64) * stride_gt + (first_head + member)[:, None] * stride_gh + at_d[None, :]
    result = finish(acc_GD, total_G, gate, gate_rows, mask_GD, out.dtype.element_ty)
    tl.store(out + heads_G[:, None] * D + at_d[None, :], result, mask=mask_GD)


@triton.jit(do_not_specialize=INTEGERS, do_not_specialize_on_alignment=ANYWHERE)
def join_kernel(
    sums, tops, lens, gate, out, stride_gt, stride_gh, window, wanted, longest, splits,
    NEW: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, D_P: tl.constexpr, BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr, HAS_WINDOW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The sums of a row's blocks joined, for one head; nothing where the only block has written the output."""
    start_next(PDL)
    wait_for_previous(PDL)
    head, row = tl.program_id(0), tl.program_id(1)
    length = tl.load(lens + row).to(tl.int32) + NEW
    _, _, blocks = share_of(length, length - window, wanted, longest, splits, HAS_WINDOW, BLOCK_N)
    if blocks == 1:
        return
    join_group(
        sums, tops, gate, out, row, head, 1, blocks, splits, stride_gt, stride_gh, HEADS, D, D_P, 1, CHUNK
    )


def arrivals_of(view: PagedView | CrossView) -> torch.Tensor:
    """Zeros for ``arrivals_BK`` of the layers of one launch, which come one after another."""
    pool = view.k_LPKSD if isinstance(view, PagedView) else view.k_LEKSD
    return counters(pool.device, (view.cu_seqlens.shape[0] - 1) * pool.shape[2])
