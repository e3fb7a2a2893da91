"""linear_pair and linear_sum of one row: a block's four products in two launches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import triton

from kestrel.spi import Impl, No, OpQuery, Yes
from kestrel_kernels_cuda.compiling import CompileCase
from kestrel_kernels_cuda.launch import Launch, compile_case_of, dtype_of, power_of_two, refuse_dtype
from kestrel_kernels_cuda.linear_pair_kernels import pair_kernel, sum_kernel
from kestrel_kernels_cuda.overlap import overlap, overlapped

__all__ = ["IMPLS", "Config", "compile_cases", "linear_pair", "linear_sum"]

MOST_INPUTS = 16384  # of a row that a program's registers hold
META = torch.device("meta")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """``bn`` rows of a weight a program, ``bk`` inputs at a time (a pair's pieces are whole rows). ``programs``: that
    share a pair's pieces; ``depth``: pieces on their way at a time."""

    bn: int
    bk: int
    warps: int
    programs: int = 256
    depth: int = 2


PAIR = Config(bn=4, bk=2048, warps=2, programs=528, depth=1)
SUM = Config(bn=4, bk=1024, warps=4, depth=4)
"""Measured on an H200 for 16-bit weights of 2,048 inputs, and of 2,048 and 8,192 into 2,048 outputs."""


def linear_pair(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    other_weight: torch.Tensor,
    other_bias: torch.Tensor,
    other_epilogue: str | None,
    gain: torch.Tensor,
    shift: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``kestrel.ops.linear_pair.linear_pair``, of one row or none."""
    leading = x.shape[:-1]
    if not x.numel():
        return x.new_empty((*leading, len(weight))), x.new_empty((*leading, len(other_weight)))
    launch, out, other = _pair(x, weight, bias, other_weight, other_bias, other_epilogue, gain, shift, eps)
    launch.run()
    return out.view(*leading, len(out)), other.view(*leading, len(other))


def linear_sum(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    other_x: torch.Tensor,
    other_weight: torch.Tensor,
    other_bias: torch.Tensor,
    residual: torch.Tensor,
) -> torch.Tensor:
    """As ``kestrel.ops.linear_pair.linear_sum``, of one row or none."""
    if not x.numel():
        return torch.empty_like(residual)
    launch, out = _sum(x, weight, bias, other_x, other_weight, other_bias, residual)
    launch.run()
    return out.view(residual.shape)


def _pair(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    other_weight: torch.Tensor,
    other_bias: torch.Tensor,
    other_epilogue: str | None,
    gain: torch.Tensor,
    shift: torch.Tensor,
    eps: float,
) -> tuple[Launch, torch.Tensor, torch.Tensor]:
    k, n, other_n = x.shape[-1], len(weight), len(other_weight)
    config = _narrowed(PAIR, power_of_two(k), x.dtype)
    out, other = (torch.empty(size, dtype=x.dtype, device=x.device) for size in (n, other_n))
    pieces = triton.cdiv(n, config.bn) + triton.cdiv(other_n, config.bn)
    programs = min(config.programs, pieces)
    meta = {
        "K": k, "BN": config.bn, "BK": config.bk, "ACTIVATION": other_epilogue or "none", "PROGRAMS": programs,
        "DEPTH": config.depth,
    }  # fmt: skip
    row = x.reshape(k)
    args = (row, gain, shift, weight, bias, out, other_weight, other_bias, other, n, other_n, eps)
    return Launch(pair_kernel, (programs,), args, _options(meta, config, x.device)), out, other


def _sum(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    other_x: torch.Tensor,
    other_weight: torch.Tensor,
    other_bias: torch.Tensor,
    residual: torch.Tensor,
) -> tuple[Launch, torch.Tensor]:
    k, other_k, n = x.shape[-1], other_x.shape[-1], len(weight)
    config = _narrowed(SUM, min(SUM.bk, power_of_two(max(k, other_k))), x.dtype)
    out = torch.empty(n, dtype=x.dtype, device=x.device)
    meta = {
        "K": k, "OTHER_K": other_k, "BN": config.bn, "BK": config.bk,
        "DEPTH": min(config.depth, triton.cdiv(k, config.bk) + triton.cdiv(other_k, config.bk)),
    }  # fmt: skip
    args = (
        x.reshape(k), weight, bias, other_x.reshape(other_k), other_weight, other_bias, residual.reshape(n), out, n,
    )  # fmt: skip
    return Launch(sum_kernel, (triton.cdiv(n, config.bn),), args, _options(meta, config, x.device)), out


def _narrowed(config: Config, bk: int, dtype: torch.dtype) -> Config:
    """``config`` for pieces ``bk`` numbers of ``dtype`` wide: what a program holds stays about as large."""
    bk = max(16, bk)
    bn = max(1, config.bn * 2 // dtype.itemsize)
    while bn > 1 and bn * bk > 16384:
        bn //= 2
    return replace(config, bn=bn, bk=bk, warps=min(config.warps, max(1, bn * bk // 256)))


def _options(meta: dict[str, Any], config: Config, device: torch.device) -> dict[str, Any]:
    return {**meta, **overlap(device), "num_warps": config.warps}


def supports(query: OpQuery) -> Yes | No:
    """Yes to one row of up to ``MOST_INPUTS`` numbers: more rows go better into products of their own."""
    if refused := refuse_dtype(query):
        return refused
    if query.get("rows") != 1:
        return No("serves one row; products of more are served one by one")
    if query.get("k", 0) + query.get("other_k", 0) > MOST_INPUTS:
        return No(f"holds at most {MOST_INPUTS} inputs of a row in registers")
    return Yes()


def _launch_of(query: OpQuery) -> Launch:
    """The launch of ``query``, of tensors that take no memory."""
    k, n = query.get("k"), query.get("n")
    empty = partial(torch.empty, dtype=dtype_of(query), device=META)
    if query.op == "linear_sum":
        other_k = query.get("other_k")
        return _sum(empty(k), empty(n, k), empty(n), empty(other_k), empty(n, other_k), empty(n), empty(n))[0]
    other, epilogue = query.get("other_n"), query.get("other_epilogue")
    return _pair(
        empty(k), empty(n, k), empty(n), empty(other, k), empty(other), epilogue, empty(k), empty(k), 1e-5
    )[0]


def _warm(query: OpQuery, row_counts: Sequence[int]) -> Iterable[Callable[[], object]]:
    return (_launch_of(query).compile,) if 1 in row_counts else ()


IMPLS: Mapping[str, Impl] = {
    "linear_pair": Impl(supports=supports, fn=linear_pair, warm=_warm),
    "linear_sum": Impl(supports=supports, fn=linear_sum, warm=_warm),
}


def compile_cases() -> Iterator[CompileCase]:
    """Moondream 2's, as on any device and where kernels overlap."""
    facts = {"k": 2048, "rows": 1, "dtype": "bfloat16"}
    for query in (
        OpQuery.of("linear_pair", n=6144, other_n=8192, other_epilogue="gelu_tanh", **facts),
        OpQuery.of("linear_sum", n=2048, other_k=8192, **facts),
    ):
        launch = _launch_of(query)
        yield compile_case_of(query.op, launch)
        yield compile_case_of(f"{query.op} overlapped", overlapped(launch))
