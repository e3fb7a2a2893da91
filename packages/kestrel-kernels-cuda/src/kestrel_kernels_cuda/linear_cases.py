"""Products as cases to compile for architectures that this machine does not have."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kestrel_kernels_cuda.compiling import CompileCase
from kestrel_kernels_cuda.linear_config import BLOCK, Product, default
from kestrel_kernels_cuda.linear_gemm import gemm_kernel
from kestrel_kernels_cuda.linear_gemv import gemv_kernel
from kestrel_kernels_cuda.linear_launch import READERS

__all__ = ["case_of"]

TENSORS = (
    "x_ptr", "w_ptr", "scale_ptr", "bias_ptr", "residual_ptr", "out_ptr",
)  # fmt: skip


def case_of(
    product: Product,
    epilogue: str = "none",
    *,
    norm: str = "none",
    archs: tuple[int, ...] = (80, 90),
    tma: bool = False,
) -> CompileCase:
    """``product`` of bfloat16 as it is configured by rule; with the overlap of kernels when it is for sm_90 alone."""
    config = default(product)
    config = replace(config, tma=True) if tma else config
    assert config.kernel != "blas", f"torch computes {product}"
    constants: dict[str, Any] = {
        "K": product.k, "BN": config.bn, "BK": config.bk, "EPILOGUE": epilogue, "BIAS": norm == "layer",
        "BLOCK": BLOCK if product.scaled else 0, "PDL": archs == (90,),
    }  # fmt: skip
    signature = dict.fromkeys(TENSORS, "*bf16") | {"n": "i32"}
    if product.scaled:
        signature |= {"w_ptr": "*fp8e4nv", "scale_ptr": "*fp32"}
    aligned: tuple[str, ...] = ("n",)
    if config.kernel == "gemv":
        constants |= {"NORM": norm, "AHEAD": READERS if archs == (90,) else 0}
        signature |= {"gain_ptr": "*bf16", "shift_ptr": "*bf16", "eps": "fp32"}
    else:
        constants |= {"BM": config.bm, "SPLIT": config.split, "SWAP": config.swap, "STAGES": config.stages}
        constants["TMA"] = config.tma
        signature |= {"x_tiles": "*bf16", "w_tiles": "*bf16"}
        if config.tma:
            kind = "fp8e4nv" if product.scaled else "bf16"
            signature |= {
                "x_tiles": f"tensordesc<bf16[{config.bm}, {config.bk}]>",
                "w_tiles": f"tensordesc<{kind}[{config.bn}, {config.bk}]>",
            }
        signature |= dict.fromkeys(("m", "x_stride", "residual_stride"), "i32")
        signature |= {"partial_ptr": "*fp32", "counter_ptr": "*i32"}
        aligned = ("n", "x_stride", "residual_stride")
    return CompileCase(
        name=f"linear {config.kernel} {product.key} {product.rows} {norm}{' tma' if config.tma else ''}",
        kernel=gemv_kernel if config.kernel == "gemv" else gemm_kernel,
        signature=signature,
        constexprs=constants,
        num_warps=config.warps,
        aligned=aligned,
        archs=archs,
    )
