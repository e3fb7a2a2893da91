"""Attention of one query per sequence: the keys of a row are split over blocks, whose sums are joined.

The grid is fixed by the launch's ceilings; each row divides its own keys among its blocks on the device, and blocks
that get none leave at once. All query heads of a key/value head form one tile. Sums are joined in a fixed order, by the
last block of a row to end where that is little work, else by a second kernel.

Source: Dao et al. 2023, "Flash-Decoding for long-context inference" (keys split over blocks); Milakov and Gimelshein
2018, arXiv 1805.02867 (softmax in one pass, and how the parts of one are joined).
Letters: B rows, H query heads, K key/value heads, G heads of a group (H / K), D head dim, S splits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kestrel.spi.batch import CrossView, PagedView
from kestrel_kernels_cuda.attention_configs import DecodeConfig, Split
from kestrel_kernels_cuda.attention_parts import (
    Keys,
    capped,
    finish,
    overlap,
    query_tile,
    scale_factors,
    softmax_step,
    stages_of,
)
from kestrel_kernels_cuda.launch import Launch
from kestrel_kernels_cuda.overlap import start_next, wait_for_previous

__all__ = ["arrivals_of", "decode_launches", "join_kernel", "split_kernel"]

INTEGERS = ["stride_table", "window", "wanted", "longest", "splits"]
ANYWHERE = ["table", "lens"]  # slices of buffers of many arrays, at any address


@triton.jit
def share_of(length, window, wanted, longest, splits, HAS_WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """(first key of the first block, keys per block): tiles of a row over as many blocks as it is worth, of 64 keys or
    more."""
    base = length * 0
    if HAS_WINDOW:
        base = tl.maximum(length - window, 0) // BLOCK_N * BLOCK_N
    tiles = tl.cdiv(length - base, BLOCK_N)
    pieces = tl.cdiv(tiles, max(1, 64 // BLOCK_N))
    blocks = tl.maximum(tl.minimum(wanted, pieces), tl.cdiv(tiles, longest))
    return base, tl.cdiv(tiles, tl.maximum(tl.minimum(blocks, splits), 1)) * BLOCK_N


@triton.jit
def joined(
    sums, tops, first_place, blocks, D: tl.constexpr, D_P: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """(weighted sums [1, D_P], total [1]) of ``blocks`` blocks of one head: CHUNK blocks at a time, in order."""
    at_d, at_s = tl.arange(0, D_P), tl.arange(0, CHUNK)
    top = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([D_P], tl.float32)
    for first in range(0, blocks, CHUNK):
        block = first + at_s
        place, held = first_place + block, block < blocks
        tops_S = tl.load(tops + place * 2, mask=held, other=float("-inf"), cache_modifier=".cg")
        totals_S = tl.load(tops + place * 2 + 1, mask=held, other=0.0, cache_modifier=".cg")
        at_SD = place[:, None] * D + at_d[None, :]
        mask = held[:, None] & (at_d < D)[None, :]
        sums_SD = tl.load(sums + at_SD, mask=mask, other=0.0, cache_modifier=".cg")
        new_top = tl.maximum(top, tl.max(tops_S, 0))
        safe = tl.where(new_top == float("-inf"), 0.0, new_top)
        shrink, factors = tl.exp2(top - safe), tl.exp2(tops_S - safe)
        total = total * shrink + tl.sum(totals_S * factors, 0)
        acc = acc * shrink + tl.sum(sums_SD * factors[:, None], 0)
        top = new_top
    return acc[None, :], total


@triton.jit
def write_head(
    acc, total, gate, out, row, head, stride_gt, stride_gh,
    HEADS: tl.constexpr, D: tl.constexpr, D_P: tl.constexpr,
):  # fmt: skip
    """The output of one head of one row."""
    at_d = tl.arange(0, D_P)[None, :]
    gate_row = row.to(tl.int64) * stride_gt + head * stride_gh + at_d
    result = finish(acc, total, gate, gate_row, at_d < D, out.dtype.element_ty)
    tl.store(out + (row.to(tl.int64) * HEADS + head) * D + at_d, result, mask=at_d < D)


@triton.jit(do_not_specialize=INTEGERS, do_not_specialize_on_alignment=ANYWHERE)
def split_kernel(
    q, k, v, table, lens, gate, out, sums, tops, arrivals,
    pre, post, stride_qt, stride_qh, stride_gt, stride_gh, stride_page, stride_head, stride_table,
    window, wanted, longest, splits,
    NEW: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_P: tl.constexpr,
    D: tl.constexpr, D_P: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One block of keys of one row and key/value head. PAGE 0: a row's keys all lie in one page.

    Writes outputs when it is the row's only block, else sums, maxima and totals; with ``arrivals`` (zeros [B, K], left
    as zeros) the last block of a row joins them.
    """
    start_next(PDL)
    wait_for_previous(PDL)
    split, kv_head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lens + row).to(tl.int32) + NEW
    base, share = share_of(length, window, wanted, longest, splits, HAS_WINDOW, BLOCK_N)
    start = base + split * share
    blocks = tl.cdiv(length - base, share)
    end = tl.minimum(start + share, length)
    if start >= end:
        return
    members = tl.arange(0, GROUP_P)
    heads = kv_head * GROUP + members
    live = members < GROUP
    q_GD = query_tile(q, row + members * 0, heads, live, stride_qt, stride_qh, D, D_P)
    at_d, at_n = tl.arange(0, D_P), tl.arange(0, BLOCK_N)
    table += row.to(tl.int64) * stride_table
    head_offset = kv_head.to(tl.int64) * stride_head
    if PAGE == 0:
        head_offset += tl.load(table).to(tl.int64) * stride_page
    top = tl.full([GROUP_P], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_P], tl.float32)
    acc = tl.zeros([GROUP_P, D_P], tl.float32)
    for at in range(start, end, BLOCK_N):
        position = at + at_n
        held = position < end
        if HAS_WINDOW:
            held &= position >= length - window
        if PAGE == 0:
            rows = head_offset + position.to(tl.int64) * D
        else:
            page = tl.load(table + position // PAGE, mask=held, other=0).to(tl.int64)
            rows = head_offset + page * stride_page + (position % PAGE) * D
        at_ND = rows[:, None] + at_d[None, :]
        mask_ND = held[:, None] if D == D_P else held[:, None] & (at_d < D)[None, :]
        k_ND = tl.load(k + at_ND, mask=mask_ND, other=0.0).to(q_GD.dtype)
        scores = capped(tl.dot(q_GD, tl.trans(k_ND), input_precision="ieee"), pre, HAS_SOFTCAP)
        scores = tl.where(held[None, :], scores, float("-inf"))
        weights, shrink, top, total = softmax_step(scores, top, total, post, HAS_WINDOW)
        v_ND = tl.load(v + at_ND, mask=mask_ND, other=0.0).to(q_GD.dtype)
        acc = tl.dot(weights.to(q_GD.dtype), v_ND, acc * shrink[:, None], input_precision="ieee")
    row_head = row.to(tl.int64) * (KV_HEADS * GROUP) + heads
    mask = live[:, None] & (at_d < D)[None, :]
    if sums is None or blocks == 1:
        gate_rows = row.to(tl.int64) * stride_gt + heads[:, None] * stride_gh + at_d[None, :]
        result = finish(acc, total, gate, gate_rows, mask, out.dtype.element_ty)
        tl.store(out + row_head[:, None] * D + at_d[None, :], result, mask=mask)
    else:
        place = row_head * splits + split
        tl.store(sums + place[:, None] * D + at_d[None, :], acc, mask=mask)
        tl.store(tops + place * 2, top, mask=live)
        tl.store(tops + place * 2 + 1, total, mask=live)
        if arrivals is not None:
            counter = arrivals + row * KV_HEADS + kv_head
            tl.debug_barrier()  # all threads' numbers are written before one of them says so
            if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == blocks - 1:
                tl.store(counter, 0)
                for member in range(GROUP):
                    head = kv_head * GROUP + member
                    first_place = (row.to(tl.int64) * (KV_HEADS * GROUP) + head) * splits
                    acc_1D, total_1 = joined(sums, tops, first_place, blocks, D, D_P, CHUNK)
                    write_head(
                        acc_1D, total_1, gate, out, row, head, stride_gt, stride_gh, KV_HEADS * GROUP, D, D_P
                    )


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
    base, share = share_of(length, window, wanted, longest, splits, HAS_WINDOW, BLOCK_N)
    blocks = tl.cdiv(length - base, tl.maximum(share, 1))
    if blocks == 1:
        return
    first_place = (row.to(tl.int64) * HEADS + head) * splits
    acc, total = joined(sums, tops, first_place, blocks, D, D_P, CHUNK)
    write_head(acc, total, gate, out, row, head, stride_gt, stride_gh, HEADS, D, D_P)


def arrivals_of(view: PagedView | CrossView) -> torch.Tensor:
    """Zeros for ``arrivals_BK`` of the layers of one launch, which come one after another."""
    pool = view.k_LPKSD if isinstance(view, PagedView) else view.k_LEKSD
    return torch.zeros((view.cu_seqlens.shape[0] - 1, pool.shape[2]), dtype=torch.int32, device=pool.device)


def decode_launches(
    q_BHD: torch.Tensor,
    keys: Keys,
    scale: float,
    softcap: float | None,
    gate_BHD: torch.Tensor | None,
    config: DecodeConfig,
    split: Split,
    arrivals_BK: torch.Tensor | None = None,
) -> tuple[torch.Tensor, list[Launch]]:
    """Outputs [B, H, D] of one query per row over its keys, and what computes them. ``arrivals_BK``: int32 zeros, to
    join the blocks of a row in the same kernel."""
    batch, heads, dim = q_BHD.shape
    num_kv = keys.k_PKSD.shape[1]
    out = torch.empty((batch, heads, dim), dtype=q_BHD.dtype, device=q_BHD.device)
    sums = tops = arrivals = None
    if split.splits > 1:
        sums = out.new_empty((batch, heads, split.splits, dim), dtype=torch.float32)
        tops = out.new_empty((batch, heads, split.splits, 2), dtype=torch.float32)
        arrivals = arrivals_BK
    assert q_BHD.stride(2) == 1, f"queries need dense heads, not strides {q_BHD.stride()}"
    gate_strides = (0, 0) if gate_BHD is None else gate_BHD.stride()[:2]
    pre, post = scale_factors(scale, softcap)
    sharing = (keys.window or 0, split.wanted, split.longest, split.splits)
    shape = {
        "NEW": keys.new, "D": dim, "D_P": config.dim, "BLOCK_N": config.block_n,
        "HAS_WINDOW": keys.window is not None, **overlap(config.overlaps, split_kernel),
    }  # fmt: skip
    meta = {
        **shape, "KV_HEADS": num_kv, "GROUP": heads // num_kv, "GROUP_P": config.group, "PAGE": keys.page,
        "CHUNK": config.chunk, "HAS_SOFTCAP": softcap is not None, "num_warps": config.warps,
        "num_stages": stages_of(config.stages, keys.page),
    }  # fmt: skip
    args = (
        q_BHD, keys.k_PKSD, keys.v_PKSD, keys.table_BN, keys.lens_B, gate_BHD, out, sums, tops, arrivals,
        pre, post, q_BHD.stride(0), q_BHD.stride(1), *gate_strides,
        keys.k_PKSD.stride(0), keys.k_PKSD.stride(1), keys.table_BN.stride(0), *sharing,
    )  # fmt: skip
    launches = [Launch(split_kernel, (split.splits, num_kv, batch), args, meta)]
    if sums is not None and arrivals is None:
        meta = {**shape, "HEADS": heads, "CHUNK": config.chunk, "num_warps": config.join_warps}
        args = (sums, tops, keys.lens_B, gate_BHD, out, *gate_strides, *sharing)
        launches.append(Launch(join_kernel, (heads, batch), args, meta))
    return out, launches
