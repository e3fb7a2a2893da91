"""linear and norm_linear: a choice by shape between two kernels and torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from kestrel.ops import row_bucket
from kestrel.spi import Impl, No, OpQuery, Yes
from kestrel_kernels_cuda.compiling import CompileCase
from kestrel_kernels_cuda.devices import arch_of
from kestrel_kernels_cuda.launch import Launch, compile_case_of, dtype_of, refuse_dtype
from kestrel_kernels_cuda.linear_ahead import ahead_launch
from kestrel_kernels_cuda.linear_blas import gate_launch, product
from kestrel_kernels_cuda.linear_cases import band_case, case_of
from kestrel_kernels_cuda.linear_config import Config, Product, choose, is_gated
from kestrel_kernels_cuda.linear_launch import Norm, Operands, config_for, launch, overlaps_on, rows_of, run

__all__ = ["IMPLS", "compile_cases", "linear", "norm_linear"]

META = torch.device("meta")


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
        if config.ahead and not config.norm and overlaps_on(x.device):
            _ahead(config, rows_of(x), weight, None)[0].run()
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
    config = config_for(x, weight, epilogue)
    if config.kernel == "blas":
        started, normed = _ahead(config, rows_of(x), weight, norm)
        started.run()
        return product(normed.view(x.shape), weight, bias, epilogue, residual)
    return run(config, x, weight, bias, epilogue, residual, norm=norm)


def _ahead(
    config: Config, x: torch.Tensor, weight: torch.Tensor, norm: Norm | None
) -> tuple[Launch, torch.Tensor]:
    return ahead_launch(x, weight, norm, config.ahead, config.split, overlaps=overlaps_on(x.device))


def supports(query: OpQuery) -> Yes | No:
    """Yes to every product of a dtype served."""
    return refuse_dtype(query) or Yes()


def supports_norm(query: OpQuery) -> Yes | No:
    """Yes to products of one row, and to those of a few for which it was measured: norming rows again in every program
    may cost more than a norm of its own."""
    if refused := refuse_dtype(query):
        return refused
    config = choose(_product_of(query), arch_of(META))
    if config.kernel == "gemv" or (config.norm and (config.kernel == "blas" or query.get("kind") != "layer")):
        return Yes()
    return No(f"for {query.get('rows') or 'many'} rows a norm of its own is faster; the parts are served")


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
        jobs = [gate_launch(empty(rows, n), epilogue)[0].compile] if is_gated(epilogue) else []
        if fused or (config.ahead and not config.norm and overlaps_on(META)):
            jobs.append(_ahead(config, empty(rows, k), empty(n, k), norm)[0].compile)
        return jobs
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
    yield case_of(Product(n=12352, k=2560, rows=16), archs=(90,), tma=True)
    band = Config(kernel="band", bm=64, bn=64, rest=16, bk=64, stages=4, ahead=8, late=True)
    yield band_case(replace(band, rest=8, norm=True), replace(gated, rows=64), "silu_mul")
    yield band_case(replace(band, split=4), Product(n=2560, k=9216, rows=64), "accumulate")
    yield band_case(replace(band, bm=16), Product(n=10240, k=2560, rows=16))
    empty = partial(torch.empty, dtype=torch.bfloat16, device=META)
    norm = Norm(kind="layer", gain=empty(2560), shift=empty(2560), eps=1e-6)
    for name, fused in (("ahead", None), ("norm ahead", norm)):
        started, _ = ahead_launch(empty(16, 2560), empty(18432, 2560), fused, 640, 1, overlaps=True)
        yield compile_case_of(f"linear {name}", started, (90,))
