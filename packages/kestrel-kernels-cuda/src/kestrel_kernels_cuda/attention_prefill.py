"""Attention of many queries per sequence, ragged, without knowing a length on the host.

Keys of earlier launches lie in pages; those of this one in rows beside the queries, where a launch is given them: there
the tiles that all their queries see are read through descriptors (tensor memory access of sm_90). The grid has a tile
for every BLOCK_Q queries and one more per sequence; a tile finds its sequence in ``cu_seqlens``, and leaves when it has
none. Tiles come last first, as later queries see more keys.

Source: Dao 2023, arXiv 2307.08691, "FlashAttention-2", algorithm 1.
Letters: B sequences, T tokens, H query heads, K key/value heads, D head dim.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from kestrel_kernels_cuda.attention_configs import PrefillConfig
from kestrel_kernels_cuda.attention_parts import (
    Keys,
    capped,
    finish,
    overlap,
    query_tile,
    scale_factors,
    softmax_step,
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
    q_MD, acc, top, total, k, v, table, k_head, v_head, stride_page, stride_k, stride_v,
    low, high, lowest, first_M, end_M, pre, post,
    D: tl.constexpr, D_P: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr,
    IS_MASKED: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Keys ``low`` to ``high`` added to a tile of queries, which see [``first_M``, ``end_M``); none before
    ``lowest`` is read, nor from ``high`` on. Unless IS_MASKED, all are seen by all. PAGE 0: one after another."""
    at_d, at_n = tl.arange(0, D_P), tl.arange(0, BLOCK_N)
    STAGES: tl.constexpr = (
        DEPTH if PAGE == 0 else 1 if k.dtype.element_ty.primitive_bitwidth == 8 else 2 * DEPTH - 1
    )
    for at in tl.range(
        low, high, BLOCK_N, num_stages=STAGES
    ):  # pages: of loads, and of the loads of page ids
        position = at + at_n
        if IS_MASKED:
            held = position < high
            if HAS_WINDOW:
                held &= position >= lowest
        else:
            held = position >= 0
        if PAGE == 0:
            k_rows = k_head + position.to(tl.int64) * stride_k
            v_rows = v_head + position.to(tl.int64) * stride_v
        else:
            if IS_MASKED:
                page = tl.load(table + position // PAGE, mask=held, other=0).to(tl.int64)
            else:
                page = tl.load(table + position // PAGE).to(tl.int64)
            k_rows = k_head + page * stride_page + (position % PAGE) * D
            v_rows = k_rows
        k_ND, v_ND = k + k_rows[:, None] + at_d[None, :], v + v_rows[:, None] + at_d[None, :]
        if IS_MASKED or D != D_P:
            mask_ND = held[:, None] if D == D_P else held[:, None] & (at_d < D)[None, :]
            k_tile = tl.load(k_ND, mask=mask_ND, other=0.0).to(q_MD.dtype)
        else:
            k_tile = tl.load(k_ND).to(q_MD.dtype)
        scores = capped(tl.dot(q_MD, tl.trans(k_tile), input_precision="ieee"), pre, HAS_SOFTCAP)
        if IS_MASKED:
            seen = position[None, :] < end_M[:, None]
            if HAS_WINDOW:
                seen &= position[None, :] >= first_M[:, None]
            scores = tl.where(seen, scores, float("-inf"))
        weights, shrink, top, total = softmax_step(scores, top, total, post, IS_MASKED)
        if IS_MASKED or D != D_P:
            v_tile = tl.load(v_ND, mask=mask_ND, other=0.0).to(q_MD.dtype)
        else:
            v_tile = tl.load(v_ND).to(q_MD.dtype)
        acc = tl.dot(weights.to(q_MD.dtype), v_tile, acc * shrink[:, None], input_precision="ieee")
    return acc, top, total


@triton.jit
def described_tiles(
    q_MD, acc, top, total, k, v, row, column, high, pre, post,
    BLOCK_N: tl.constexpr, HAS_SOFTCAP: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Keys 0 to ``high``, seen by all, added to a tile of queries: read through descriptors from ``row`` and
    ``column`` on."""
    for at in tl.range(0, high, BLOCK_N, num_stages=DEPTH):
        k_ND = k.load([row + at, column])
        scores = capped(tl.dot(q_MD, tl.trans(k_ND), input_precision="ieee"), pre, HAS_SOFTCAP)
        weights, shrink, top, total = softmax_step(scores, top, total, post, False)
        v_ND = v.load([row + at, column])
        acc = tl.dot(weights.to(q_MD.dtype), v_ND, acc * shrink[:, None], input_precision="ieee")
    return acc, top, total


@triton.jit(
    do_not_specialize=["stride_table", "window", "batch"],
    do_not_specialize_on_alignment=["table", "lens", "cu_seqlens", "range_ends"],
)
def prefill_kernel(
    q, k, v, table, lens, cu_seqlens, range_ends, k_new, v_new, k_tiles, v_tiles, gate, out,
    pre, post, stride_qt, stride_qh, stride_gt, stride_gh, stride_page, stride_head, stride_table,
    stride_kt, stride_kh, stride_vt, stride_vh, window, batch,
    IS_CAUSAL: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, PACK: tl.constexpr,
    D: tl.constexpr, D_P: tl.constexpr, PAGE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, DEPTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One tile of BLOCK_M // PACK tokens by PACK heads. ``lens``: positions before this launch when IS_CAUSAL, else the
    keys that every query of a sequence sees. ``range_ends``: bidirectional ranges, or None. ``k_new`` and ``v_new``:
    keys and values of this launch's tokens, or None where pages are read for them too; ``k_tiles`` and ``v_tiles``:
    their descriptors, or None."""
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
    computed = length
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
    k_head = kv_head.to(tl.int64) * stride_head
    if PAGE == 0:
        k_head += tl.load(table).to(tl.int64) * stride_page
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D_P], tl.float32)
    if k_new is None:
        if not HAS_WINDOW:
            acc, top, total = attend_tiles(
                q_MD, acc, top, total, k, v, table, k_head, k_head, stride_page, D, D, low, clear, lowest, first_M,
                end_M, pre, post, D, D_P, PAGE, BLOCK_N, False, HAS_WINDOW, HAS_SOFTCAP, DEPTH,
            )  # fmt: skip
        acc, top, total = attend_tiles(
            q_MD, acc, top, total, k, v, table, k_head, k_head, stride_page, D, D, clear, high, lowest, first_M,
            end_M, pre, post, D, D_P, PAGE, BLOCK_N, True, HAS_WINDOW, HAS_SOFTCAP, DEPTH,
        )  # fmt: skip
    else:
        acc, top, total = attend_tiles(
            q_MD, acc, top, total, k, v, table, k_head, k_head, stride_page, D, D, low, computed, lowest, first_M,
            tl.minimum(end_M, computed), pre, post, D, D_P, PAGE, BLOCK_N, True, HAS_WINDOW, HAS_SOFTCAP, DEPTH,
        )  # fmt: skip
        # from here on, positions count from the first of this launch
        end_M -= computed
        first_M -= computed
        lowest = tl.maximum(lowest - computed, 0)
        k_new += start.to(tl.int64) * stride_kt + kv_head.to(tl.int64) * stride_kh
        v_new += start.to(tl.int64) * stride_vt + kv_head.to(tl.int64) * stride_vh
        clear = lowest // BLOCK_N * BLOCK_N
        if not HAS_WINDOW:
            clear = tl.min(end_M, 0) // BLOCK_N * BLOCK_N
            if k_tiles is not None:
                acc, top, total = described_tiles(
                    q_MD, acc, top, total, k_tiles, v_tiles, start, kv_head * D, clear, pre, post,
                    BLOCK_N, HAS_SOFTCAP, DEPTH,
                )  # fmt: skip
            else:
                acc, top, total = attend_tiles(
                    q_MD, acc, top, total, k_new, v_new, table, 0, 0, 0, stride_kt, stride_vt, 0, clear, 0,
                    first_M, end_M, pre, post, D, D_P, 0, BLOCK_N, False, HAS_WINDOW, HAS_SOFTCAP, DEPTH,
                )  # fmt: skip
        acc, top, total = attend_tiles(
            q_MD, acc, top, total, k_new, v_new, table, 0, 0, 0, stride_kt, stride_vt, clear, high - computed,
            lowest, first_M, end_M, pre, post, D, D_P, 0, BLOCK_N, True, HAS_WINDOW, HAS_SOFTCAP, DEPTH,
        )  # fmt: skip
    at_d = tl.arange(0, D_P)
    mask = live[:, None] & (at_d < D)[None, :]
    wide = tokens.to(tl.int64)[:, None]
    gate_rows = wide * stride_gt + heads[:, None] * stride_gh + at_d[None, :]
    result = finish(acc, total, gate, gate_rows, mask, out.dtype.element_ty)
    out_rows = (wide * HEADS + heads[:, None]) * D + at_d[None, :]
    tl.store(out + out_rows, result, mask=mask)


Own = tuple[torch.Tensor, torch.Tensor]
"""Keys and values [T, K, D] of a launch's tokens."""


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
    own: Own | None = None,
) -> tuple[torch.Tensor, list[Launch]]:
    """Outputs [T, H, D], and what computes them. ``own``: this launch's, where pages should not be read for them."""
    tokens, heads, dim = q_THD.shape
    batch, num_kv = cu_seqlens.shape[0] - 1, keys.k_PKSD.shape[1]
    out = torch.empty((tokens, heads, dim), dtype=q_THD.dtype, device=q_THD.device)
    assert q_THD.stride(2) == 1, f"queries need dense heads, not strides {q_THD.stride()}"
    gate_strides = (0, 0) if gate_THD is None else gate_THD.stride()[:2]
    pre, post = scale_factors(scale, softcap)
    group = heads // num_kv
    pack = group if config.packed else 1
    tiles = tokens // (config.block_m // pack) + batch
    own_strides = (0, 0, 0, 0) if own is None else (*own[0].stride()[:2], *own[1].stride()[:2])
    args = (
        q_THD, keys.k_PKSD, keys.v_PKSD, keys.table_BN, keys.lens_B, cu_seqlens, range_ends_T,
        *(own or (None, None)), *_described(own, config), gate_THD, out,
        pre, post, q_THD.stride(0), q_THD.stride(1), *gate_strides,
        keys.k_PKSD.stride(0), keys.k_PKSD.stride(1), keys.table_BN.stride(0), *own_strides,
        keys.window or 0, batch,
    )  # fmt: skip
    meta = {
        "IS_CAUSAL": is_causal, "HEADS": heads, "GROUP": group, "PACK": pack, "D": dim, "D_P": config.dim,
        "PAGE": keys.page, "BLOCK_M": config.block_m, "BLOCK_N": config.block_n,
        "HAS_WINDOW": keys.window is not None, "HAS_SOFTCAP": softcap is not None,
        **overlap(config.overlaps, prefill_kernel), "DEPTH": config.stages,
        "num_warps": config.warps,
    }  # fmt: skip
    return out, [Launch(prefill_kernel, (tiles, heads // pack), args, meta)]


def _described(own: Own | None, config: PrefillConfig) -> tuple[TensorDescriptor | None, ...]:
    """Tiles of keys and of values as matrices [T, K · D], or nothing where they cannot be read so."""
    if own is None or not config.is_described or not all(_is_flat(x, config.dim) for x in own):
        return None, None
    return tuple(
        TensorDescriptor(
            x, [x.shape[0], x.shape[1] * x.shape[2]], [x.stride(0), 1], [config.block_n, config.dim]
        )
        for x in own
    )


def _is_flat(x_TKD: torch.Tensor, dim: int) -> bool:
    """Heads of ``dim`` side by side, tokens at a distance and an address that are multiples of 16 bytes."""
    is_dense = x_TKD.shape[2] == dim and x_TKD.stride(1) == dim and x_TKD.stride(2) == 1
    is_aligned = not (x_TKD.stride(0) % 8 or x_TKD.data_ptr() % 16)
    return is_dense and is_aligned and x_TKD.element_size() == 2 and x_TKD.numel() > 0
