"""rope_angles: cosines and sines of every token's positions, once per launch.

Letters: P position rows, T tokens, R rotated dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from kestrel.ops.op import Case, Inputs, Op, Tolerance

__all__ = ["ROPE_ANGLES", "rope_angles"]


def rope_angles(
    positions_PT: torch.Tensor, freq_R: torch.Tensor, rows_R: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [T, R], float32, of position · ``freq_R``.

    ``positions_PT`` int64, below 2^24. ``rows_R`` int64: the position row that each frequency reads; None: row 0. The
    angle is rounded to float32 before its cosine is taken.
    """
    if rows_R is None:
        angle = positions_PT[0].unsqueeze(1) * freq_R
    else:
        angle = positions_PT.t().index_select(1, rows_R) * freq_R
    return angle.cos(), angle.sin()


_SHAPES = {  # position rows, tokens, rotated dimensions
    "smallest": (1, 1, 2),
    "odd": (1, 5, 6),
    "empty": (1, 0, 64),
    "decode": (3, 4, 64),
    "three rows": (3, 33, 64),
    "largest": (1, 70, 512),
}
_FURTHEST = 262_144  # positions of the longest context


def _make(shape: tuple[int, int, int], seed: int, device: torch.device, dtype: torch.dtype) -> Inputs:
    rows, tokens, rotated = shape
    draw = torch.Generator().manual_seed(seed)
    positions = torch.randint(0, _FURTHEST, (rows, tokens), generator=draw, device="cpu")
    half = torch.arange(rotated // 2, dtype=torch.float64, device="cpu")
    freq = (1e4 ** (-2 * half / rotated)).float()
    chosen = torch.randint(0, rows, (rotated // 2,), generator=draw, device="cpu").repeat(2)
    freq = torch.cat((-freq, freq)).to(device)
    return Inputs(args=(positions.to(device), freq, chosen.to(device) if rows > 1 else None))


def _cases() -> Sequence[Case]:
    return [
        Case(
            op="rope_angles",
            name=name,
            make=partial(_make, shape),
            facts={"rot_dim": shape[2], "rows": shape[0]},
        )
        for name, shape in _SHAPES.items()
    ]


ROPE_ANGLES = Op(
    name="rope_angles",
    reference=rope_angles,
    cases=_cases,
    tolerances={"float32": Tolerance(1e-6, 1e-6)},  # the last bits of a cosine
    facts={"rot_dim": "R", "rows": "P where frequencies choose among rows, else 1", "dtype": "float32"},
)
