"""Two linears of a block whose attention and MLP run side by side, in one op where a provider has it.

Neither holds weights: the linears keep their places, names and layouts in the model.
"""

from __future__ import annotations

from typing import Any

import torch

from kestrel.layers.linear import Linear
from kestrel.layers.norms import Deferred
from kestrel.ops.linear import ROW_BUCKETS, row_bucket
from kestrel.ops.op import dtype_name
from kestrel.spi.backend import OpCall, OpQuery
from kestrel.spi.family import OpTableLike

__all__ = ["LinearPair", "LinearSum"]


class LinearPair:
    """``first(h), second(h)`` of a deferred layer norm h. ``first`` has no epilogue, both have biases."""

    def __init__(self, ops: OpTableLike, first: Linear, second: Linear) -> None:
        assert first.epilogue is None, f"the first of a pair ends in {first.epilogue}"
        self.first, self.second = first, second
        facts: dict[str, Any] = {"k": first.in_features, "n": first.out_features}
        facts |= {"other_n": second.out_features, "other_epilogue": second.epilogue}
        self._fused = _fusions(ops, "linear_pair", facts, first)

    def __call__(self, h: Deferred) -> tuple[torch.Tensor, torch.Tensor]:
        """Both products, [..., N] and [..., N']."""
        call = self._fused.get(row_bucket(h.x.numel() // self.first.in_features)) if self._fused else None
        if call is None:
            return self.first(h), self.second(h)
        norm, first, second = h.norm, self.first, self.second
        assert norm.kind == "layer", f"a pair of linears of a layer norm was given a {norm.kind} norm"
        y, other = call(
            h.x, first.weight, first.bias, second.weight, second.bias, second.epilogue,
            norm.weight, norm.bias, norm.eps,
        )  # fmt: skip
        return y, other


class LinearSum:
    """``residual + first(x) + second(other)``; both linears end in "residual" and have biases."""

    def __init__(self, ops: OpTableLike, first: Linear, second: Linear) -> None:
        assert first.epilogue == second.epilogue == "residual", "both linears of a sum add a residual"
        self.first, self.second = first, second
        facts = {"k": first.in_features, "other_k": second.in_features, "n": first.out_features}
        self._fused = _fusions(ops, "linear_sum", facts, first)

    def __call__(self, x: torch.Tensor, other: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """[..., N] of ``x`` [..., K], ``other`` [..., K'] and ``residual`` [..., N]."""
        first, second = self.first, self.second
        call = self._fused.get(row_bucket(x.numel() // first.in_features)) if self._fused else None
        out: torch.Tensor
        if call is None:
            out = first(x, second(other, residual))
        else:
            out = call(x, first.weight, first.bias, other, second.weight, second.bias, residual)
        return out


def _fusions(ops: OpTableLike, op: str, facts: dict[str, Any], linear: Linear) -> dict[int, OpCall]:
    """The providers of ``op`` by row bucket, where there is one."""
    facts["dtype"] = dtype_name(linear.weight.dtype)
    found = {rows: ops.find(OpQuery.of(op, rows=rows, **facts)) for rows in (*ROW_BUCKETS, 0)}
    return {rows: call for rows, call in found.items() if call is not None}
