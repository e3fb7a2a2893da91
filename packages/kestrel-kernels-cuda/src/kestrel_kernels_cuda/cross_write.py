"""write_cross: projected encoder rows go to their entries, keys and values of equal items in one launch.

Letters: N rows, K key/value heads, D head dim, L layers, E entries, S positions of an entry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby

import torch
import triton
import triton.language as tl

from kestrel.spi import CrossView, Impl, Limits, OpQuery
from kestrel_kernels_cuda.compiling import CompileCase
from kestrel_kernels_cuda.launch import (
    Launch,
    compile_case_of,
    dtype_of,
    jobs_of,
    power_of_two,
    supports_dtypes,
)

__all__ = ["IMPLS", "compile_cases", "write_cross"]

TILE = 4096  # numbers of keys and as many of values of one program


@triton.jit(
    do_not_specialize=["length", "blocks"],
    do_not_specialize_on_alignment=["k", "v", "entries"],  # parts of one product, or of the items before
)
def write_cross_kernel(
    k, v, entries, k_pool, v_pool, length, blocks,
    stride_k, stride_kh, stride_v, stride_vh, stride_entry, stride_head, stride_slot,
    DIM: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Programs (item and ``ROWS`` of its positions, head)."""
    item = tl.program_id(0) // blocks
    position = (tl.program_id(0) % blocks) * ROWS + tl.arange(0, ROWS)[:, None]
    head = tl.program_id(1)
    dim = tl.arange(0, BLOCK)[None, :]
    inside = (position < length) & (dim < DIM)
    row = item.to(tl.int64) * length + position
    place = tl.load(entries + item) * stride_entry + head * stride_head + position * stride_slot + dim
    key = tl.load(k + row * stride_k + head * stride_kh + dim, mask=inside)
    value = tl.load(v + row * stride_v + head * stride_vh + dim, mask=inside)
    tl.store(k_pool + place, key.to(k_pool.dtype.element_ty), mask=inside)
    tl.store(v_pool + place, value.to(v_pool.dtype.element_ty), mask=inside)


def _launches(
    k_NKD: torch.Tensor, v_NKD: torch.Tensor, lengths: Sequence[int], view: CrossView, layer: int
) -> Iterator[Launch]:
    k_pool, v_pool = view.k_LEKSD[layer], view.v_LEKSD[layer]
    assert k_pool.stride() == v_pool.stride(), "keys and values lie differently in their entries"
    assert k_pool.stride(-1) == 1, "a key's numbers are not adjacent"
    _, heads, dim = k_NKD.shape
    block = power_of_two(dim)
    rows = max(1, TILE // block)
    item, start = 0, 0
    for length, equal in groupby(lengths):
        count = len(list(equal))
        end = start + count * length
        k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k_NKD[start:end], v_NKD[start:end]))
        blocks = triton.cdiv(length, rows)
        yield Launch(
            write_cross_kernel,
            (count * blocks, heads),
            (
                k, v, view.entries_B[item : item + count], k_pool, v_pool, length, blocks,
                *k.stride()[:2], *v.stride()[:2], *k_pool.stride()[:3],
            ),
            {"DIM": dim, "BLOCK": block, "ROWS": rows, "num_warps": 4},
        )  # fmt: skip
        item, start = item + count, end


def write_cross(
    k_NKD: torch.Tensor, v_NKD: torch.Tensor, lengths: Sequence[int], view: CrossView, layer: int
) -> None:
    """As ``kestrel.ops.cross_attention.write_cross``."""
    for launch in _launches(k_NKD, v_NKD, lengths, view, layer):
        launch.run()


def _planned(query: OpQuery) -> list[Launch]:
    """A launch for one projection of keys and values."""
    heads, dim, longest = query.get("kv_heads"), query.get("head_dim"), query.get("max_len")

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    pool = empty(1, 2, heads, longest, dim, dtype=dtype_of(query))
    view = CrossView(
        k_LEKSD=pool, v_LEKSD=pool, entries_B=empty(1, dtype=torch.int64), lens_B=empty(1), cu_seqlens=empty(2),
        limits=Limits(max_rows=1, max_tokens=longest, max_query_len=longest, max_context_len=longest),
    )  # fmt: skip
    k, v = empty(longest, 2, heads, dim, dtype=dtype_of(query)).unbind(1)
    return list(_launches(k, v, [longest], view, 0))


def _warm(query: OpQuery, row_counts: Sequence[int]) -> Iterable[Callable[[], object]]:
    """One job: the kernel does not depend on the number of items."""
    return jobs_of(_planned(query))


IMPLS: Mapping[str, Impl] = {"write_cross": Impl(supports=supports_dtypes, fn=write_cross, warm=_warm)}


def compile_cases() -> Iterator[CompileCase]:
    """Whisper's heads."""
    query = OpQuery.of("write_cross", kv_heads=20, head_dim=64, max_len=1500, dtype="bfloat16")
    yield compile_case_of("write_cross 64", _planned(query)[0])
