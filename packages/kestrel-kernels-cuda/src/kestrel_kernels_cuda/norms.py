"""rms_norm, layer_norm, add_norm and e4m3_norm: one kernel, whole rows in registers, float32 inside.

Letters: R rows (all leading axes), C the width normalised over.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import torch
import triton
import triton.language as tl

from kestrel.ops.e4m3 import LARGEST
from kestrel.spi import Impl, No, OpQuery, Yes
from kestrel_kernels_cuda.compiling import CompileCase
from kestrel_kernels_cuda.launch import (
    Launch,
    compile_case_of,
    dtype_of,
    power_of_two,
    refuse_dtype,
    refuse_e4m3,
)
from kestrel_kernels_cuda.overlap import overlap, overlapped, start_next, wait_for_previous

__all__ = ["IMPLS", "add_norm", "compile_cases", "e4m3_norm", "layer_norm", "rms_norm"]

WIDEST = 16384  # 32 numbers a thread at 16 warps
TILE = 1024  # numbers that a program takes at least: narrow rows share one
MEASURED = {1152: (2, 2), 1280: (2, 2), 2048: (2, 4)}
"""Rows and warps of a program by width: those that an H200 was fastest with over thousands of rows, and no slower over
one."""


@triton.jit(do_not_specialize=["rows"])
def norm_kernel(
    x, delta, weight, bias, offset, total, out, rows, stride_x, stride_delta, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, ADD_ONE: tl.constexpr, CENTRE: tl.constexpr,
    PDL: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """``out`` [R, C] is the norm of x + delta + offset, times SCALE unless that is None; ``total`` is x + delta; any
    but x may be None."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < WIDTH)
    start_next(PDL)
    factor, shift = 1.0, 0.0
    if weight is not None:
        factor = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)
        if ADD_ONE:
            factor += 1.0
    if bias is not None:
        shift = tl.load(bias + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    constant = 0.0
    if offset is not None:
        constant = tl.load(offset + column, mask=column < WIDTH, other=0.0)
    wait_for_previous(PDL)
    value = tl.load(x + row * stride_x + column, mask=inside, other=0.0)
    if delta is not None:
        added = tl.load(delta + row * stride_delta + column, mask=inside, other=0.0)
        value = (value.to(tl.float32) + added.to(tl.float32)).to(value.dtype)
        tl.store(total + row * WIDTH + column, value, mask=inside)
    wide = value.to(tl.float32) + constant
    if CENTRE:
        mean = tl.sum(wide, axis=1)[:, None] / WIDTH
        wide = tl.where(inside, wide - mean, 0.0)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, axis=1)[:, None] / WIDTH + eps)
    normed = normed * factor + shift
    if SCALE is not None:
        normed *= SCALE  # e4m3 numbers are cut at ±448 as they are made
    tl.store(out + row * WIDTH + column, normed.to(out.dtype.element_ty), mask=inside)


def _config(width: int) -> dict[str, int]:
    """By the width alone, so that a row's sums never depend on how many rows there are."""
    block = power_of_two(width)
    rows, warps = MEASURED.get(width, (max(1, TILE // block), min(16, max(4, block // 512))))
    return {"BLOCK": block, "ROWS": rows, "num_warps": warps}


def _rows_of(x: torch.Tensor) -> torch.Tensor:
    """``x`` [R, C] with adjacent columns; a view where its strides allow one."""
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(1) == 1 or flat.shape[1] == 1 else flat.contiguous()


def _launch(
    x: torch.Tensor,
    delta: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    kind: str,
    offset: torch.Tensor | None = None,
    *,
    in_e4m3: bool = False,
) -> tuple[Launch, torch.Tensor, torch.Tensor | None]:
    """The launch, its norm, and its sum (None without ``delta``). ``in_e4m3``: the norm as ``e4m3_norm`` gives it."""
    width = x.shape[-1]
    out = torch.empty(x.shape, dtype=torch.float8_e4m3fn if in_e4m3 else x.dtype, device=x.device)
    total = None if delta is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows_x, rows_delta = _rows_of(x), None if delta is None else _rows_of(delta)
    config = _config(width)
    rows = rows_x.shape[0]
    stride_delta = 0 if rows_delta is None else rows_delta.stride(0)
    launch = Launch(
        norm_kernel,
        (triton.cdiv(rows, config["ROWS"]),),
        (rows_x, rows_delta, weight, bias, offset, total, out, rows, rows_x.stride(0), stride_delta, eps),
        {
            "WIDTH": width,
            "ADD_ONE": kind == "rms_plus_one",
            "CENTRE": kind == "layer",
            "SCALE": LARGEST / math.sqrt(width) if in_e4m3 else None,
            **config,
            **overlap(x.device),
        },
    )
    return launch, out, total


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float = 1e-6, *, add_one: bool = False
) -> torch.Tensor:
    """As ``kestrel.ops.norms.rms_norm``."""
    launch, out, _ = _launch(x, None, weight, None, eps, "rms_plus_one" if add_one else "rms")
    launch.run()
    return out


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    offset: torch.Tensor | None = None,
) -> torch.Tensor:
    """As ``kestrel.ops.norms.layer_norm``."""
    launch, out, _ = _launch(x, None, weight, bias, eps, "layer", offset)
    launch.run()
    return out


def add_norm(
    x: torch.Tensor,
    delta: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    kind: str = "rms",
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``kestrel.ops.norms.add_norm``."""
    launch, out, total = _launch(x, delta, weight, bias, eps, kind)
    launch.run()
    assert total is not None
    return total, out


def e4m3_norm(
    x: torch.Tensor,
    eps: float = 1e-5,
    delta: torch.Tensor | None = None,
    offset: torch.Tensor | None = None,
    *,
    kind: str = "layer",
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``kestrel.ops.e4m3.e4m3_norm``."""
    launch, values, total = _launch(x, delta, None, None, eps, kind, offset, in_e4m3=True)
    launch.run()
    return x if total is None else total, values


def supports(query: OpQuery) -> Yes | No:
    """Yes up to rows of ``WIDEST`` numbers."""
    if refused := refuse_dtype(query):
        return refused
    if query.get("dim", 0) > WIDEST:
        return No(f"holds a row of at most {WIDEST} numbers in registers, not {query.get('dim')}")
    return Yes()


def supports_e4m3(query: OpQuery) -> Yes | No:
    """Likewise, where there are floats of 8 bits."""
    return refuse_e4m3() or supports(query)


def _meta(
    op: str, kind: str, width: int, dtype: torch.dtype, *, has_offset: bool = False, has_delta: bool = False
) -> Launch:
    """A launch of two rows that take no memory."""
    x, weight = (torch.empty(shape, dtype=dtype, device="meta") for shape in ((2, width), (width,)))
    delta, bias = x if op == "add_norm" else None, weight if kind == "layer" else None
    offset = torch.empty(width, dtype=torch.float32, device="meta") if has_offset else None
    if op == "e4m3_norm":
        return _launch(x, x if has_delta else None, None, None, 1e-6, kind, offset, in_e4m3=True)[0]
    return _launch(x, delta, weight, bias, 1e-6, kind, offset)[0]


def _warm(op: str, query: OpQuery, row_counts: Sequence[int]) -> Iterable[Callable[[], object]]:
    """One job: the kernel does not depend on the number of rows."""
    facts = query.get("kind"), query.get("dim"), dtype_of(query)
    has = {f"has_{name}": query.get(name, False) for name in ("offset", "delta")}
    return (_meta(op, *facts, **has).compile,)


IMPLS: Mapping[str, Impl] = {
    name: Impl(supports=serves, fn=fn, warm=partial(_warm, name))
    for name, fn, serves in (
        ("rms_norm", rms_norm, supports),
        ("layer_norm", layer_norm, supports),
        ("add_norm", add_norm, supports),
        ("e4m3_norm", e4m3_norm, supports_e4m3),
    )
}


def compile_cases() -> Iterator[CompileCase]:
    """The published widths that differ most in configuration, and every branch of the kernel once."""
    for width, op, kind in (
        (256, "rms_norm", "rms_plus_one"),
        (2560, "add_norm", "rms_plus_one"),
        (1152, "layer_norm", "layer"),
        (WIDEST, "add_norm", "layer"),
    ):
        launch = _meta(op, kind, width, torch.bfloat16, has_offset=op == "layer_norm")
        yield compile_case_of(f"{op} {kind} {width}", launch)
        if width == WIDEST:
            yield compile_case_of(f"{op} {kind} {width} overlapped", overlapped(launch))
    launch = _meta("e4m3_norm", "layer", 1152, torch.bfloat16, has_offset=True, has_delta=True)
    yield compile_case_of("e4m3_norm 1152 overlapped", overlapped(launch))
