"""vision_attention: dense attention inside each item of a batch, no mask.

Letters: N items, S positions of each, H heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F

from kestrel.ops.op import Case, Inputs, Op, Tolerance
from kestrel.ops.random import normal

__all__ = ["VISION_ATTENTION", "vision_attention"]


def vision_attention(
    q_NSHD: torch.Tensor, k_NSHD: torch.Tensor, v_NSHD: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attention outputs [N, S, H, D]: every position sees all S of its item. Softmax of q·k · ``scale`` in float32.

    q, k and v may be slices of one projection.
    """
    if not q_NSHD.numel():
        return torch.empty_like(q_NSHD)  # some fused kernels return nothing at all for no items
    q, k, v = (x.transpose(1, 2) for x in (q_NSHD, k_NSHD, v_NSHD))
    return F.scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2)


_SHAPES = {  # items, positions, heads, head dim
    "smallest": (1, 1, 1, 2),
    "odd": (3, 7, 3, 10),
    "empty": (0, 9, 2, 16),
    "head 72": (2, 81, 2, 72),
    "largest": (1, 33, 2, 128),
}


def _make(shape: tuple[int, int, int, int], seed: int, device: torch.device, dtype: torch.dtype) -> Inputs:
    n, s, h, d = shape
    q, k, v = normal(seed, (n, s, 3, h, d), device, dtype).unbind(2)
    return Inputs(args=(q, k, v, d**-0.5))


def _cases() -> Sequence[Case]:
    return [
        Case(
            op="vision_attention",
            name=name,
            make=partial(_make, shape),
            facts={"heads": shape[2], "head_dim": shape[3]},
        )
        for name, shape in _SHAPES.items()
    ]


VISION_ATTENTION = Op(
    name="vision_attention",
    reference=vision_attention,
    cases=_cases,
    tolerances={
        "float32": Tolerance(1e-5, 1e-5),
        "bfloat16": Tolerance(
            2e-2, 2e-2
        ),  # probabilities may be rounded to 16 bits before the second product
        "float16": Tolerance(3e-3, 3e-3),
    },
    facts={"heads": "H", "head_dim": "D", "dtype": "of q, k and v"},
)
