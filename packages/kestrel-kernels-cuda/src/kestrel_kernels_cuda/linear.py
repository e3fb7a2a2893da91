"""linear and norm_linear: a choice by shape between two kernels and torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import torch

from kestrel.ops import row_bucket
from kestrel.spi import Impl, No, OpQuery, Yes
from kestrel_kernels_cuda.compiling import CompileCase
from kestrel_kernels_cuda.devices import arch_of
from kestrel_kernels_cuda.launch import dtype_of, refuse_dtype
from kestrel_kernels_cuda.linear_blas import gate_launch, product
from kestrel_kernels_cuda.linear_cases import case_of
from kestrel_kernels_cuda.linear_config import Product, choose, is_gated
from kestrel_kernels_cuda.linear_launch import Norm, Operands, config_for, launch, overlaps_on, run
from kestrel_kernels_cuda.linear_stream import stream_cases

__all__ = ["IMPLS", "compile_cases", "linear", "norm_linear"]

META = torch.device("meta")
STREAMED = (
    (18432, 2560, "silu_mul"), (12352, 2560, None), (10240, 2560, None), (2560, 4096, "accumulate"),
    (2560, 9216, "accumulate"), (8192, 2048, "gelu_tanh"),
)  # fmt: skip
"""Weights of the products to compile of those that are streamed: outputs, inputs, epilogue."""


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    epilogue: str | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """As ``kestrel.ops.linear.linear``."""
    config = config_for(x, weight, epilogue)
    if config.kernel == "blas":
        return product(x, weight, bias, epilogue, residual)
    return run(config, x, weight, bias, epilogue, residual)


def norm_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    epilogue: str | None = None,
    residual: torch.Tensor | None = None,
    *,
    kind: str = "rms",
    gain: torch.Tensor | None = None,
    shift: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> torch.Tensor:
    """As ``kestrel.ops.norm_linear.norm_linear``."""
    if gain is None:
        start = torch.zeros if kind == "rms_plus_one" else torch.ones
        gain = start(x.shape[-1], dtype=x.dtype, device=x.device)
    if shift is None and kind == "layer":
        shift = torch.zeros_like(gain)
    norm = Norm(kind=kind, gain=gain, shift=shift, eps=eps)
    return run(config_for(x, weight, epilogue), x, weight, bias, epilogue, residual, norm=norm)


def supports(query: OpQuery) -> Yes | No:
    """Yes to every product of a dtype served."""
    return refuse_dtype(query) or Yes()


def supports_norm(query: OpQuery) -> Yes | No:
    """Yes to products of one row: norming more rows again in every program costs more than a norm of its own (on an
    H200 48 µs instead of 19 for 16 rows and a weight of 12,352 × 2,560)."""
    if refused := refuse_dtype(query):
        return refused
    if choose(_product_of(query), arch_of(META)).kernel != "gemv":
        return No(f"for {query.get('rows') or 'many'} rows a norm of its own is faster; the parts are served")
    return Yes()


def _product_of(query: OpQuery) -> Product:
    rows = query.get("rows")
    wide = query.get("dtype") == "float32"
    return Product(
        n=query.get("n"), k=query.get("k"), rows=rows, gated=is_gated(query.get("epilogue")), wide=wide
    )


def _warm(fused: bool, query: OpQuery, row_counts: Sequence[int]) -> Iterable[Callable[[], object]]:
    """At most one job: the kernel of the query's row bucket, when some launch falls into it."""
    rows = next((count for count in row_counts if row_bucket(count) == query.get("rows")), None)
    if rows is None:
        return ()
    n, k, epilogue = query.get("n"), query.get("k"), query.get("epilogue")
    empty = partial(torch.empty, dtype=dtype_of(query), device=META)
    config = config_for(empty(rows, k), empty(n, k), epilogue)
    kind = query.get("kind")
    norm = Norm(kind=kind, gain=empty(k), shift=empty(k), eps=1e-6) if fused else None
    if config.kernel == "blas":
        return (gate_launch(empty(rows, n), epilogue)[0].compile,) if is_gated(epilogue) else ()
    residual = empty(rows, n) if epilogue in ("residual", "accumulate") else None
    operands = Operands(
        x=empty(rows, k),
        weight=empty(n, k),
        bias=empty(n) if query.get("bias") else None,
        residual=residual,
        epilogue=epilogue,
        norm=norm,
    )
    return (launch(config, operands, overlaps=overlaps_on(META))[0].compile,)


IMPLS: Mapping[str, Impl] = {
    "linear": Impl(supports=supports, fn=linear, warm=partial(_warm, False)),
    "norm_linear": Impl(supports=supports_norm, fn=norm_linear, warm=partial(_warm, True)),
}


def compile_cases() -> Iterator[CompileCase]:
    """Each kernel in the configurations that differ most."""
    gated = Product(n=18432, k=2560, rows=1, gated=True)
    yield case_of(Product(n=12352, k=2560, rows=1), norm="rms_plus_one", archs=(90,))
    yield case_of(gated, "silu_mul", norm="rms_plus_one")
    yield case_of(Product(n=8192, k=2048, rows=1), "gelu_tanh", norm="layer", archs=(90,))
    yield case_of(Product(n=2560, k=9216, rows=16), "residual")
    yield from stream_cases((rows, *weight) for weight in STREAMED for rows in (8, 16, 32, 64))
    yield case_of(Product(n=12352, k=2560, rows=16), archs=(90,), tma=True)
