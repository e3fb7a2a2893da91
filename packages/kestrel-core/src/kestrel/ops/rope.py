"""rope: rotary position embedding of the first dimensions of each head.

Letters: T tokens, H heads (of queries or keys), D head dim, R rotated dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from kestrel.ops.op import Case, Inputs, Op, Tolerance
from kestrel.ops.random import normal, uniform

__all__ = ["ROPE", "random_angles", "rope", "rotate_"]


def rope(x_THD: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor) -> torch.Tensor:
    """``x_THD`` with its first R dimensions rotated; the others pass. A new tensor.

    Dimension i pairs with i + R / 2: (a, b) becomes (a cos − b sin, a sin + b cos). ``cos_TR`` and ``sin_TR`` are
    float32 and laid out for a product: cos holds each pair's cosine twice, at i and at i + R / 2; sin holds −sin at i
    and sin at i + R / 2. The result is rounded to x's dtype once.
    Source: Su et al. 2021, arXiv 2104.09864, in the half-split order.
    """
    out = x_THD.clone(memory_format=torch.contiguous_format).to(cos_TR.dtype)
    return rotate_(out, cos_TR, sin_TR).to(x_THD.dtype)


def rotate_(x_THD: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor) -> torch.Tensor:
    """``x_THD``, of the angles' dtype, rotated in place."""
    rotated = cos_TR.shape[-1]
    head = x_THD if rotated == x_THD.shape[-1] else x_THD[..., :rotated]
    swapped = head.roll(rotated // 2, -1)
    head.mul_(cos_TR.unsqueeze(1)).addcmul_(swapped, sin_TR.unsqueeze(1))
    return x_THD


_SHAPES = {  # tokens, heads, head dim, rotated dimensions
    "smallest": (1, 1, 2, 2),
    "odd": (5, 3, 10, 6),
    "empty": (0, 4, 64, 32),
    "half rotated": (7, 4, 64, 32),
    "all rotated": (33, 2, 64, 64),
    "largest head": (3, 2, 512, 128),
}


def random_angles(
    seed: int, tokens: int, rotated: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of random angles, laid out as ``rope`` takes them: two tensors [tokens, rotated], float32."""
    angles = uniform(seed, (tokens, rotated // 2), device, torch.float32, 0.0, 1000.0)
    return angles.cos().repeat(1, 2), torch.cat((-angles.sin(), angles.sin()), dim=1)


def _make(shape: tuple[int, int, int, int], seed: int, device: torch.device, dtype: torch.dtype) -> Inputs:
    tokens, heads, dim, rotated = shape
    x = normal(seed, (tokens, heads, dim), device, dtype)
    return Inputs(args=(x, *random_angles(seed + 1, tokens, rotated, device)))


def _cases() -> Sequence[Case]:
    return [
        Case(
            op="rope",
            name=name,
            make=partial(_make, shape),
            facts={"head_dim": shape[2], "rot_dim": shape[3]},
        )
        for name, shape in _SHAPES.items()
    ]


ROPE = Op(
    name="rope",
    reference=rope,
    cases=_cases,
    tolerances={
        "float32": Tolerance(1e-6, 1e-6),
        "bfloat16": Tolerance(1e-2, 1e-2),  # one rounding of the result
        "float16": Tolerance(2e-3, 2e-3),
    },
    facts={"head_dim": "D", "rot_dim": "R", "dtype": "of x"},
)
