"""output_gate: what a layer computed, let through by a gate, and added to something.

Letters: T tokens, C the rest of a token's numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from kestrel.ops.op import Case, Inputs, Op, Tolerance
from kestrel.ops.random import normal

__all__ = ["OUTPUT_GATE", "output_gate"]


def output_gate(
    x_TC: torch.Tensor, gate_TC: torch.Tensor, residual_TC: torch.Tensor | None = None
) -> torch.Tensor:
    """``x`` · σ(``gate``), plus ``residual`` when given: a new tensor of x's shape and dtype, contiguous.

    ``x`` is [T, C] or [T, heads, head dim], ``gate`` of the same shape or [T, 1]. All may be slices of projections.
    """
    y = x_TC * gate_TC.sigmoid()
    return (y if residual_TC is None else residual_TC + y).contiguous()


_SHAPES: dict[str, tuple[tuple[int, ...], bool]] = {  # shape of x, whether the gate has one number per token
    "smallest": ((1, 1), False),
    "odd": ((5, 3, 7), False),
    "odd, one gate per token": ((5, 33), True),
    "empty": ((0, 4, 8), False),
    "decode, heads": ((3, 8, 64), False),
    "decode, one gate per token": ((3, 256), True),
    "largest": ((70, 24, 256), False),
}


def _make(
    shape: tuple[int, ...],
    per_token: bool,
    residual: bool,
    seed: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Inputs:
    x, other = (normal(seed + i, shape, device, dtype) for i in range(2))
    if per_token:
        gate = normal(seed + 2, (shape[0], 1), device, dtype)
    else:  # as each head's half of a projection
        gate = normal(seed + 2, (*shape[:-1], 2, shape[-1]), device, dtype).select(-2, 1)
    return Inputs(args=(x, gate, other if residual else None))


def _cases() -> Sequence[Case]:
    return [
        Case(
            op="output_gate",
            name=f"{name}{', residual' if residual else ''}",
            make=partial(_make, shape, per_token, residual),
            facts={"per_token": per_token, "residual": residual, "dim": shape[-1]},
        )
        for name, (shape, per_token) in _SHAPES.items()
        for residual in (False, True)
    ]


OUTPUT_GATE = Op(
    name="output_gate",
    reference=output_gate,
    cases=_cases,
    tolerances={
        "float32": Tolerance(1e-6, 1e-6),
        "bfloat16": Tolerance(2e-2, 2e-2),  # the reference rounds gate and product, a fused kernel need not
        "float16": Tolerance(3e-3, 3e-3),
    },
    facts={
        "per_token": "the gate is [T, 1]",
        "residual": "one is given",
        "dim": "the last axis of x",
        "dtype": "of all",
    },
)
