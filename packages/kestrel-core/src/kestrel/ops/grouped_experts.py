"""grouped_experts: each token through its own few of many feed-forward experts, the results weighted and added.

Letters: T tokens, C hidden, E experts, K experts of one token, I width of an expert, P = T · K pairs of token and
expert, N blocks of B pairs that share an expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F

from kestrel.ops.op import Case, Inputs, Op, Tolerance
from kestrel.ops.random import normal, uniform

__all__ = ["EXPERT_ACTIVATIONS", "GROUPED_EXPERTS", "grouped_experts"]

EXPERT_ACTIVATIONS = ("silu_mul", "gelu_tanh_mul")
MAX_BLOCK = 64  # pairs that share one copy of an expert's weights
MAX_COPIED = 2**26  # weight elements copied at a time: bounds the memory that copies take


def grouped_experts(
    x_TC: torch.Tensor,
    weights_TK: torch.Tensor,
    experts_TK: torch.Tensor,
    gate_up_EIC: torch.Tensor,
    down_ECI: torch.Tensor,
    activation: str = "silu_mul",
) -> torch.Tensor:
    """Outputs [T, C], of x's dtype: Σ_k weights[t, k] · down[e] (act(gate[e] x_t) · up[e] x_t), e = experts[t, k].

    ``gate_up_EIC`` [E, 2I, C] holds the gate's I rows before the others, ``down_ECI`` is [E, C, I]. ``activation``:
    "silu_mul" or "gelu_tanh_mul". An expert's output is rounded to x's dtype; the weighted sum runs in float32 and is
    rounded once. Experts that no token names are not read.
    """
    tokens, top_k = experts_TK.shape
    experts, width = gate_up_EIC.shape[:2]
    if tokens == 0:
        return torch.empty_like(x_TC)
    places_P, source_NB, expert_N = _blocks(experts_TK.flatten(), experts)
    outs = []
    step = max(1, MAX_COPIED // (width * x_TC.shape[1]))
    for start in range(0, len(expert_N), step):
        picked_N = expert_N[start : start + step]
        x_NBC = x_TC[source_NB[start : start + step] // top_k]
        gate, up = (x_NBC @ gate_up_EIC.index_select(0, picked_N).transpose(1, 2)).chunk(2, dim=-1)
        outs.append((_activate(gate, activation) * up) @ down_ECI.index_select(0, picked_N).transpose(1, 2))
    y_TKC = torch.cat(outs).flatten(0, 1).index_select(0, places_P).view(tokens, top_k, -1)
    wide = torch.promote_types(x_TC.dtype, torch.float32)
    return (y_TKC.to(wide) * weights_TK.to(wide).unsqueeze(-1)).sum(1).to(x_TC.dtype)


def _activate(gate: torch.Tensor, activation: str) -> torch.Tensor:
    match activation:
        case "silu_mul":
            return F.silu(gate)
        case "gelu_tanh_mul":
            return F.gelu(gate, approximate="tanh")
    raise ValueError(f"activation is {activation!r}; choices: {', '.join(EXPERT_ACTIVATIONS)}")


def _blocks(expert_P: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pairs sorted by expert, each expert's padded to whole blocks: the place of each pair among N · B, the pair at
    each place [N, B] (any where there is none), and the expert of each block [N].

    N depends on shapes alone, as a captured program needs; blocks that stay empty belong to the last expert.
    """
    pairs, device = expert_P.shape[0], expert_P.device
    size = min(MAX_BLOCK, max(1, 2 ** (pairs // experts).bit_length() // 2))
    count = (pairs + (size - 1) * min(experts, pairs)) // size
    sorted_P, order_P = expert_P.sort(stable=True)
    starts = torch.searchsorted(sorted_P, torch.arange(experts + 1, device=device))  # [E + 1]
    blocks_E = (starts.diff() + size - 1) // size
    ends_E = blocks_E.cumsum(0)
    within_P = torch.arange(pairs, device=device) - starts[sorted_P]
    place_P = (ends_E - blocks_E)[sorted_P] * size + within_P
    places_P = torch.empty_like(place_P).scatter_(0, order_P, place_P)
    source = torch.zeros(count * size, dtype=torch.int64, device=device).scatter_(0, place_P, order_P)
    block_N = torch.arange(count, device=device)
    expert_N = torch.searchsorted(ends_E, block_N, right=True).clamp_(max=experts - 1)
    return places_P, source.view(count, size), expert_N


_SHAPES = {  # tokens, hidden, experts, experts of one token, width
    "smallest": (1, 2, 1, 1, 1),
    "odd": (5, 10, 7, 3, 6),
    "empty": (0, 8, 4, 2, 8),
    "decode, one row": (1, 32, 16, 4, 24),
    "decode, several rows": (6, 32, 16, 4, 24),
    "captured, many tokens for few experts": (150, 16, 3, 2, 8),
    "prefill, many experts": (40, 24, 64, 8, 16),
    "largest width": (3, 128, 8, 2, 512),
}


def _make(
    shape: tuple[int, int, int, int, int],
    activation: str,
    seed: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Inputs:
    tokens, hidden, experts, top_k, width = shape
    x = normal(seed, (tokens, hidden), device, dtype)
    scores = uniform(seed + 1, (tokens, experts), device, torch.float32)
    scores[:, experts // 2] = 2.0  # one expert that every token goes to, and some that none does
    weights, chosen = scores.topk(top_k, dim=-1)
    gate_up = normal(seed + 2, (experts, 2 * width, hidden), device, dtype, scale=hidden**-0.5)
    down = normal(seed + 3, (experts, hidden, width), device, dtype, scale=width**-0.5)
    weights = (weights / weights.sum(-1, keepdim=True)).to(dtype)
    return Inputs(args=(x, weights, chosen, gate_up, down), kwargs={"activation": activation})


def _cases() -> Sequence[Case]:
    return [
        Case(
            op="grouped_experts",
            name=f"{name}, {activation}",
            make=partial(_make, shape, activation),
            facts={
                "hidden": shape[1],
                "experts": shape[2],
                "top_k": shape[3],
                "width": shape[4],
                "activation": activation,
            },
        )
        for name, shape in _SHAPES.items()
        for activation in EXPERT_ACTIVATIONS
    ]


GROUPED_EXPERTS = Op(
    name="grouped_experts",
    reference=grouped_experts,
    cases=_cases,
    # as linear's: two products in a row, each rounded, and the activation between them
    tolerances={
        "float32": Tolerance(2e-5, 2e-5),
        "bfloat16": Tolerance(3e-2, 2e-2),
        "float16": Tolerance(4e-3, 4e-3),
    },
    facts={
        "hidden": "C",
        "experts": "E",
        "top_k": "K",
        "width": "I",
        "activation": "as the argument",
        "dtype": "of x and the experts' weights",
    },
)
