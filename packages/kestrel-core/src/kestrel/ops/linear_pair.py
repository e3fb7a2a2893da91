"""linear_pair and linear_sum: the two products of a block whose attention and MLP run side by side, in one launch each.

Letters: T rows, K inputs, N outputs of a weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from kestrel.ops.linear import linear, row_bucket
from kestrel.ops.norms import layer_norm
from kestrel.ops.op import Case, Inputs, Op, Tolerance
from kestrel.ops.random import normal

__all__ = ["LINEAR_PAIR", "LINEAR_SUM", "linear_pair", "linear_sum"]


def linear_pair(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    other_weight: torch.Tensor,
    other_bias: torch.Tensor,
    other_epilogue: str | None,
    gain: torch.Tensor,
    shift: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two ``linear`` of one layer norm of ``x`` [..., K]: outputs [..., N] of ``weight``, and [..., N'] of
    ``other_weight`` with ``other_epilogue`` (None, "gelu_tanh" or "gelu").

    The norm may stay in float32 on its way into the products, where the reference rounds it.
    """
    normed = layer_norm(x, gain, shift, eps)
    return linear(normed, weight, bias), linear(normed, other_weight, other_bias, other_epilogue)


def linear_sum(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    other_x: torch.Tensor,
    other_weight: torch.Tensor,
    other_bias: torch.Tensor,
    residual: torch.Tensor,
) -> torch.Tensor:
    """``residual`` [..., N] + ``x`` [..., K] · ``weight`` [N, K] transposed + ``bias`` [N] + the same of the others,
    whose number of inputs is another one."""
    more = linear(other_x, other_weight, other_bias, "residual", residual)
    return linear(x, weight, bias, "residual", more)


_PAIRS = {  # T, K, N, N'
    "smallest": (1, 8, 8, 8),
    "odd": (1, 37, 22, 10),
    "some rows": (3, 64, 32, 48),
    "one row": (1, 768, 256, 320),
    "wide": (1, 2048, 48, 64),
}
_SUMS = {  # T, K, K', N
    "smallest": (1, 8, 8, 8),
    "odd": (1, 22, 37, 10),
    "some rows": (3, 64, 32, 48),
    "one row": (1, 256, 1024, 192),
    "wide": (1, 1024, 2560, 32),
}


def _weight(seed: int, n: int, k: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return normal(seed, (n, k), device, dtype, scale=k**-0.5)


def _make_pair(
    shape: tuple[int, int, int, int],
    epilogue: str | None,
    seed: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Inputs:
    rows, k, n, other = shape
    vectors = [normal(seed + 4 + i, (size,), device, dtype) for i, size in enumerate((n, other, k))]
    return Inputs(
        args=(
            normal(seed, (rows, k), device, dtype, scale=3.0),
            _weight(seed + 1, n, k, device, dtype),
            vectors[0],
            _weight(seed + 2, other, k, device, dtype),
            vectors[1],
            epilogue,
            normal(seed + 3, (k,), device, dtype, scale=0.5),
            vectors[2],
            1e-5,
        )
    )


def _make_sum(
    shape: tuple[int, int, int, int], seed: int, device: torch.device, dtype: torch.dtype
) -> Inputs:
    rows, k, other, n = shape
    return Inputs(
        args=(
            normal(seed, (rows, k), device, dtype),
            _weight(seed + 1, n, k, device, dtype),
            normal(seed + 2, (n,), device, dtype),
            normal(seed + 3, (rows, other), device, dtype),
            _weight(seed + 4, n, other, device, dtype),
            normal(seed + 5, (n,), device, dtype),
            normal(seed + 6, (rows, n), device, dtype),
        )
    )


def _pair_cases() -> Sequence[Case]:
    return [
        Case(
            op="linear_pair",
            name=f"{name}, {epilogue or 'no epilogue'}",
            make=partial(_make_pair, shape, epilogue),
            facts={
                "k": shape[1],
                "n": shape[2],
                "other_n": shape[3],
                "other_epilogue": epilogue,
                "rows": row_bucket(shape[0]),
            },
        )
        for name, shape in _PAIRS.items()
        for epilogue in (None, "gelu_tanh", "gelu")
    ]


def _sum_cases() -> Sequence[Case]:
    return [
        Case(
            op="linear_sum",
            name=name,
            make=partial(_make_sum, shape),
            facts={"k": shape[1], "other_k": shape[2], "n": shape[3], "rows": row_bucket(shape[0])},
        )
        for name, shape in _SUMS.items()
    ]


# As norm_linear, whose sums these are.
_TOLERANCES = {
    "float32": Tolerance(5e-5, 5e-5),
    "bfloat16": Tolerance(6e-2, 3e-2),
    "float16": Tolerance(8e-3, 8e-3),
}

LINEAR_PAIR = Op(
    name="linear_pair",
    reference=linear_pair,
    cases=_pair_cases,
    tolerances=_TOLERANCES,
    facts={
        "k": "K",
        "n": "N",
        "other_n": "N'",
        "other_epilogue": "as the argument",
        "rows": "row_bucket(T)",
        "dtype": "of x and all weights",
    },
)
LINEAR_SUM = Op(
    name="linear_sum",
    reference=linear_sum,
    cases=_sum_cases,
    tolerances=_TOLERANCES,
    facts={
        "k": "K",
        "other_k": "K of the others",
        "n": "N",
        "rows": "row_bucket(T)",
        "dtype": "of x and all weights",
    },
)
