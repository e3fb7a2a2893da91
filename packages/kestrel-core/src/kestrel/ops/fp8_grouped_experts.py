"""fp8_grouped_experts: experts whose weights are 8-bit floats that share a scale by blocks.

Letters: T tokens, C hidden, E experts, K experts of one token, I width of an expert, R and S blocks of rows and
columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from kestrel.ops.fp8_linear import BLOCK
from kestrel.ops.grouped_experts import grouped_experts
from kestrel.ops.op import Case, Inputs, Op, Tolerance
from kestrel.ops.random import normal, uniform

__all__ = ["FP8_GROUPED_EXPERTS", "fp8_grouped_experts"]


def fp8_grouped_experts(
    x_TC: torch.Tensor,
    weights_TK: torch.Tensor,
    experts_TK: torch.Tensor,
    gate_up_EIC: torch.Tensor,
    gate_up_scale_ERS: torch.Tensor,
    down_ECI: torch.Tensor,
    down_scale_ERS: torch.Tensor,
    activation: str = "silu_mul",
) -> torch.Tensor:
    """``grouped_experts`` with weights of e4m3 floats, times float32 scales of blocks of 128 rows and 128 columns.

    ``gate_up_scale_ERS`` is [E, ⌈2I / 128⌉, ⌈C / 128⌉], ``down_scale_ERS`` [E, ⌈C / 128⌉, ⌈I / 128⌉]. Inputs are not
    quantised. This reference makes all weights wide: it is correct, and needs the memory.
    """
    gate_up, down = (
        _wide(w, scale, x_TC.dtype)
        for w, scale in ((gate_up_EIC, gate_up_scale_ERS), (down_ECI, down_scale_ERS))
    )
    return grouped_experts(x_TC, weights_TK, experts_TK, gate_up, down, activation)


def _wide(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    rows, columns = weight.shape[1:]
    each = scale.float().repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)
    return (weight.float() * each[:, :rows, :columns]).to(dtype)


_SHAPES = {  # tokens, hidden, experts, experts of one token, width
    "smallest": (1, 16, 1, 1, 8),
    "odd": (5, 144, 7, 3, 72),
    "empty": (0, 128, 4, 2, 128),
    "decode": (3, 256, 16, 4, 192),
    "prefill, blocks of two halves": (45, 272, 5, 2, 200),
}


def _quantised(
    seed: int, shape: tuple[int, int, int], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    cpu = torch.device("cpu")
    weight = normal(seed, shape, cpu, torch.float32).to(torch.float8_e4m3fn).to(device)
    blocks = (shape[0], -(-shape[1] // BLOCK), -(-shape[2] // BLOCK))
    usual = shape[2] ** -0.5
    return weight, uniform(seed + 1, blocks, device, torch.float32, 0.5 * usual, 2.0 * usual)


def _make(
    shape: tuple[int, int, int, int, int], seed: int, device: torch.device, dtype: torch.dtype
) -> Inputs:
    tokens, hidden, experts, top_k, width = shape
    x = normal(seed, (tokens, hidden), device, dtype)
    weights, chosen = uniform(seed + 1, (tokens, experts), device, torch.float32).topk(top_k, dim=-1)
    gate_up = _quantised(seed + 2, (experts, 2 * width, hidden), device)
    down = _quantised(seed + 4, (experts, hidden, width), device)
    weights = (weights / weights.sum(-1, keepdim=True)).to(dtype)
    return Inputs(args=(x, weights, chosen, *gate_up, *down))


def _cases() -> Sequence[Case]:
    names = ("hidden", "experts", "top_k", "width")
    return [
        Case(
            op="fp8_grouped_experts",
            name=name,
            make=partial(_make, shape),
            facts={**dict(zip(names, shape[1:], strict=True)), "activation": "silu_mul"},
        )
        for name, shape in _SHAPES.items()
    ]


FP8_GROUPED_EXPERTS = Op(
    name="fp8_grouped_experts",
    reference=fp8_grouped_experts,
    cases=_cases,
    # two products in a row, each as fp8_linear's: the reference rounds each weight times its scale, others need not
    tolerances={
        "float32": Tolerance(5e-5, 5e-5),
        "bfloat16": Tolerance(8e-2, 3e-2),
        "float16": Tolerance(1e-2, 8e-3),
    },
    facts={
        "hidden": "C",
        "experts": "E",
        "top_k": "K",
        "width": "I",
        "activation": "as the argument",
        "dtype": "of x, and of the output",
    },
)
