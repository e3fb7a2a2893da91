"""cross_attention: an entry is one long page, so that the kernels of paged_attention serve it.

Letters: B sequences, T tokens, H query heads, K key/value heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import torch

from kestrel.ops.pages import once_per_launch
from kestrel.spi import Impl, OpQuery
from kestrel.spi.batch import CrossView, Limits
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
from kestrel_kernels_cuda.attention_decode import decode_launches
from kestrel_kernels_cuda.attention_join import arrivals_of
from kestrel_kernels_cuda.attention_parts import Keys
from kestrel_kernels_cuda.attention_prefill import prefill_launch
from kestrel_kernels_cuda.attention_warm import DECODES, META, any_limits, cases_of
from kestrel_kernels_cuda.compiling import CompileCase
from kestrel_kernels_cuda.launch import Launch, dtype_of, jobs_of

__all__ = ["IMPLS", "compile_cases", "cross_attention"]


def cross_attention(q_THD: torch.Tensor, view: CrossView, layer: int, scale: float) -> torch.Tensor:
    """As ``kestrel.ops.cross_attention``: outputs [T, H, D]."""
    out, launches = _launches(q_THD, view, layer, scale, arch_of(q_THD.device))
    for launch in launches:
        launch.run()
    return out


def _launches(
    q_THD: torch.Tensor, view: CrossView, layer: int, scale: float, arch: int, split: Split | None = None
) -> tuple[torch.Tensor, list[Launch]]:
    rows, heads, dim = q_THD.shape
    keys = Keys(
        k_PKSD=view.k_LEKSD[layer],
        v_PKSD=view.v_LEKSD[layer],
        table_BN=view.entries_B.unsqueeze(1),
        lens_B=view.lens_B,
        new=0,
        page=0,
    )
    num_kv, max_len = keys.k_PKSD.shape[1:3]
    group, size = heads // num_kv, q_THD.element_size()
    if not view.limits.is_decode:
        config = prefill_config(arch, dim, group, size, view.limits)
        return prefill_launch(q_THD, keys, view.cu_seqlens, None, False, scale, None, None, config)
    processors = multiprocessors(q_THD.device)
    limits = replace(view.limits, max_context_len=max_len)
    tiles = decode_config(arch, dim, group, size, limits, rows * num_kv, processors)
    if split is None:
        split = split_of(view.limits, rows, num_kv, max_len, tiles, processors)
    arrivals = None
    if joins_in_place(view.limits, split):
        arrivals = once_per_launch(view, layer, "arrivals", arrivals_of)
    return decode_launches(q_THD, keys, scale, None, None, tiles, split, arrivals, is_early=layer > 0)


def _planned(query: OpQuery, arch: int, limits: Limits, split: Split | None = None) -> list[Launch]:
    dim, dtype, rows = query.get("head_dim"), dtype_of(query), limits.max_tokens
    pool = torch.empty((1, 2, query.get("kv_heads"), query.get("max_len"), dim), dtype=dtype, device=META)
    view = CrossView(
        k_LEKSD=pool,
        v_LEKSD=pool,
        entries_B=torch.empty(limits.max_rows, dtype=torch.int64, device=META),
        lens_B=torch.empty(limits.max_rows, dtype=torch.int32, device=META),
        cu_seqlens=torch.empty(limits.max_rows + 1, dtype=torch.int32, device=META),
        limits=limits,
    )
    q = torch.empty((rows, query.get("heads"), dim), dtype=dtype, device=META)
    return _launches(q, view, 0, 1.0, arch, split)[1]


def _warm_launches(query: OpQuery, arch: int, row_counts: Sequence[int] = (2048, 512)) -> Iterator[Launch]:
    if query.get("mode") == "decode":
        for rows, wanted, splits, _ in DECODES:
            yield from _planned(query, arch, any_limits(rows, rows, 1, 1), Split(wanted, 64, splits))
        return
    for tokens in {2, *row_counts}:
        yield from _planned(query, arch, any_limits(1, tokens, tokens, 1))


def _warm(query: OpQuery, row_counts: Sequence[int]) -> Iterable[Callable[[], object]]:
    return jobs_of(_warm_launches(query, arch_of(META), row_counts))


def compile_cases() -> Iterator[CompileCase]:
    """Whisper's decoder."""
    for mode in ("decode", "prefill"):
        query = OpQuery.of(
            "cross_attention", mode=mode, heads=20, kv_heads=20, head_dim=64, max_len=1500, dtype="bfloat16"
        )
        for arch in (80, 90):
            yield from cases_of(f"cross_attention {mode} whisper", _warm_launches(query, arch), (arch,))


IMPLS = {"cross_attention": Impl(supports=supports_heads, fn=cross_attention, warm=_warm)}
