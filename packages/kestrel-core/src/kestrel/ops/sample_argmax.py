"""sample_argmax: the largest logit of each row.

Shapes: N rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from kestrel.ops.op import Case, Inputs, Op, Tolerance
from kestrel.ops.random import normal

__all__ = ["SAMPLE_ARGMAX", "sample_argmax"]


def sample_argmax(logits_NV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids [N] int64 and logits [N] float32 of the largest logit of each row.

    Of equal logits the lowest id wins. A NaN anywhere is the largest of all: the row's logit is NaN.
    """
    best_N, ids_N = logits_NV.max(dim=1)
    return ids_N, best_N.float()


def _make(shape: tuple[int, int], kind: str, seed: int, device: torch.device, dtype: torch.dtype) -> Inputs:
    logits = normal(seed, shape, device, dtype, scale=3.0)
    last = shape[1] - 1
    if kind == "ties":
        logits[:, [last // 2, last]] = logits.amax(1, keepdim=True) + 1
        logits[1:, 0] = -0.0
        logits[2:] = 0.0
    if kind == "faults":
        logits[0, last], logits[1, last // 2], logits[2] = torch.nan, torch.inf, -torch.inf
        logits[3, last // 2 :] = torch.nan
    return Inputs(args=(logits,))


_SHAPES = {  # rows, vocabulary, kind
    "smallest": (1, 1, ""),
    "odd": (3, 2051, ""),
    "empty": (0, 50, ""),
    "ties": (5, 4099, "ties"),
    "faults": (4, 4096, "faults"),
    "many rows": (130, 515, ""),
    "largest": (2, 151_936, ""),
}


def _cases() -> Sequence[Case]:
    return [
        Case(
            op="sample_argmax",
            name=name,
            make=partial(_make, shape[:2], shape[2]),
            facts={"vocab": shape[1]},
        )
        for name, shape in _SHAPES.items()
    ]


SAMPLE_ARGMAX = Op(
    name="sample_argmax",
    reference=sample_argmax,
    cases=_cases,
    tolerances=dict.fromkeys(("float32", "bfloat16", "float16"), Tolerance(0.0, 0.0)),  # nothing is computed
    facts={"vocab": "V", "dtype": "of the logits"},
)
