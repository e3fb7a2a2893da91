"""moe_route: the most likely experts of each token, one warp per token.

Letters: T tokens, E experts, K experts of one token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
import triton
import triton.language as tl

from kestrel.spi import Impl, No, OpQuery, Yes
from kestrel_kernels_cuda.compiling import CompileCase
from kestrel_kernels_cuda.launch import Launch, compile_case_of, dtype_of, power_of_two, refuse_dtype
from kestrel_kernels_cuda.ordering import order_of, value_of
from kestrel_kernels_cuda.overlap import overlap, start_next, wait_for_previous

__all__ = ["IMPLS", "compile_cases", "moe_route"]

MOST_EXPERTS = 1024  # 32 logits a thread


@triton.jit
def moe_route_kernel(
    logits, weights, experts, stride_t,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr, SHIFT: tl.constexpr, BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Each round takes the largest key: the logit in the order of integers, above the complement of the
    expert's number, so that of equal logits the lower expert is found first."""
    start_next(PDL)
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    logit = tl.load(logits + token * stride_t + expert, mask=expert < EXPERTS, other=0.0).to(tl.float32)
    # a NaN is the likeliest expert: its row's weights become NaN, and every expert named exists
    order = order_of(tl.where(logit != logit, float("inf"), logit)).to(tl.int64)
    taken = tl.full([BLOCK], -(2**63), tl.int64)
    key = tl.where(expert < EXPERTS, order * BLOCK + (BLOCK - 1 - expert), taken)
    rank = tl.arange(0, BLOCK_K)
    kept = tl.full([BLOCK_K], float("-inf"), tl.float32)
    chosen = tl.zeros([BLOCK_K], tl.int32)
    for k in tl.static_range(TOP_K):
        best = tl.max(key, axis=0)
        found = (BLOCK - 1 - (best & (BLOCK - 1))).to(tl.int32)
        kept = tl.where(rank == k, value_of((best >> SHIFT).to(tl.int32)), kept)
        chosen = tl.where(rank == k, found, chosen)
        key = tl.where(expert == found, taken, key)
    part = tl.exp(kept - tl.max(kept, axis=0))
    weight = part / tl.sum(part, axis=0)
    place = token * TOP_K + rank
    tl.store(weights + place, weight.to(weights.dtype.element_ty), mask=rank < TOP_K)
    tl.store(experts + place, chosen.to(tl.int64), mask=rank < TOP_K)


def _constants(experts: int, top_k: int) -> dict[str, int]:
    block = power_of_two(experts)
    return {
        "EXPERTS": experts, "TOP_K": top_k, "BLOCK": block, "SHIFT": block.bit_length() - 1,
        "BLOCK_K": power_of_two(top_k),
    }  # fmt: skip


def _launch(logits_TE: torch.Tensor, top_k: int) -> tuple[Launch, torch.Tensor, torch.Tensor]:
    logits_TE = logits_TE if logits_TE.stride(1) == 1 or logits_TE.shape[1] == 1 else logits_TE.contiguous()
    tokens, experts = logits_TE.shape
    weights = torch.empty((tokens, top_k), dtype=logits_TE.dtype, device=logits_TE.device)
    chosen = torch.empty((tokens, top_k), dtype=torch.int64, device=logits_TE.device)
    args = (logits_TE, weights, chosen, logits_TE.stride(0))
    meta = {**_constants(experts, top_k), "num_warps": 1, **overlap(logits_TE.device)}
    launch = Launch(moe_route_kernel, (tokens,), args, meta)
    return launch, weights, chosen


def moe_route(logits_TE: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``kestrel.ops.moe_route``. A token with a logit that is no number gets weights that are none."""
    launch, weights, chosen = _launch(logits_TE, top_k)
    launch.run()
    return weights, chosen


def _supports(query: OpQuery) -> Yes | No:
    if refused := refuse_dtype(query):
        return refused
    if query.get("experts", 0) > MOST_EXPERTS:
        return No(f"one warp chooses among at most {MOST_EXPERTS} experts, not {query.get('experts')}")
    return Yes()


def _meta(experts: int, top_k: int, dtype: torch.dtype) -> Launch:
    return _launch(torch.empty((2, experts), dtype=dtype, device="meta"), top_k)[0]


def _warm(query: OpQuery, row_counts: Sequence[int]) -> Iterable[Callable[[], object]]:
    return (_meta(query.get("experts"), query.get("top_k"), dtype_of(query)).compile,)


IMPLS: Mapping[str, Impl] = {"moe_route": Impl(supports=_supports, fn=moe_route, warm=_warm)}


def compile_cases() -> Iterator[CompileCase]:
    """Qwen's 8 of 256, and the most experts."""
    for experts in (256, MOST_EXPERTS):
        yield compile_case_of(f"moe_route {experts}", _meta(experts, 8, torch.bfloat16))
