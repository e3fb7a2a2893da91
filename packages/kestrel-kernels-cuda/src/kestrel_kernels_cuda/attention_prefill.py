"""Attention of many queries per sequence over keys in pages, ragged, without knowing a length on the host.

The grid has a tile for every BLOCK_Q queries and one more per sequence; a tile finds its sequence in ``cu_seqlens``,
and leaves when it has none. Tiles come last first, as later queries see more keys.

Source: Dao 2023, arXiv 2307.08691, "FlashAttention-2", algorithm 1, over keys in pages.
Letters: B sequences, T tokens, H query heads, K key/value heads, D head dim.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kestrel_kernels_cuda.attention_configs import PrefillConfig
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

__all__ = ["prefill_kernel", "prefill_launch"]


@triton.jit
def sequence_of(tile, cu_seqlens, batch, BLOCK_Q: tl.constexpr):
    """The last sequence b with cu_seqlens[b] // BLOCK_Q + b <= ``tile``: tiles of earlier ones end before it."""
    found = tile * 0 - 1
    at = tl.arange(0, 128)
    for first in range(0, batch, 128):
        b = first + at
        start = tl.load(cu_seqlens + b, mask=b < batch, other=0) // BLOCK_Q + b
        found += tl.sum(((start <= tile) & (b < batch)).to(tl.int32), 0)
    return found


@triton.jit
def attend_tiles(
    q_MD, acc, top, total, k, v, table, head_offset, stride_page, low, high, lowest, first_M, end_M, pre, post,
    D: tl.constexpr, D_P: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr,
    IS_MASKED: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Keys ``low`` to ``high`` added to a tile of queries, which see [``first_M``, ``end_M``); none before
    ``lowest`` is read, nor from ``high`` on. Unless IS_MASKED, all are seen by all."""
    at_d, at_n = tl.arange(0, D_P), tl.arange(0, BLOCK_N)
    for at in range(low, high, BLOCK_N):
        position = at + at_n
        if IS_MASKED:
            held = position < high
            if HAS_WINDOW:
                held &= position >= lowest
        else:
            held = position >= 0
        if PAGE == 0:
            rows = head_offset + position.to(tl.int64) * D
        elif IS_MASKED:
            page = tl.load(table + position // PAGE, mask=held, other=0).to(tl.int64)
            rows = head_offset + page * stride_page + (position % PAGE) * D
        else:
            page = tl.load(table + position // PAGE).to(tl.int64)
            rows = head_offset + page * stride_page + (position % PAGE) * D
        at_ND = rows[:, None] + at_d[None, :]
        if IS_MASKED or D != D_P:
            mask_ND = held[:, None] & (at_d < D)[None, :]
            k_ND = tl.load(k + at_ND, mask=mask_ND, other=0.0).to(q_MD.dtype)
        else:
            k_ND = tl.load(k + at_ND).to(q_MD.dtype)
        scores = capped(tl.dot(q_MD, tl.trans(k_ND), input_precision="ieee"), pre, HAS_SOFTCAP)
        if IS_MASKED:
            seen = position[None, :] < end_M[:, None]
            if HAS_WINDOW:
                seen &= position[None, :] >= first_M[:, None]
            scores = tl.where(seen, scores, float("-inf"))
        weights, shrink, top, total = softmax_step(scores, top, total, post, IS_MASKED)
        if IS_MASKED or D != D_P:
            v_ND = tl.load(v + at_ND, mask=mask_ND, other=0.0).to(q_MD.dtype)
        else:
            v_ND = tl.load(v + at_ND).to(q_MD.dtype)
        acc = tl.dot(weights.to(q_MD.dtype), v_ND, acc * shrink[:, None], input_precision="ieee")
    return acc, top, total


@triton.jit(
    do_not_specialize=["stride_table", "window", "batch"],
    do_not_specialize_on_alignment=["table", "lens", "cu_seqlens", "range_ends"],
)
def prefill_kernel(
    q, k, v, table, lens, cu_seqlens, range_ends, gate, out,
    pre, post, stride_qt, stride_qh, stride_gt, stride_gh, stride_page, stride_head, stride_table, window, batch,
    IS_CAUSAL: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, PACK: tl.constexpr,
    D: tl.constexpr, D_P: tl.constexpr, PAGE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One tile of BLOCK_M // PACK tokens by PACK heads. ``lens``: positions before this launch when IS_CAUSAL, else the
    keys that every query of a sequence sees. ``range_ends``: bidirectional ranges, or None."""
    start_next(PDL)
    wait_for_previous(PDL)
    BLOCK_Q: tl.constexpr = BLOCK_M // PACK
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    sequence = sequence_of(tile, cu_seqlens, batch, BLOCK_Q)
    start = tl.load(cu_seqlens + sequence)
    stop = tl.load(cu_seqlens + sequence + 1)
    first = (tile - (start // BLOCK_Q + sequence)) * BLOCK_Q
    if start + first >= stop:
        return
    members = tl.arange(0, BLOCK_M)
    query = first + members // PACK
    tokens = start + query
    live = (tokens < stop) & (members < BLOCK_Q * PACK)
    heads = tl.program_id(1) * PACK + members % PACK
    kv_head = tl.program_id(1) * PACK // GROUP
    length = tl.load(lens + sequence).to(tl.int32)
    if IS_CAUSAL:
        at_M = length + query
        length += stop - start
        end_M = at_M + 1
        if range_ends is not None:
            end_M = tl.maximum(end_M, tl.load(range_ends + tokens, mask=live, other=0))
        end_M = tl.where(live, tl.minimum(end_M, length), length - (stop - start) + first + 1)
        high = tl.max(end_M, 0)
        clear = tl.min(end_M, 0) // BLOCK_N * BLOCK_N
    else:
        at_M = query
        end_M = query * 0 + length
        high = length
        clear = length // BLOCK_N * BLOCK_N
    low = 0
    lowest = 0
    first_M = at_M - window + 1
    if HAS_WINDOW:
        lowest = tl.maximum(tl.min(first_M, 0), 0)
        low = lowest // BLOCK_N * BLOCK_N
        clear = low
    q_MD = query_tile(q, tokens, heads, live, stride_qt, stride_qh, D, D_P)
    table += sequence.to(tl.int64) * stride_table
    head_offset = kv_head.to(tl.int64) * stride_head
    if PAGE == 0:
        head_offset += tl.load(table).to(tl.int64) * stride_page
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D_P], tl.float32)
    if not HAS_WINDOW:
        acc, top, total = attend_tiles(
            q_MD, acc, top, total, k, v, table, head_offset, stride_page, low, clear, lowest, first_M, end_M,
            pre, post, D, D_P, PAGE, BLOCK_N, False, HAS_WINDOW, HAS_SOFTCAP,
        )  # fmt: skip
    acc, top, total = attend_tiles(
        q_MD, acc, top, total, k, v, table, head_offset, stride_page, clear, high, lowest, first_M, end_M,
        pre, post, D, D_P, PAGE, BLOCK_N, True, HAS_WINDOW, HAS_SOFTCAP,
    )  # fmt: skip
    at_d = tl.arange(0, D_P)
    mask = live[:, None] & (at_d < D)[None, :]
    wide = tokens.to(tl.int64)[:, None]
    gate_rows = wide * stride_gt + heads[:, None] * stride_gh + at_d[None, :]
    result = finish(acc, total, gate, gate_rows, mask, out.dtype.element_ty)
    out_rows = (wide * HEADS + heads[:, None]) * D + at_d[None, :]
    tl.store(out + out_rows, result, mask=mask)


def prefill_launch(
    q_THD: torch.Tensor,
    keys: Keys,
    cu_seqlens: torch.Tensor,
    range_ends_T: torch.Tensor | None,
    is_causal: bool,
    scale: float,
    softcap: float | None,
    gate_THD: torch.Tensor | None,
    config: PrefillConfig,
) -> tuple[torch.Tensor, list[Launch]]:
    """Outputs [T, H, D], and what computes them."""
    tokens, heads, dim = q_THD.shape
    batch, num_kv = cu_seqlens.shape[0] - 1, keys.k_PKSD.shape[1]
    out = torch.empty((tokens, heads, dim), dtype=q_THD.dtype, device=q_THD.device)
    assert q_THD.stride(2) == 1, f"queries need dense heads, not strides {q_THD.stride()}"
    gate_strides = (0, 0) if gate_THD is None else gate_THD.stride()[:2]
    pre, post = scale_factors(scale, softcap)
    group = heads // num_kv
    pack = group if config.packed else 1
    tiles = tokens // (config.block_m // pack) + batch
    args = (
        q_THD, keys.k_PKSD, keys.v_PKSD, keys.table_BN, keys.lens_B, cu_seqlens, range_ends_T, gate_THD, out,
        pre, post, q_THD.stride(0), q_THD.stride(1), *gate_strides,
        keys.k_PKSD.stride(0), keys.k_PKSD.stride(1), keys.table_BN.stride(0), keys.window or 0, batch,
    )  # fmt: skip
    meta = {
        "IS_CAUSAL": is_causal, "HEADS": heads, "GROUP": group, "PACK": pack, "D": dim, "D_P": config.dim,
        "PAGE": keys.page, "BLOCK_M": config.block_m, "BLOCK_N": config.block_n,
        "HAS_WINDOW": keys.window is not None, "HAS_SOFTCAP": softcap is not None,
        **overlap(config.overlaps, prefill_kernel), "num_warps": config.warps,
        "num_stages": stages_of(config.stages, keys.page),
    }  # fmt: skip
    return out, [Launch(prefill_kernel, (tiles, heads // pack), args, meta)]
