"""linear and norm_linear: a choice by shape between two kernels and torch, and their launches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
import triton

from kestrel.ops import row_bucket
from kestrel.spi import Impl, No, OpQuery, Yes
from kestrel_kernels_cuda.compiling import CompileCase
from kestrel_kernels_cuda.launch import Launch, dtype_of, refuse_dtype
from kestrel_kernels_cuda.linear_blas import gate_launch, product
from kestrel_kernels_cuda.linear_config import Config, Product, choose, is_gated
from kestrel_kernels_cuda.linear_gemm import gemm_kernel
from kestrel_kernels_cuda.linear_gemv import gemv_kernel
from kestrel_kernels_cuda.linear_scratch import counters

__all__ = ["IMPLS", "Norm", "compile_cases", "launch", "linear", "norm_linear"]

OVERLAPS = True
"""Whether a kernel may start while the one before it finishes (programmatic dependent launch, sm_90 and newer). Set it
to False before a model is loaded to look at kernels one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    """The norm before a product: ``kind``, ``gain`` and ``shift`` as ``kestrel.ops.norm_linear`` has them."""

    kind: str
    gain: torch.Tensor
    shift: torch.Tensor | None
    eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Operands:
    """The tensors of a product, ``x`` [rows, K] and ``residual`` [rows, N] with adjacent columns."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    residual: torch.Tensor | None
    epilogue: str | None
    norm: Norm | None

    @property
    def outputs(self) -> int:
        """Columns of the output."""
        n = self.weight.shape[0]
        return n // 2 if is_gated(self.epilogue) else n


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    epilogue: str | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """As ``kestrel.ops.linear.linear``."""
    config = _config(x, weight, epilogue)
    if config.kernel == "blas":
        return product(x, weight, bias, epilogue, residual)
    return _run(config, x, weight, bias, epilogue, residual, None)


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
    return _run(_config(x, weight, epilogue), x, weight, bias, epilogue, residual, norm)


def _config(x: torch.Tensor, weight: torch.Tensor, epilogue: str | None) -> Config:
    n, k = weight.shape
    wanted = Product.of(n, k, x.numel() // k, epilogue, wide=x.dtype == torch.float32)
    return choose(wanted, _arch(x.device))


def _run(
    config: Config,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    epilogue: str | None,
    residual: torch.Tensor | None,
    norm: Norm | None,
) -> torch.Tensor:
    operands = Operands(
        x=_rows_of(x),
        weight=weight,
        bias=bias,
        residual=None if residual is None else _rows_of(residual),
        epilogue=epilogue,
        norm=norm,
    )
    started, out = launch(config, operands, overlaps=OVERLAPS and _arch(x.device) >= 90)
    if x.numel():
        started.run()
    return out.view(*x.shape[:-1], operands.outputs)


def _rows_of(x: torch.Tensor) -> torch.Tensor:
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(1) == 1 or flat.shape[1] == 1 else flat.contiguous()


def launch(config: Config, operands: Operands, *, overlaps: bool) -> tuple[Launch, torch.Tensor]:
    """The launch of ``config`` (not "blas"), and its output [rows, outputs]. ``overlaps``: see ``OVERLAPS``."""
    o, norm = operands, operands.norm
    rows = o.x.shape[0]
    out = torch.empty((rows, o.outputs), dtype=o.x.dtype, device=o.x.device)
    gain, shift = (o.x, o.x) if norm is None else (norm.gain, o.x if norm.shift is None else norm.shift)
    tensors = (o.x, o.weight, _or(o.bias, o.x), _or(o.residual, o.x), gain, shift, out)
    eps = 0.0 if norm is None else norm.eps
    meta: dict[str, Any] = {
        "K": o.weight.shape[1], "BN": config.bn, "BK": config.bk,
        "EPILOGUE": o.epilogue or "none", "BIAS": o.bias is not None,
        "NORM": "none" if norm is None else norm.kind, "PDL": overlaps, "num_warps": config.warps,
    }  # fmt: skip
    if overlaps:
        meta["launch_pdl"] = True
    columns = triton.cdiv(o.outputs, config.bn)
    if config.kernel == "gemv":
        return Launch(gemv_kernel, (columns,), (*tensors, o.outputs, eps), meta), out
    assert norm is None or config.split == 1, "a norm needs all of a row in one program"
    meta |= {"BM": config.bm, "SPLIT": config.split, "SWAP": config.swap, "STAGES": config.stages}
    bands = triton.cdiv(rows, config.bm)
    scratch = _scratch(config, o, bands * columns)
    strides = o.x.stride(0), 0 if o.residual is None else o.residual.stride(0)
    args = (*tensors, *scratch, rows, o.outputs, *strides, eps)
    return Launch(gemm_kernel, (bands, columns, config.split), args, meta), out


def _scratch(config: Config, o: Operands, tiles: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for partial sums, and counters; stand-ins when nothing is split."""
    if config.split == 1:
        return o.x, o.x
    halves = 2 if is_gated(o.epilogue) else 1
    size = tiles * config.split * halves * config.bm * config.bn
    return torch.empty(size, dtype=torch.float32, device=o.x.device), counters(o.x.device, tiles)


def _or(tensor: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    """A kernel takes a pointer even where it reads nothing."""
    return other if tensor is None else tensor


def _arch(device: torch.device) -> int:
    """90 for sm_90; the oldest served where there is no GPU (interpreted kernels, compiling ahead)."""
    if device.type == "cpu" or not torch.cuda.is_available():
        return 80
    return _capability(None if device.type == "meta" else device.index)


@lru_cache(maxsize=16)
def _capability(index: int | None) -> int:
    major, minor = torch.cuda.get_device_capability(index)
    return major * 10 + minor


def supports(query: OpQuery) -> Yes | No:
    """Yes to every product of a dtype served."""
    return refuse_dtype(query) or Yes()


def supports_norm(query: OpQuery) -> Yes | No:
    """Yes where reading the rows again in every program costs less than a norm of its own."""
    if refused := refuse_dtype(query):
        return refused
    rows = query.get("rows")
    if query.get("dtype") == "float16" and rows != 1 and query.get("kind") != "layer":
        return No("rows of float16 may overflow before their norm scales them; the parts are served")
    config = choose(_product_of(query), _arch(torch.device("meta")))
    if config.kernel == "blas" or not config.fused:
        return No(
            f"for {rows or 'many'} rows of {query.get('k')} a norm of its own is faster; the parts are served"
        )
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
    config, dtype = choose(_product_of(query), _arch(torch.device("meta"))), dtype_of(query)
    n, k, epilogue = query.get("n"), query.get("k"), query.get("epilogue")
    empty = partial(torch.empty, dtype=dtype, device="meta")
    if config.kernel == "blas":
        return (gate_launch(empty(rows, n), epilogue)[0].compile,) if is_gated(epilogue) else ()
    kind = query.get("kind")
    norm = Norm(kind=kind, gain=empty(k), shift=empty(k), eps=1e-6) if fused else None
    residual = empty(rows, n) if epilogue == "residual" else None
    overlaps = OVERLAPS and _arch(torch.device("meta")) >= 90
    # A query does not say whether there is a bias: compile both, for a second kernel costs a second of one thread.
    return tuple(
        launch(
            config,
            Operands(
                x=empty(rows, k),
                weight=empty(n, k),
                bias=bias,
                residual=residual,
                epilogue=epilogue,
                norm=norm,
            ),
            overlaps=overlaps,
        )[0].compile
        for bias in (None, empty(n))
    )


IMPLS: Mapping[str, Impl] = {
    "linear": Impl(supports=supports, fn=linear, warm=partial(_warm, False)),
    "norm_linear": Impl(supports=supports_norm, fn=norm_linear, warm=partial(_warm, True)),
}


def compile_cases() -> Iterator[CompileCase]:
    """Each kernel in the configurations that differ most."""
    gemv = ["x_ptr", "w_ptr", "bias_ptr", "residual_ptr", "gain_ptr", "shift_ptr", "out_ptr"]
    cases: list[tuple[Product, str, str, tuple[int, ...]]] = [
        (Product(n=12352, k=2560, rows=1), "none", "rms_plus_one", (90,)),
        (Product(n=18432, k=2560, rows=1, gated=True), "silu_mul", "rms_plus_one", (80, 90)),
        (Product(n=8192, k=2048, rows=1), "gelu_tanh", "layer", (90,)),
        (Product(n=2560, k=9216, rows=16), "residual", "none", (80, 90)),
        (Product(n=18432, k=2560, rows=16, gated=True), "silu_mul", "rms_plus_one", (90,)),
        (Product(n=2560, k=9216, rows=64), "residual", "none", (80, 90)),
        (Product(n=18432, k=2560, rows=64, gated=True), "silu_mul", "none", (90,)),
    ]
    for case, epilogue, norm, archs in cases:
        config = choose(case, 90)
        constants = {
            "K": case.k, "BN": config.bn, "BK": config.bk, "EPILOGUE": epilogue, "BIAS": norm == "layer", "NORM": norm,
            "PDL": archs == (90,),
        }  # fmt: skip
        if config.kernel == "gemv":
            kernel: Any = gemv_kernel
            signature = dict.fromkeys(gemv, "*bf16") | {"n": "i32", "eps": "fp32"}
            aligned: tuple[str, ...] = ("n",)
        else:
            kernel = gemm_kernel
            constants |= {
                "BM": config.bm,
                "SPLIT": config.split,
                "SWAP": config.swap,
                "STAGES": config.stages,
            }
            signature = dict.fromkeys(gemv, "*bf16") | {
                "partial_ptr": "*fp32",
                "counter_ptr": "*i32",
                "eps": "fp32",
            }
            signature |= dict.fromkeys(("m", "n", "x_stride", "residual_stride"), "i32")
            aligned = ("n", "x_stride", "residual_stride")
        yield CompileCase(
            name=f"linear {config.kernel} {case.key} {case.rows} {norm}",
            kernel=kernel, signature=signature, constexprs=constants, num_warps=config.warps, aligned=aligned,
            archs=archs,
        )  # fmt: skip
