"""fp8_linear: a product with a weight of 8-bit floats that share a scale by blocks.

Letters: T rows, K inputs, N outputs of the weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from kestrel.ops.linear import linear, row_bucket
from kestrel.ops.op import Case, Inputs, Op, Tolerance
from kestrel.ops.random import normal, uniform

__all__ = ["BLOCK", "FP8_LINEAR", "dequantised", "fp8_linear"]

BLOCK = 128  # rows and columns of a weight that share a scale


def dequantised(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``weight`` [N, K] of 8-bit floats times ``scale`` [⌈N / 128⌉, ⌈K / 128⌉] of its blocks, rounded to ``dtype``."""
    rows, columns = weight.shape
    each = scale.float().repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return (weight.float() * each[:rows, :columns]).to(dtype)


def fp8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    epilogue: str | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """``linear`` with ``weight`` [N, K] of e4m3 floats, times ``scale`` [⌈N / 128⌉, ⌈K / 128⌉] float32 by blocks.

    The other arguments are as ``ops.linear`` takes them. Inputs are not quantised here; a provider may quantise them by
    128 of a row where its tolerance allows. Source: DeepSeek-V3, arXiv 2412.19437, section 3.3.2.
    """
    return linear(x, dequantised(weight, scale, x.dtype), bias, epilogue, residual)


_SHAPES = {
    "smallest": (1, 16, 8),
    "odd": (3, 144, 52),
    "empty": (0, 128, 128),
    "one row": (1, 384, 256),
    "skinny": (5, 512, 256),
    "batch": (40, 256, 384),
    "gemm": (130, 256, 256),
}
_EPILOGUES = (None, "silu_mul", "residual")


def _make(
    shape: tuple[int, int, int], epilogue: str | None, seed: int, device: torch.device, dtype: torch.dtype
) -> Inputs:
    rows, k, n = shape
    x = normal(seed, (rows, k), device, dtype)
    weight = normal(seed + 1, (n, k), torch.device("cpu"), torch.float32).to(torch.float8_e4m3fn).to(device)
    blocks = (-(-n // BLOCK), -(-k // BLOCK))
    scale = uniform(seed + 2, blocks, device, torch.float32, 0.5 * k**-0.5, 2.0 * k**-0.5)
    residual = normal(seed + 3, (rows, n), device, dtype) if epilogue == "residual" else None
    return Inputs(
        args=(x, weight, scale, None), kwargs={"epilogue": epilogue, "residual": residual}, weight=1
    )


def _cases() -> Sequence[Case]:
    return [
        Case(
            op="fp8_linear",
            name=f"{name}, {epilogue or 'no epilogue'}",
            make=partial(_make, shape, epilogue),
            facts={"k": shape[1], "n": shape[2], "epilogue": epilogue, "rows": row_bucket(shape[0])},
        )
        for name, shape in _SHAPES.items()
        for epilogue in _EPILOGUES
    ]


FP8_LINEAR = Op(
    name="fp8_linear",
    reference=fp8_linear,
    cases=_cases,
    # As linear. In 16 bits the reference rounds each weight times its scale, and a provider may not.
    tolerances={
        "float32": Tolerance(5e-5, 5e-5),
        "bfloat16": Tolerance(6e-2, 3e-2),
        "float16": Tolerance(8e-3, 8e-3),
    },
    facts={
        "k": "K",
        "n": "N",
        "epilogue": "as the argument",
        "rows": "row_bucket(T)",
        "dtype": "of x, and of the output",
    },
)
