"""Attention of one query per sequence: the keys of a row are split over blocks, whose sums are joined.

The grid is fixed by the launch's ceilings; each row divides its own keys among its blocks on the device, and blocks
that get none leave at once. All query heads of a key/value head form one tile. Sums are joined in a fixed order, by the
last block of a row to end, or by a second kernel in deterministic launches.

The newest key and value of a row may come fresh from their projection: the row's last block norms, rotates and writes
them, and every block norms and rotates its queries. All other keys lie in memory since earlier steps, so that a block
reads its first tile while the kernel before (which makes the queries) still runs.

Source: Dao et al. 2023, "Flash-Decoding for long-context inference" (keys split over blocks); Milakov and Gimelshein
2018, arXiv 1805.02867 (softmax in one pass).
Letters: B rows, H query heads, K key/value heads, G heads of a group (H / K), D head dim, S splits.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    scale_factors,
    softmax_step,
    stages_of,
)
from kestrel_kernels_cuda.launch import Launch, power_of_two
from kestrel_kernels_cuda.overlap import start_next, wait_for_previous
from kestrel_kernels_cuda.rotation import gains, prepared

__all__ = ["Fresh", "decode_launches", "split_kernel"]

JOINED = 8192  # numbers that four warps join at a time
NEWEST = tl.constexpr(16)  # keys of the tile of a row's newest: the fewest that matrix units take


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
def places_of(
    position, held, table, head_offset, stride_page,
    D: tl.constexpr, D_P: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """(where the keys at ``position`` [N] lie [N, D], which numbers of them exist)."""
    at_d = tl.arange(0, D_P)
    if PAGE == 0:
        rows = head_offset + position.to(tl.int64) * D
    else:
        page = tl.load(table + position // PAGE, mask=held, other=0).to(tl.int64)
        rows = head_offset + page * stride_page + (position % PAGE) * D
    mask_ND = held[:, None] if D == D_P else held[:, None] & (at_d < D)[None, :]
    return rows[:, None] + at_d[None, :], mask_ND


@triton.jit
def add_keys(
    q_GD, k_ND, v_ND, held, acc, top, total, pre, post, HAS_SOFTCAP: tl.constexpr, GUARD: tl.constexpr
):
    """(weighted sums, maxima, totals) after one more tile of keys, of which those not ``held`` are unseen."""
    scores = capped(tl.dot(q_GD, tl.trans(k_ND), input_precision="ieee"), pre, HAS_SOFTCAP)
    scores = tl.where(held[None, :], scores, float("-inf"))
    weights, shrink, top, total = softmax_step(scores, top, total, post, GUARD)
    acc = tl.dot(weights.to(q_GD.dtype), v_ND, acc * shrink[:, None], input_precision="ieee")
    return acc, top, total


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

    ``lens`` + NEW keys of a row lie in memory; ``k_new`` and ``v_new``, unless None, follow them. ``is_early``: no
    kernel that may still run writes lengths, page tables and those keys, so that they are read before the wait.
    Writes outputs when it is the row's only block, else sums, maxima and totals; with ``arrivals`` (zeros [B, K], left
    as zeros) the last block of a row joins them.
    """
    start_next(PDL)
    if is_early == 0:
        wait_for_previous(PDL)
    split, kv_head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lens + row).to(tl.int32) + NEW
    seen = length - window
    if k_new is not None:
        seen += 1
    base, share, blocks = share_of(length, seen, wanted, longest, splits, HAS_WINDOW, BLOCK_N)
    start = base + split * share
    end = tl.minimum(start + share, length)
    if split >= blocks:
        return
    table += row.to(tl.int64) * stride_table
    head_offset = kv_head.to(tl.int64) * stride_head
    if PAGE == 0:
        head_offset += tl.load(table).to(tl.int64) * stride_page
    position = start + tl.arange(0, BLOCK_N)
    held = position < end
    if HAS_WINDOW:
        held &= position >= seen
    at_ND, mask_ND = places_of(position, held, table, head_offset, stride_page, D, D_P, PAGE, BLOCK_N)
    first_k_ND = tl.load(k + at_ND, mask=mask_ND, other=0.0)
    first_v_ND = tl.load(v + at_ND, mask=mask_ND, other=0.0)
    dim = tl.arange(0, D_P)[None, :]
    members = tl.arange(0, GROUP_P)
    heads = kv_head * GROUP + members
    live = members < GROUP
    q_head = tl.where(live, heads, KV_HEADS * GROUP)[:, None]
    number = tl.arange(0, NEWEST)
    new_head = tl.where(number == 0, kv_head, KV_HEADS)[:, None]
    q_gain, q_other, k_gain, k_other = q_weight, q_weight, k_weight, k_weight
    if q_weight is not None:
        q_gain, q_other = gains(q_weight, q_head, KV_HEADS * GROUP, D, ROTATED, D_P, ADD_ONE)
    if k_weight is not None:
        k_gain, k_other = gains(k_weight, new_head, KV_HEADS, D, ROTATED, D_P, ADD_ONE)
    wait_for_previous(PDL)
    wide_row = row.to(tl.int64)
    q_GD = prepared(
        q, q_gain, q_other, cos, sin, wide_row, q_head, KV_HEADS * GROUP,
        stride_qt, stride_qh, stride_cos, stride_sin, eps, D, ROTATED, D_P,
    ).to(q.dtype.element_ty)  # fmt: skip
    top = tl.full([GROUP_P], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_P], tl.float32)
    acc = tl.zeros([GROUP_P, D_P], tl.float32)
    if k_new is not None:  # noqa: SIM102 - decided while it compiles, the next while it runs
        if split == blocks - 1:
            new_k_ND = prepared(
                k_new, k_gain, k_other, cos, sin, wide_row, new_head, KV_HEADS,
                stride_kt, stride_kh, stride_cos, stride_sin, eps, D, ROTATED, D_P,
            )  # fmt: skip
            is_new = (new_head < KV_HEADS) & (dim < D)
            new_v_ND = tl.load(
                v_new + wide_row * stride_vt + new_head * stride_vh + dim, mask=is_new, other=0.0
            )
            # as a kernel that reads the pages would see them
            new_k_ND = new_k_ND.to(k_new.dtype.element_ty).to(k.dtype.element_ty)
            new_v_ND = new_v_ND.to(v.dtype.element_ty)
            slot = tl.load(slots + row)
            place = (slot // PAGE) * stride_page + (slot % PAGE) * D + kv_head.to(tl.int64) * stride_head
            tl.store(k + place + dim + 0 * new_head, new_k_ND, mask=is_new)
            tl.store(v + place + dim + 0 * new_head, new_v_ND, mask=is_new)
            acc, top, total = add_keys(
                q_GD, new_k_ND.to(q_GD.dtype), new_v_ND.to(q_GD.dtype), number == 0, acc, top, total, pre, post,
                HAS_SOFTCAP, False,
            )  # fmt: skip
    acc, top, total = add_keys(
        q_GD, first_k_ND.to(q_GD.dtype), first_v_ND.to(q_GD.dtype), held, acc, top, total, pre, post,
        HAS_SOFTCAP, True,
    )  # fmt: skip
    for at in range(start + BLOCK_N, end, BLOCK_N):
        position = at + tl.arange(0, BLOCK_N)
        held = position < end
        if HAS_WINDOW:
            held &= position >= seen
        at_ND, mask_ND = places_of(position, held, table, head_offset, stride_page, D, D_P, PAGE, BLOCK_N)
        k_ND = tl.load(k + at_ND, mask=mask_ND, other=0.0).to(q_GD.dtype)
        v_ND = tl.load(v + at_ND, mask=mask_ND, other=0.0).to(q_GD.dtype)
        acc, top, total = add_keys(
            q_GD, k_ND, v_ND, held, acc, top, total, pre, post, HAS_SOFTCAP, HAS_WINDOW
        )
    row_head = wide_row * (KV_HEADS * GROUP) + heads
    mask = live[:, None] & (dim < D)
    if sums is None or blocks == 1:
        gate_rows = wide_row * stride_gt + heads[:, None] * stride_gh + dim
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
    group = heads // num_kv
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
    members, rotated = power_of_two(group), 0
    if fresh is not None and fresh.cos_BR is not None:
        rotated = fresh.cos_BR.shape[1]
    meta = {
        **shape, "KV_HEADS": num_kv, "GROUP": group, "GROUP_P": config.group, "PAGE": keys.page,
        "GROUP_J": members, "CHUNK": _chunk(members, config), "ROTATED": rotated,
        "ADD_ONE": fresh is not None and fresh.add_one, "HAS_SOFTCAP": softcap is not None,
        "num_warps": config.warps, "num_stages": stages_of(config.stages, keys.page),
    }  # fmt: skip
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
