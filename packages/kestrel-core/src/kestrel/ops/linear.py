"""linear: a matrix product with what follows it fused in.

Letters: T rows, K inputs, N outputs of the weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F

from kestrel.ops.op import Case, Inputs, Op, Tolerance
from kestrel.ops.random import normal

__all__ = ["EPILOGUES", "LINEAR", "ROW_BUCKETS", "linear", "row_bucket"]

EPILOGUES = (None, "gelu_tanh", "gelu", "silu_mul", "gelu_tanh_mul", "residual", "accumulate")
ROW_BUCKETS = (1, 8, 16, 32, 64, 128, 256)
"""A GEMV, skinny products read at the speed of memory, then ordinary GEMMs ("rows" is 0 above the last). What runs a
product depends on its bucket alone, so that a launch padded to a fixed number of rows always runs the same."""


def row_bucket(rows: int) -> int:
    """The fact ``rows`` of a product with that many rows: the smallest bucket that holds it, 0 above the largest."""
    for bucket in ROW_BUCKETS:
        if rows <= bucket:
            return bucket
    return 0


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    epilogue: str | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """``x`` [..., K] · ``weight`` [N, K] transposed + ``bias`` [N], then the epilogue: [..., N] (gated: [..., N / 2]).

    ``epilogue``: None; "gelu_tanh", "gelu" (erf); "silu_mul" and "gelu_tanh_mul": the first N / 2 outputs are the
    gate g, the others u, the result is act(g) · u; "residual": ``residual`` [..., N] is added;
    "accumulate": as "residual", and the sum is written over ``residual``, which is returned.
    """
    y = F.linear(x, weight, bias)
    match epilogue:
        case None:
            return y
        case "gelu_tanh":
            return F.gelu(y, approximate="tanh")
        case "gelu":
            return F.gelu(y)
        case "residual":
            assert residual is not None, "the residual epilogue needs a residual"
            return y + residual
        case "accumulate":
            assert residual is not None, "the accumulate epilogue needs a residual"
            return residual.add_(y)
        case "silu_mul":
            gate, up = y.chunk(2, dim=-1)
            return F.silu(gate) * up
        case "gelu_tanh_mul":
            gate, up = y.chunk(2, dim=-1)
            return F.gelu(gate, approximate="tanh") * up
        case _:
            raise ValueError(f"epilogue is {epilogue!r}; choices: {', '.join(map(str, EPILOGUES))}")


_SHAPES = {
    "smallest": (1, 8, 8),
    "odd": (3, 37, 22),
    "empty": (0, 64, 32),
    "one row": (1, 256, 768),
    "skinny": (8, 512, 256),
    "gemm": (130, 128, 192),
    "wide": (2, 2048, 64),
}


def _make(
    shape: tuple[int, int, int], epilogue: str | None, seed: int, device: torch.device, dtype: torch.dtype
) -> Inputs:
    rows, k, n = shape
    x = normal(seed, (rows, k), device, dtype)
    weight = normal(seed + 1, (n, k), device, dtype, scale=k**-0.5)
    adds = epilogue in ("residual", "accumulate")
    bias = None if adds else normal(seed + 2, (n,), device, dtype)
    residual = normal(seed + 3, (rows, n), device, dtype) if adds else None
    written = (residual,) if residual is not None and epilogue == "accumulate" else ()
    kwargs = {"epilogue": epilogue, "residual": residual}
    return Inputs(args=(x, weight, bias), kwargs=kwargs, weight=1, written=written)


def _cases() -> Sequence[Case]:
    return [
        Case(
            op="linear",
            name=f"{name}, {epilogue or 'no epilogue'}",
            make=partial(_make, shape, epilogue),
            facts={
                "k": shape[1],
                "n": shape[2],
                "epilogue": epilogue,
                "bias": epilogue not in ("residual", "accumulate"),
                "rows": row_bucket(shape[0]),
            },
        )
        for name, shape in _SHAPES.items()
        for epilogue in EPILOGUES
    ]


LINEAR = Op(
    name="linear",
    reference=linear,
    cases=_cases,
    # float32: sums of K terms in another order (TF32 is off). 16 bit: the output's rounding, and that of the value
    # before the epilogue when a provider keeps it in 16 bits. A provider may take GELU by tanh for the one by erf in
    # bfloat16 alone: off by 4.7e-4 at most (at ±2.7), a sixteenth of the last place of 1, where rounding the sums to
    # bfloat16 before the epilogue is off by up to 6.6e-4 below zero and 8e-3 above.
    tolerances={
        "float32": Tolerance(2e-5, 2e-5),
        "bfloat16": Tolerance(3e-2, 2e-2),
        "float16": Tolerance(4e-3, 4e-3),
    },
    facts={
        "k": "K",
        "n": "N",
        "epilogue": "as the argument",
        "bias": "whether there is one",
        "rows": "row_bucket(T)",
        "dtype": "of x and the weight",
    },
)
