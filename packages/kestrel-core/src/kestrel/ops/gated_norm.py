"""gated_norm and delta_gates: what a gated DeltaNet mixer computes after and before its rule, number by number.

Letters: T tokens, H value heads, E value dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F

from kestrel.ops.norms import rms_norm
from kestrel.ops.op import Case, Inputs, Op, Tolerance
from kestrel.ops.random import normal

__all__ = ["DELTA_GATES", "GATED_NORM", "delta_gates", "gated_norm"]


def gated_norm(
    o_THE: torch.Tensor, z_THE: torch.Tensor, weight_E: torch.Tensor, eps: float = 1e-6
) -> torch.Tensor:
    """RMSNorm of each head of ``o`` with ``weight``, rounded, times SiLU(``z``) in float32, rounded: [T, H, E].

    ``z_THE`` may be a slice of a projection.
    """
    wide = torch.promote_types(z_THE.dtype, torch.float32)
    normed = rms_norm(o_THE, weight_E, eps)
    return (normed.to(wide) * F.silu(z_THE.to(wide))).to(o_THE.dtype)


def delta_gates(
    a_TH: torch.Tensor, b_TH: torch.Tensor, a_log_H: torch.Tensor, dt_bias_H: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log decay −exp(a_log) · softplus(a + dt_bias) and beta sigmoid(b), both [T, H], float32 for 16-bit inputs.

    ``a_TH`` and ``b_TH`` may be slices of a projection.
    """
    wide = torch.promote_types(a_TH.dtype, torch.float32)
    step = F.softplus(a_TH.to(wide) + dt_bias_H.to(wide))
    return -a_log_H.to(wide).exp() * step, b_TH.to(wide).sigmoid()


# tokens, heads, value dim
_SHAPES = {
    "smallest": (1, 1, 1),
    "odd": (5, 3, 7),
    "empty": (0, 4, 8),
    "decode": (3, 8, 32),
    "largest head": (37, 6, 256),
}


def _make_norm(shape: tuple[int, int, int], seed: int, device: torch.device, dtype: torch.dtype) -> Inputs:
    o, weight = normal(seed, shape, device, dtype), normal(seed + 1, shape[2:], device, torch.float32)
    tokens, heads, dim = shape
    packed = normal(seed + 2, (tokens, heads * dim + 5), device, dtype)
    return Inputs(args=(o, packed[:, 3 : 3 + heads * dim].view(tokens, heads, dim), weight, 1e-6))


def _make_gates(shape: tuple[int, int, int], seed: int, device: torch.device, dtype: torch.dtype) -> Inputs:
    tokens, heads, _ = shape
    a, b = normal(seed, (tokens, 2 * heads + 1), device, dtype, scale=3.0).tensor_split([heads + 1], dim=1)
    a_log = normal(seed + 1, (heads,), device, torch.float32, scale=0.5)
    return Inputs(args=(a[:, :heads], b, a_log, normal(seed + 2, (heads,), device, dtype)))


def _norm_cases() -> Sequence[Case]:
    return [
        Case(op="gated_norm", name=name, make=partial(_make_norm, shape), facts={"dim": shape[2]})
        for name, shape in _SHAPES.items()
    ]


def _gates_cases() -> Sequence[Case]:
    return [
        Case(op="delta_gates", name=name, make=partial(_make_gates, shape), facts={"heads": shape[1]})
        for name, shape in _SHAPES.items()
    ]


GATED_NORM = Op(
    name="gated_norm",
    reference=gated_norm,
    cases=_norm_cases,
    tolerances={
        "float32": Tolerance(1e-5, 1e-5),
        "bfloat16": Tolerance(
            2e-2, 2e-2
        ),  # the norm is rounded before the gate, and may fall to the other side
        "float16": Tolerance(3e-3, 3e-3),
    },
    facts={"dim": "E", "dtype": "of o and z"},
)
DELTA_GATES = Op(
    name="delta_gates",
    reference=delta_gates,
    cases=_gates_cases,
    tolerances={
        "float32": Tolerance(2e-6, 1e-5),
        "bfloat16": Tolerance(2e-6, 1e-5),  # float32 inside and out
        "float16": Tolerance(2e-6, 1e-5),
    },
    facts={"heads": "H", "dtype": "of a and b"},
)
