"""e4m3_norm, e4m3_cast and e4m3_linear: products of two operands in floats of 8 bits (e4m3), each with a fixed scale.

What is cast is known to stay below a bound, which becomes ±448, the largest e4m3 number. e4m3 has the same relative
precision over 14 binades, so a bound that is far too large costs nothing, and no row has to be looked at before.

Letters: … any leading axes (rows), C the width of the residual stream, K inputs, N outputs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F

from kestrel.ops.norms import layer_norm, rms_norm
from kestrel.ops.op import Case, Inputs, Op, Tolerance
from kestrel.ops.random import normal

__all__ = [
    "E4M3_CAST",
    "E4M3_LINEAR",
    "E4M3_NORM",
    "LARGEST",
    "as_e4m3",
    "e4m3_cast",
    "e4m3_linear",
    "e4m3_norm",
]

LARGEST = 448.0  # of e4m3
ACTIVATIONS = (None, "gelu_tanh", "gelu")


def as_e4m3(x: torch.Tensor) -> torch.Tensor:
    """``x`` rounded to e4m3, cut at ±448."""
    return x.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)


def e4m3_norm(
    x: torch.Tensor,
    eps: float = 1e-5,
    delta: torch.Tensor | None = None,
    offset: torch.Tensor | None = None,
    *,
    kind: str = "layer",
) -> tuple[torch.Tensor, torch.Tensor]:
    """The residual stream ``x + delta`` [..., C] (``x`` itself without a delta), and the norm of it in e4m3, times
    448 / √C: no number of a norm without weights is larger than √C.

    ``kind``: "layer" or "rms". ``offset`` [C] float32 is added before the norm, and not to the stream. Weights are left
    to the product that follows. ``x`` and ``delta`` are not changed.
    """
    total = x if delta is None else x + delta
    wide = total.float() if offset is None else total.float() + offset
    normed = layer_norm(wide, None, None, eps) if kind == "layer" else rms_norm(wide, None, eps)
    return total, as_e4m3(normed * (LARGEST / math.sqrt(x.shape[-1])))


def e4m3_cast(x: torch.Tensor, factor: float, activation: str | None = None) -> torch.Tensor:
    """``activation`` of ``x`` [..., K], times ``factor``, in e4m3. ``activation``: None, "gelu_tanh" or "gelu" (erf),
    computed in float32."""
    wide = x.float()
    if activation is not None:
        wide = F.gelu(wide, approximate="tanh" if activation == "gelu_tanh" else "none")
    return as_e4m3(wide * factor)


def e4m3_linear(
    values: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    dtype: torch.dtype,
) -> torch.Tensor:
    """``values`` [..., K] e4m3 · ``weight`` [N, K] e4m3 transposed, times ``scale`` (one float32), plus ``bias`` [N]
    and ``residual`` [..., N], in ``dtype``.

    Sums are at least as exact as those of CUDA devices' matrix units in their fast form (about 14 bits). A row's result
    does not depend on the others.
    """
    wide = F.linear(values.float(), weight.float()) * scale
    out = (wide if bias is None else wide + bias.float()).to(dtype)
    return out if residual is None else residual + out


_SHAPES = {"smallest": (1, 16), "odd": (3, 37), "empty": (0, 64), "batch": (65, 256), "largest": (2, 8192)}


def _norm(
    shape: tuple[int, int], kind: str, has_delta: bool, seed: int, device: torch.device, dtype: torch.dtype
) -> Inputs:
    x, delta = normal(seed, shape, device, dtype), normal(seed + 1, shape, device, dtype)
    offset = normal(seed + 2, shape[1:], device, torch.float32) if has_delta else None
    return Inputs(args=(x, 1e-6, delta if has_delta else None, offset), kwargs={"kind": kind})


def _norm_cases() -> Sequence[Case]:
    return [
        Case(
            op="e4m3_norm",
            name=f"{name}, {kind}{', with a delta' if has_delta else ''}",
            make=partial(_norm, shape, kind, has_delta),
            facts={"dim": shape[1], "kind": kind, "delta": has_delta, "offset": has_delta},
        )
        for name, shape in _SHAPES.items()
        for kind in ("layer", "rms")
        for has_delta in (False, True)
    ]


def _cast(
    shape: tuple[int, int], activation: str | None, seed: int, device: torch.device, dtype: torch.dtype
) -> Inputs:
    return Inputs(args=(normal(seed, shape, device, dtype, scale=1.5), 448.0 / 4.5, activation))


def _cast_cases() -> Sequence[Case]:
    return [
        Case(
            op="e4m3_cast",
            name=f"{name}, {activation or 'as it is'}",
            make=partial(_cast, shape, activation),
            facts={"k": shape[1], "activation": activation},
        )
        for name, shape in _SHAPES.items()
        for activation in ACTIVATIONS
    ]


_PRODUCTS = {
    "smallest": (1, 16, 16),
    "odd": (3, 48, 80),
    "empty": (0, 64, 32),
    "skinny": (8, 512, 256),
    "gemm": (130, 128, 192),
    "crop": (257, 1152, 64),
}


def _linear(
    shape: tuple[int, int, int], has_residual: bool, seed: int, device: torch.device, dtype: torch.dtype
) -> Inputs:
    rows, k, n = shape
    values = as_e4m3(normal(seed, (rows, k), device, torch.float32, scale=20.0))
    weight = as_e4m3(normal(seed + 1, (n, k), device, torch.float32, scale=100.0))
    scale = torch.full((), k**-0.5 / 2000.0, device=device)
    bias = None if has_residual else normal(seed + 2, (n,), device, dtype)
    residual = normal(seed + 3, (rows, n), device, dtype) if has_residual else None
    return Inputs(args=(values, weight, scale, bias, residual), kwargs={"dtype": dtype}, weight=1)


def _linear_cases() -> Sequence[Case]:
    return [
        Case(
            op="e4m3_linear",
            name=f"{name}{', with a residual' if has_residual else ''}",
            make=partial(_linear, shape, has_residual),
            facts={"k": shape[1], "n": shape[2]},
        )
        for name, shape in _PRODUCTS.items()
        for has_residual in (False, True)
    ]


# Neighbours among e4m3 numbers are an eighth apart, 2^-9 near zero: another order of sums, or another tanh, tips one.
_NEIGHBOURS = dict.fromkeys(("float32", "bfloat16", "float16"), Tolerance(4e-3, 0.13))

E4M3_NORM = Op(
    name="e4m3_norm",
    reference=e4m3_norm,
    cases=_norm_cases,
    tolerances=_NEIGHBOURS,
    facts={
        "dim": "C",
        "kind": '"layer" or "rms"',
        "delta": "whether there is one",
        "offset": "whether there is one",
        "dtype": "of x",
    },
)
E4M3_CAST = Op(
    name="e4m3_cast",
    reference=e4m3_cast,
    cases=_cast_cases,
    tolerances=_NEIGHBOURS,
    facts={"k": "K", "activation": "as the argument", "dtype": "of x"},
)
E4M3_LINEAR = Op(
    name="e4m3_linear",
    reference=e4m3_linear,
    cases=_linear_cases,
    # Sums of K terms in another order and with 14 bits (2^-13 of the largest sum on the way); in 16 bits the output's
    # rounding, and that of the sum before bias and residual are added.
    tolerances={
        "float32": Tolerance(1e-3, 1e-3),
        "bfloat16": Tolerance(3e-2, 2e-2),
        "float16": Tolerance(4e-3, 4e-3),
    },
    facts={"k": "K", "n": "N", "dtype": "of the output"},
)
