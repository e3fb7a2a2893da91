"""fp8_linear: 8-bit weights scaled by blocks, read as they are for few rows and made 16 bits for many."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import torch
import triton
import triton.language as tl

from kestrel.ops import row_bucket
from kestrel.spi import Impl, No, OpQuery, Yes
from kestrel_kernels_cuda.compiling import CompileCase
from kestrel_kernels_cuda.devices import arch_of
from kestrel_kernels_cuda.launch import Launch, dtype_of, refuse_dtype, refuse_e4m3
from kestrel_kernels_cuda.linear_blas import gate_launch, product
from kestrel_kernels_cuda.linear_cases import case_of
from kestrel_kernels_cuda.linear_config import BLOCK, Product, choose, is_gated
from kestrel_kernels_cuda.linear_launch import Operands, config_for, launch, overlaps_on, run

__all__ = ["IMPLS", "compile_cases", "dequantised", "fp8_linear"]

META = torch.device("meta")
ROWS = 32  # of a weight that a program makes 16 bits of


@triton.jit
def dequantise_kernel(w_ptr, scale_ptr, out_ptr, n, k, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """ROWS rows of the weight [``n``, ``k``] a program, BLOCK columns of them: they have one scale, for ROWS divides
    BLOCK."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    scale = tl.load(scale_ptr + tl.program_id(0) * ROWS // BLOCK * tl.num_programs(1) + tl.program_id(1))
    places = rows[:, None].to(tl.int64) * k + columns[None, :]
    live = (rows < n)[:, None] & (columns < k)[None, :]
    w = tl.load(w_ptr + places, mask=live, other=0.0).to(tl.float32)
    tl.store(out_ptr + places, (w * scale).to(out_ptr.dtype.element_ty), mask=live)


def _dequantise(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> tuple[Launch, torch.Tensor]:
    n, k = weight.shape
    out = torch.empty((n, k), dtype=dtype, device=weight.device)
    grid = (triton.cdiv(n, ROWS), triton.cdiv(k, BLOCK))
    meta = {"BLOCK": BLOCK, "ROWS": ROWS, "num_warps": 4}
    return Launch(dequantise_kernel, grid, (weight, scale, out, n, k), meta), out


def dequantised(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """As ``kestrel.ops.fp8_linear.dequantised``."""
    started, out = _dequantise(weight, scale, dtype)
    started.run()
    return out


def fp8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    epilogue: str | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """As ``kestrel.ops.fp8_linear.fp8_linear``."""
    config = config_for(x, weight, epilogue)
    if config.kernel == "blas":
        return product(x, dequantised(weight, scale, x.dtype), bias, epilogue, residual)
    return run(config, x, weight, bias, epilogue, residual, scale=scale)


def supports(query: OpQuery) -> Yes | No:
    """Yes where 8-bit floats can be read, and no tile of a gated weight lies across two blocks."""
    if refused := refuse_dtype(query) or refuse_e4m3():
        return refused
    if is_gated(query.get("epilogue")) and query.get("n", 0) % (2 * BLOCK):
        return No(f"halves of {query.get('n')} rows are not whole blocks of {BLOCK}")
    return Yes()


def _warm(query: OpQuery, row_counts: Sequence[int]) -> Iterable[Callable[[], object]]:
    """The kernel of the query's row bucket, when some launch falls into it."""
    rows = next((count for count in row_counts if row_bucket(count) == query.get("rows")), None)
    if rows is None:
        return
    n, k, epilogue, dtype = query.get("n"), query.get("k"), query.get("epilogue"), dtype_of(query)
    empty = partial(torch.empty, dtype=dtype, device=META)
    weight = torch.empty((n, k), dtype=torch.float8_e4m3fn, device=META)
    scale = torch.empty((triton.cdiv(n, BLOCK), triton.cdiv(k, BLOCK)), dtype=torch.float32, device=META)
    config = choose(Product.of(n, k, rows, epilogue, wide=dtype == torch.float32, scaled=True), arch_of(META))
    if config.kernel == "blas":
        yield _dequantise(weight, scale, dtype)[0].compile
        if is_gated(epilogue):
            yield gate_launch(empty(rows, n), epilogue)[0].compile
        return
    residual = empty(rows, n) if epilogue in ("residual", "accumulate") else None
    operands = Operands(
        x=empty(rows, k),
        weight=weight,
        bias=None,
        residual=residual,
        epilogue=epilogue,
        norm=None,
        scale=scale,
    )
    yield launch(config, operands, overlaps=overlaps_on(META))[0].compile


IMPLS: Mapping[str, Impl] = {"fp8_linear": Impl(supports=supports, fn=fp8_linear, warm=_warm)}


def compile_cases() -> Iterator[CompileCase]:
    """One row and few."""
    yield case_of(Product(n=18432, k=2560, rows=1, gated=True, scaled=True), "silu_mul", archs=(90,))
    yield case_of(Product(n=2560, k=9216, rows=16, scaled=True), "residual", archs=(90,))
