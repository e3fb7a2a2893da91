"""Attention of one query per sequence: the keys of a row are split over blocks, whose sums are joined.

The grid is fixed by the launch's ceilings; each row divides its own keys among its blocks on the device, and blocks
that get none leave at once. All query heads of a key/value head form one tile. Sums are joined in a fixed order, by the
last block of a row to end, or by a second kernel in deterministic launches.

The newest key and value of a row may come fresh from their projection: then every block norms and rotates its queries,
and the row's last block, with them, the key; it writes key and value to their page and reads them there. All other keys
lie in memory since earlier steps: a block asks for its first while the kernel before still runs. Where rows are few, a
block computes so little that fetching its instructions takes most of its time, hence one short loop and no more.

Source: Dao et al. 2023, "Flash-Decoding for long-context inference" (keys split over blocks); Milakov and Gimelshein
2018, arXiv 1805.02867 (softmax in one pass).
Letters: B rows, H query heads, K key/value heads, G heads of a group (H / K), D head dim, S splits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from kestrel_kernels_cuda.attention_configs import DecodeConfig, Split
from kestrel_kernels_cuda.attention_join import ANYWHERE, INTEGERS, join_group, join_kernel, share_of
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
from kestrel_kernels_cuda.launch import Launch, power_of_two
from kestrel_kernels_cuda.linear_parts import prefetch
from kestrel_kernels_cuda.overlap import start_next, wait_for_previous
from kestrel_kernels_cuda.rotation import partner, rotated

__all__ = ["Fresh", "decode_launches", "split_kernel"]

JOINED = 8192  # numbers that four warps join at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Fresh:
    """What a launch does before it attends: the keys and values of its tokens [B, K, D] go to ``slots_B``; queries and
    keys are normed by weights and rotated by angles where given."""

    k_BKD: torch.Tensor
    v_BKD: torch.Tensor
    slots_B: torch.Tensor
    cos_BR: torch.Tensor | None = None
    sin_BR: torch.Tensor | None = None
    q_weight_D: torch.Tensor | None = None
    k_weight_D: torch.Tensor | None = None
    eps: float = 0.0
    add_one: bool = False


@triton.jit
def pages_of(position, held, table, stride_page, D: tl.constexpr, PAGE: tl.constexpr):
    """Where the keys at ``position`` [N] begin, within their head's part of a page."""
    if PAGE == 0:
        return position.to(tl.int64) * D
    page = tl.load(table + position // PAGE, mask=held, other=0).to(tl.int64)
    return page * stride_page + (position % PAGE) * D


@triton.jit
def prefetch_keys(k, v, rows_N, held, D: tl.constexpr, D_P: tl.constexpr):
    """Asks for the cache lines of keys and values that begin at ``rows_N``."""
    EACH: tl.constexpr = 1024 // k.dtype.element_ty.primitive_bitwidth  # numbers of a line
    LINES: tl.constexpr = max(1, D_P // EACH)
    at = tl.arange(0, LINES) * EACH
    places = tl.where(held[:, None] & (at < D)[None, :], rows_N[:, None] + at[None, :], 0)
    prefetch(k + places)
    prefetch(v + places)


@triton.jit
def fresh_rows(
    q, k_new, v_new, q_weight, k_weight, cos, sin, row, kv_head, owns, eps,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_cos, stride_sin,
    GROUP: tl.constexpr, GROUP_P: tl.constexpr, D: tl.constexpr, D_P: tl.constexpr,
    ROTATED: tl.constexpr, ADD_ONE: tl.constexpr,
):  # fmt: skip
    """[GROUP_P, D_P]: a group's queries, the key of its head and the value. Queries and key are normed when there are
    weights, and rotated when ROTATED. Key and value are zeros unless ``owns``, as are all beyond D."""
    member = tl.arange(0, GROUP_P)[:, None]
    dim = tl.arange(0, D_P)[None, :] + 0 * member
    is_q, is_k = member < GROUP, (member == GROUP) & owns
    own = tl.where(
        is_k, k_new + row * stride_kt + kv_head * stride_kh, v_new + row * stride_vt + kv_head * stride_vh
    )
    heads = tl.where(is_q, q + row * stride_qt + (kv_head * GROUP + member) * stride_qh, own)
    turned = is_q | is_k
    inside = (turned | ((member == GROUP + 1) & owns)) & (dim < D)
    kept = tl.load(heads + dim, mask=inside, other=0.0)
    value = kept.to(tl.float32)
    other = value
    if ROTATED:
        near = turned & (dim < ROTATED)
        other = tl.load(heads + partner(dim, ROTATED), mask=near, other=0.0).to(tl.float32)
    if q_weight is not None:
        weights = tl.where(is_k, k_weight, q_weight)
        gain = tl.load(weights + dim, mask=turned & (dim < D), other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(value * value, axis=1)[:, None] / D + eps)
        value = value * scale * (gain + 1.0 if ADD_ONE else gain)
        if ROTATED:
            gain = tl.load(weights + partner(dim, ROTATED), mask=near, other=0.0).to(tl.float32)
            other = other * scale * (gain + 1.0 if ADD_ONE else gain)
    if ROTATED:
        value = rotated(value, other, cos, sin, row, stride_cos, stride_sin, dim, ROTATED)
    return tl.where(turned, value.to(kept.dtype), kept)


@triton.jit(do_not_specialize=[*INTEGERS, "is_early"], do_not_specialize_on_alignment=[*ANYWHERE, "slots"])
def split_kernel(
    q, k, v, table, lens, k_new, v_new, slots, q_weight, k_weight, cos, sin, gate, out, sums, tops, arrivals,
    pre, post, eps, stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_cos, stride_sin,
    stride_gt, stride_gh, stride_page, stride_head, stride_table, window, wanted, longest, splits, is_early,
    NEW: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_P: tl.constexpr,
    D: tl.constexpr, D_P: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr,
    GROUP_J: tl.constexpr, CHUNK: tl.constexpr, ROTATED: tl.constexpr, ADD_ONE: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One block of keys of one row and key/value head. PAGE 0: a row's keys all lie in one page.

    A row has ``lens`` + NEW keys; ``k_new`` and ``v_new``, unless None, are the last. ``is_early``: no kernel that may
    still run writes lengths, page tables and the other keys, so that they are asked for before the wait.
    Writes outputs when it is the row's only block, else sums, maxima and totals; with ``arrivals`` (zeros [B, K], left
    as zeros) the last block of a row joins them.
    """
    if is_early == 0:
        wait_for_previous(PDL)
    split, kv_head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    length = tl.load(lens + row).to(tl.int32) + NEW
    base, share, blocks = share_of(length, length - window, wanted, longest, splits, HAS_WINDOW, BLOCK_N)
    start = base + split * share
    end = tl.minimum(start + share, length)
    if start >= end:
        return
    table += row * stride_table
    head_offset = kv_head.to(tl.int64) * stride_head
    if PAGE == 0:
        head_offset += tl.load(table).to(tl.int64) * stride_page
    k += head_offset
    v += head_offset
    at_n = tl.arange(0, BLOCK_N)
    if PDL:  # noqa: SIM102 - decided while it compiles, the next while it runs
        if is_early:
            held = start + at_n < tl.minimum(end, length - NEW)
            prefetch_keys(k, v, pages_of(start + at_n, held, table, stride_page, D, PAGE), held, D, D_P)
    start_next(
        PDL
    )  # not before: the next kernel asks for weights at once, and these keys would come behind them
    wait_for_previous(PDL)
    dim = tl.arange(0, D_P)[None, :]
    member = tl.arange(0, GROUP_P)
    live = member < GROUP
    heads = kv_head * GROUP + member
    if k_new is None:
        q_GD = query_tile(q, row + member * 0, heads, live, stride_qt, stride_qh, D, D_P)
    else:
        owns = split == blocks - 1
        q_GD = fresh_rows(
            q, k_new, v_new, q_weight, k_weight, cos, sin, row, kv_head, owns, eps,
            stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_cos, stride_sin,
            GROUP, GROUP_P, D, D_P, ROTATED, ADD_ONE,
        )  # fmt: skip
        if owns:
            slot = tl.load(slots + row)
            place = (slot // PAGE) * stride_page + (slot % PAGE) * D
            at_GD = tl.where(member == GROUP, k + place, v + place)[:, None] + dim
            new = ((member == GROUP) | (member == GROUP + 1))[:, None] & (dim < D)
            tl.store(at_GD, q_GD.to(k.dtype.element_ty), mask=new)
            tl.debug_barrier()  # all of it is written before any of it is read below
    top = tl.full([GROUP_P], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_P], tl.float32)
    acc = tl.zeros([GROUP_P, D_P], tl.float32)
    for at in range(start, end, BLOCK_N):
        position = at + at_n
        held = position < end
        if HAS_WINDOW:
            held &= position >= length - window
        at_ND = pages_of(position, held, table, stride_page, D, PAGE)[:, None] + dim
        mask_ND = held[:, None] if D == D_P else held[:, None] & (dim < D)
        k_ND = tl.load(k + at_ND, mask=mask_ND, other=0.0).to(q_GD.dtype)
        v_ND = tl.load(v + at_ND, mask=mask_ND, other=0.0).to(q_GD.dtype)
        scores = capped(tl.dot(q_GD, tl.trans(k_ND), input_precision="ieee"), pre, HAS_SOFTCAP)
        scores = tl.where(held[None, :], scores, float("-inf"))
        weights, shrink, top, total = softmax_step(scores, top, total, post, HAS_WINDOW)
        acc = tl.dot(weights.to(q_GD.dtype), v_ND, acc * shrink[:, None], input_precision="ieee")
    row_head = row * (KV_HEADS * GROUP) + heads
    mask = live[:, None] & (dim < D)
    if sums is None or blocks == 1:
        gate_rows = row * stride_gt + heads[:, None] * stride_gh + dim
        result = finish(acc, total, gate, gate_rows, mask, out.dtype.element_ty)
        tl.store(out + row_head[:, None] * D + dim, result, mask=mask)
    else:
        place = row_head * splits + split
        tl.store(sums + place[:, None] * D + dim, acc, mask=mask)
        tl.store(tops + place * 2, top, mask=live)
        tl.store(tops + place * 2 + 1, total, mask=live)
        if arrivals is not None:
            counter = arrivals + row * KV_HEADS + kv_head
            tl.debug_barrier()  # all threads' numbers are written before one of them says so
            if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == blocks - 1:
                tl.store(counter, 0)
                join_group(
                    sums, tops, gate, out, row, kv_head * GROUP, GROUP, blocks, splits, stride_gt, stride_gh,
                    KV_HEADS * GROUP, D, D_P, GROUP_J, CHUNK,
                )  # fmt: skip


def decode_launches(
    q_BHD: torch.Tensor,
    keys: Keys,
    scale: float,
    softcap: float | None,
    gate_BHD: torch.Tensor | None,
    config: DecodeConfig,
    split: Split,
    arrivals_BK: torch.Tensor | None = None,
    fresh: Fresh | None = None,
    *,
    is_early: bool = False,
) -> tuple[torch.Tensor, list[Launch]]:
    """Outputs [B, H, D] of one query per row over its keys, and what computes them. ``arrivals_BK``: int32 zeros, to
    join the blocks of a row in the same kernel; ``fresh``: what follows ``keys``. ``is_early``: as the kernel's."""
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
        **shape,
        **_split_constants(keys, heads // num_kv, config, fresh),
        "HAS_SOFTCAP": softcap is not None,
    }
    tensors, numbers = _fresh_args(fresh)
    args = (
        q_BHD, keys.k_PKSD, keys.v_PKSD, keys.table_BN, keys.lens_B, *tensors, gate_BHD, out, sums, tops, arrivals,
        pre, post, 0.0 if fresh is None else fresh.eps, q_BHD.stride(0), q_BHD.stride(1), *numbers, *gate_strides,
        keys.k_PKSD.stride(0), keys.k_PKSD.stride(1), keys.table_BN.stride(0), *sharing, int(is_early),
    )  # fmt: skip
    launches = [Launch(split_kernel, (split.splits, num_kv, batch), args, meta)]
    if sums is not None and arrivals is None:
        assert fresh is None, "a second kernel joins no blocks that read fresh keys"
        meta = {**shape, "HEADS": heads, "CHUNK": config.chunk, "num_warps": config.join_warps}
        args = (sums, tops, keys.lens_B, gate_BHD, out, *gate_strides, *sharing)
        launches.append(Launch(join_kernel, (heads, batch), args, meta))
    return out, launches


def _split_constants(keys: Keys, group: int, config: DecodeConfig, fresh: Fresh | None) -> dict[str, Any]:
    """Constants of ``split_kernel`` alone; ``group``: query heads of a key/value head."""
    members, rows, turned = power_of_two(group), config.group, 0
    if fresh is not None:
        rows = max(rows, power_of_two(group + 2))
        turned = 0 if fresh.cos_BR is None else fresh.cos_BR.shape[1]
    return {
        "KV_HEADS": keys.k_PKSD.shape[1], "GROUP": group, "GROUP_P": rows, "PAGE": keys.page,
        "GROUP_J": members, "CHUNK": _chunk(members, config), "ROTATED": turned,
        "ADD_ONE": fresh is not None and fresh.add_one,
        "num_warps": config.warps, "num_stages": stages_of(config.stages, keys.page),
    }  # fmt: skip


def _chunk(members: int, config: DecodeConfig) -> int:
    """Blocks that a group's heads are joined from at a time."""
    return max(1, min(16, JOINED * config.warps // 4 // (members * config.dim)))


def _fresh_args(fresh: Fresh | None) -> tuple[tuple[torch.Tensor | None, ...], tuple[int, ...]]:
    """The kernel's tensors and strides of ``fresh``."""
    if fresh is None:
        return (None,) * 7, (0,) * 6
    k, v, cos, sin = fresh.k_BKD, fresh.v_BKD, fresh.cos_BR, fresh.sin_BR
    assert k.stride(2) == v.stride(2) == 1, (
        f"new keys need dense heads, not strides {k.stride()}, {v.stride()}"
    )
    tensors = (k, v, fresh.slots_B, fresh.q_weight_D, fresh.k_weight_D, cos, sin)
    angles = (0 if cos is None else cos.stride(0), 0 if sin is None else sin.stride(0))
    return tensors, (*k.stride()[:2], *v.stride()[:2], *angles)
