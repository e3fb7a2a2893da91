"""moe_route: which experts a token goes to, and how much each counts.

Letters: T tokens, E experts, K experts of one token.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from kestrel.ops.op import Case, Inputs, Op, Tolerance
from kestrel.ops.random import normal

__all__ = ["MOE_ROUTE", "moe_route"]


def moe_route(logits_TE: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [T, K] in the logits' dtype and experts [T, K] int64: the ``top_k`` most likely experts of each token.

    The weights are the softmax over all E experts in float32, the ``top_k`` largest kept and divided by their sum,
    then rounded once. Highest first; of equal logits the lower expert comes first, so that routing never depends on
    the batch.
    """
    wide = logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))
    ordered, experts = wide.sort(dim=-1, descending=True, stable=True)
    # the softmax of the kept logits is the softmax of all, kept and divided by its sum
    return ordered[:, :top_k].softmax(-1).to(logits_TE.dtype), experts[:, :top_k]


_SHAPES = {  # tokens, experts, experts of one token
    "smallest": (1, 1, 1),
    "odd": (5, 7, 3),
    "empty": (0, 8, 2),
    "all experts": (3, 4, 4),
    "decode": (4, 256, 8),
    "largest": (130, 512, 10),
}


def _make(shape: tuple[int, int, int], seed: int, device: torch.device, dtype: torch.dtype) -> Inputs:
    tokens, experts, top_k = shape
    logits = normal(seed, (tokens, experts), device, dtype, scale=2.0)
    if experts > 2:
        logits[:, 1] = logits[:, -1]  # a tie in every row
    return Inputs(args=(logits, top_k))


def _cases() -> Sequence[Case]:
    return [
        Case(
            op="moe_route",
            name=name,
            make=partial(_make, shape),
            facts={"experts": shape[1], "top_k": shape[2]},
        )
        for name, shape in _SHAPES.items()
    ]


MOE_ROUTE = Op(
    name="moe_route",
    reference=moe_route,
    cases=_cases,
    tolerances={
        "float32": Tolerance(1e-6, 1e-5),
        "bfloat16": Tolerance(4e-3, 4e-3),  # one rounding of the weights
        "float16": Tolerance(5e-4, 5e-4),
    },
    facts={"experts": "E", "top_k": "K", "dtype": "of the logits"},
)
