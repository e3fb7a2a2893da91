"""paged_attention: which kernel, with which tiles.

Letters: B sequences, T tokens, H query heads, K key/value heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from kestrel.ops.pages import once_per_launch
from kestrel.spi import Impl, OpQuery
from kestrel.spi.batch import Limits, PagedView
from kestrel_kernels_cuda.attention_configs import (
    Split,
    arch_of,
    decode_config,
    joins_in_place,
    multiprocessors,
    prefill_config,
    split_of,
    supports_heads,
)
from kestrel_kernels_cuda.attention_decode import Fresh, decode_launches
from kestrel_kernels_cuda.attention_join import arrivals_of
from kestrel_kernels_cuda.attention_parts import Keys
from kestrel_kernels_cuda.attention_prefill import Own, prefill_launch
from kestrel_kernels_cuda.attention_warm import DECODES, META, any_limits, cases_of
from kestrel_kernels_cuda.compiling import CompileCase
from kestrel_kernels_cuda.launch import Launch, dtype_of, jobs_of, kv_dtype_of

__all__ = ["EIGHT", "IMPLS", "compile_cases", "decode", "meta_gate", "meta_view", "paged_attention"]


def paged_attention(
    q_THD: torch.Tensor,
    view: PagedView,
    layer: int,
    scale: float,
    softcap: float | None = None,
    gate_THD: torch.Tensor | None = None,
    k_TKD: torch.Tensor | None = None,
    v_TKD: torch.Tensor | None = None,
) -> torch.Tensor:
    """As ``kestrel.ops.paged_attention``: outputs [T, H, D]."""
    own = None if k_TKD is None or v_TKD is None else (k_TKD, v_TKD)
    out, launches = _launches(q_THD, view, layer, scale, softcap, gate_THD, arch_of(q_THD.device), own=own)
    for launch in launches:
        launch.run()
    return out


def _launches(
    q_THD: torch.Tensor,
    view: PagedView,
    layer: int,
    scale: float,
    softcap: float | None,
    gate_THD: torch.Tensor | None,
    arch: int,
    split: Split | None = None,
    own: Own | None = None,
) -> tuple[torch.Tensor, list[Launch]]:
    if view.limits.is_decode:
        return decode(q_THD, view, layer, scale, softcap, gate_THD, arch, split)
    heads, dim = q_THD.shape[1:]
    keys = _keys(view, layer, 0)
    group = heads // keys.k_PKSD.shape[1]
    sizes = q_THD.element_size(), keys.k_PKSD.element_size()
    config = prefill_config(arch, dim, group, sizes[0], view.limits, view.window, sizes[1])
    if not config.is_described and keys.k_PKSD.dtype == q_THD.dtype:
        own = None  # pages hold the same bits, and are read with all others
    return prefill_launch(
        q_THD, keys, view.cu_seqlens, view.bidirectional_end_T, True, scale, softcap, gate_THD, config, own
    )


def _keys(view: PagedView, layer: int, new: int) -> Keys:
    return Keys(
        k_PKSD=view.k_LPKSD[layer],
        v_PKSD=view.v_LPKSD[layer],
        table_BN=view.page_table_BN,
        lens_B=view.computed_B,
        new=new,
        page=view.page_size,
        window=view.window,
    )


def decode(
    q_BHD: torch.Tensor,
    view: PagedView,
    layer: int,
    scale: float,
    softcap: float | None,
    gate_BHD: torch.Tensor | None,
    arch: int,
    split: Split | None = None,
    fresh: Fresh | None = None,
) -> tuple[torch.Tensor, list[Launch]]:
    """Outputs [B, H, D] of one query per row, and what computes them. Without ``fresh``, the newest keys are in their
    pages already. Layers after the first read pages early: by then, what a step begins with is long done."""
    rows, heads, dim = q_BHD.shape
    keys = _keys(view, layer, 1)
    num_kv, processors = keys.k_PKSD.shape[1], multiprocessors(q_BHD.device)
    size, groups = q_BHD.element_size(), rows * num_kv
    tiles = decode_config(arch, dim, heads // num_kv, size, view.limits, groups, processors)
    if split is None:
        split = split_of(view.limits, rows, num_kv, _longest(view, tiles.block_n), tiles, processors)
    arrivals = None
    if joins_in_place(view.limits, split):
        arrivals = once_per_launch(view, layer, "arrivals", arrivals_of)
    is_early = fresh is not None and layer > 0
    return decode_launches(
        q_BHD, keys, scale, softcap, gate_BHD, tiles, split, arrivals, fresh, is_early=is_early
    )


def _longest(view: PagedView, block_n: int) -> int:
    """Keys of the longest row that decode may see."""
    longest = view.limits.max_context_len
    return longest if view.window is None else min(longest, view.window + block_n)


def meta_view(query: OpQuery, limits: Limits, *, has_ends: bool = False) -> PagedView:
    """The view of a launch of ``query`` under ``limits``, without memory. ``has_ends``: of a step that says how far
    behind them tokens see."""
    rows, page = limits.max_tokens, query.get("page")
    shape = (1, 2, query.get("kv_heads"), page, query.get("head_dim"))
    pool = torch.empty(shape, dtype=kv_dtype_of(query), device=META)
    return PagedView(
        k_LPKSD=pool,
        v_LPKSD=pool,
        page_table_BN=torch.empty((limits.max_rows, 64), dtype=torch.int32, device=META),
        slots_T=torch.empty(rows, dtype=torch.int64, device=META),
        computed_B=torch.empty(limits.max_rows, dtype=torch.int32, device=META),
        cu_seqlens=torch.empty(limits.max_rows + 1, dtype=torch.int32, device=META),
        limits=limits,
        page_size=page,
        window=query.get("window"),
        bidirectional_end_T=torch.empty(rows, dtype=torch.int32, device=META) if has_ends else None,
    )


def meta_gate(query: OpQuery, rows: int) -> torch.Tensor | None:
    """Each head's half of a projection, when the query has a gate."""
    shape = (rows, query.get("heads"), 2, query.get("head_dim"))
    return torch.empty(shape, dtype=dtype_of(query), device=META)[:, :, 1] if query.get("gated") else None


def _planned(
    query: OpQuery, arch: int, limits: Limits, split: Split | None = None, *, has_ends: bool = False
) -> list[Launch]:
    view, rows = meta_view(query, limits, has_ends=has_ends), limits.max_tokens
    shape = (rows, query.get("heads"), query.get("head_dim"))
    q = torch.empty(shape, dtype=dtype_of(query), device=META)
    softcap = 1.0 if query.get("softcap") else None
    own = None
    if query.get("fresh"):
        k = torch.empty(
            (rows, query.get("kv_heads"), query.get("head_dim")), dtype=dtype_of(query), device=META
        )
        own = (k, torch.empty((rows, 3, *k.shape[1:]), dtype=k.dtype, device=META)[:, 2])
    return _launches(q, view, 0, 1.0, softcap, meta_gate(query, rows), arch, split, own)[1]


def _warm_launches(query: OpQuery, arch: int, row_counts: Sequence[int] = (2048, 512)) -> Iterator[Launch]:
    if query.get("mode") == "decode":
        for rows, wanted, splits, longest in DECODES:
            yield from _planned(query, arch, any_limits(rows, rows, 1, longest), Split(wanted, 64, splits))
        return
    for tokens in {2, *row_counts}:
        for has_ends in (False, True):  # op by op, and captured or with pictures
            yield from _planned(query, arch, any_limits(1, tokens, tokens, 4096), has_ends=has_ends)


def _warm(query: OpQuery, row_counts: Sequence[int]) -> Iterable[Callable[[], object]]:
    return jobs_of(_warm_launches(query, arch_of(META), row_counts))


EIGHT = {"kv_dtype": "float8_e4m3fn"}
_SHAPES = {  # of models: heads, key/value heads, head dim, gated, window, softcap
    "moondream": (32, 32, 64, False, None, False),
    "qwen": (16, 4, 256, True, None, False),
    "plain": (32, 8, 128, False, None, False),
    "gemma": (16, 8, 256, False, 1024, True),
    "gemma full": (16, 1, 512, False, None, False),
    "odd": (16, 16, 72, False, None, False),
    "exact": (8, 8, 64, False, None, False),
}


def compile_cases() -> Iterator[CompileCase]:
    """Decode and prefill of models' heads in bfloat16, and of one in float32."""
    for name, (heads, kv_heads, dim, gated, window, softcap) in _SHAPES.items():
        for mode in ("decode", "prefill"):
            query = OpQuery.of(
                "paged_attention", mode=mode, gated=gated, fresh=mode == "prefill", window=window, softcap=softcap,
                heads=heads, kv_heads=kv_heads, head_dim=dim, page=16,
                dtype="float32" if name == "exact" else "bfloat16",
            )  # fmt: skip
            for arch in (80, 90) if name in ("moondream", "qwen") else (90,):
                yield from cases_of(f"paged_attention {mode} {name}", _warm_launches(query, arch), (arch,))
            if name in ("moondream", "qwen") and mode == "prefill":
                kept = OpQuery.of(query.op, **dict(query.facts), **EIGHT)
                yield from cases_of(f"paged_attention {mode} {name} 8 bits", _warm_launches(kept, 90), (90,))


IMPLS = {"paged_attention": Impl(supports=supports_heads, fn=paged_attention, warm=_warm)}
