"""copy_page: keys and values of a page's filled part, in every layer, in one launch.

Letters: L layers, P pages, K key/value heads, S page size, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
import triton
import triton.language as tl

from kestrel.spi import Impl, OpQuery, Yes
from kestrel_kernels_cuda.compiling import CompileCase
from kestrel_kernels_cuda.launch import KV_DTYPES, Launch, compile_case_of

__all__ = ["IMPLS", "compile_cases", "copy_page"]

BLOCK = 1024  # numbers of one program
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # a copy looks at no number: one kernel per width


@triton.jit(do_not_specialize=["src", "dst", "length"])
def copy_page_kernel(
    k,
    v,
    src,
    dst,
    length,
    stride_layer,
    stride_page,
    stride_head,
    KV_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Programs (layer and head, block of the run of ``length`` adjacent numbers)."""
    pair = tl.program_id(0).to(tl.int64)
    first = (pair // KV_HEADS) * stride_layer + (pair % KV_HEADS) * stride_head
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < length
    source = first + src.to(tl.int64) * stride_page + place
    target = first + dst.to(tl.int64) * stride_page + place
    tl.store(k + target, tl.load(k + source, mask=inside), mask=inside)
    tl.store(v + target, tl.load(v + source, mask=inside), mask=inside)


def _launch(k_LPKSD: torch.Tensor, v_LPKSD: torch.Tensor, src: int, dst: int, filled: int) -> Launch:
    assert k_LPKSD.stride() == v_LPKSD.stride(), "keys and values lie differently in their pages"
    assert k_LPKSD.is_contiguous(), "pages of another layout"
    k, v = (pool.view(_BITS[pool.element_size()]) for pool in (k_LPKSD, v_LPKSD))
    layers, _, kv_heads, _, dim = k.shape
    length = filled * dim
    return Launch(
        copy_page_kernel,
        (layers * kv_heads, triton.cdiv(length, BLOCK)),
        (k, v, src, dst, length, *k.stride()[:3]),
        {"KV_HEADS": kv_heads, "BLOCK": BLOCK, "num_warps": 4},
    )


def copy_page(k_LPKSD: torch.Tensor, v_LPKSD: torch.Tensor, src: int, dst: int, filled: int) -> None:
    """As ``kestrel.ops.copy_page``, for pools of any dtype of 1, 2 or 4 bytes."""
    _launch(k_LPKSD, v_LPKSD, src, dst, filled).run()


def _supports(query: OpQuery) -> Yes:
    return Yes()


def _warm(query: OpQuery, row_counts: Sequence[int]) -> Iterable[Callable[[], object]]:
    """One job; the number of heads is a constant of the kernel, and a query that does not say it is not warmed."""
    kv_heads, dtype = query.get("kv_heads"), KV_DTYPES.get(query.get("dtype"))
    if kv_heads is None or dtype is None:
        return ()
    pool = torch.empty((2, 2, kv_heads, 16, query.get("head_dim")), dtype=dtype, device="meta")
    return (_launch(pool, pool, 0, 1, 1).compile,)


IMPLS: Mapping[str, Impl] = {"copy_page": Impl(supports=_supports, fn=copy_page, warm=_warm)}


def compile_cases() -> Iterator[CompileCase]:
    """Sixteen-bit pools."""
    pool = torch.empty((2, 2, 4, 16, 256), dtype=torch.bfloat16, device="meta")
    yield compile_case_of("copy_page", _launch(pool, pool, 0, 1, 1))
