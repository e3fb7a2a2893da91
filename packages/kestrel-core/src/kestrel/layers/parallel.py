"""Two linears of a block whose attention and MLP run side by side, in one op where a provider has it.

Neither class holds weights: the linears keep their places and names in the model.
"""

from __future__ import annotations

from typing import Any

import torch

from kestrel.layers.linear import Linear
from kestrel.layers.norms import AddNorm
from kestrel.layers.stored import Stored
from kestrel.ops.linear import ROW_BUCKETS, row_bucket
from kestrel.ops.op import dtype_name
from kestrel.spi.backend import OpCall, OpQuery
from kestrel.spi.family import OpTableLike

__all__ = ["LinearPair", "LinearSum"]


class LinearPair:
    """``first(h), second(h)`` of h, the layer norm of x. ``first`` has no epilogue, both have biases."""

    def __init__(self, ops: OpTableLike, first: Linear, second: Linear) -> None:
        assert first.epilogue is None, f"the first of a pair ends in {first.epilogue}"
        self._first, self._second = first, second
        facts: dict[str, Any] = {"k": first.in_features, "n": first.out_features}
        facts |= {"other_n": second.out_features, "other_epilogue": second.epilogue}
        self._fused = _fusions(ops, "linear_pair", facts, first)

    def serves(self, rows: int) -> bool:
        """Whether ``rows`` rows are one op, norm included."""
        return row_bucket(rows) in self._fused

    def __call__(self, x: torch.Tensor, norm: AddNorm) -> tuple[torch.Tensor, torch.Tensor]:
        """Both products [..., N] and [..., N'] of the norm of ``x`` [..., K]."""
        assert norm.kind == "layer", f"a pair of linears of a layer norm was given a {norm.kind} norm"
        first, second = self._first, self._second
        call = self._fused.get(row_bucket(x.numel() // first.in_features))
        if call is None:
            h = norm(x, None)[1]
            return first(h), second(h)
        y, other = call(
            x, first.weight, first.bias, second.weight, second.bias, second.epilogue,
            norm.weight, norm.bias, norm.eps,
        )  # fmt: skip
        return y, other


class LinearSum(Stored):
    """``first(x) + second(other)``, and the residual where a provider has all three in one op. ``second`` accumulates
    and leaves its bias to this."""

    def __init__(self, ops: OpTableLike, first: Linear, second: Linear) -> None:
        super().__init__()
        assert (first.epilogue, second.epilogue) == (None, "accumulate"), "the second is added to the first"
        self._linears = [first, second]  # listed: they are parts of other modules
        self._bias: torch.Tensor | None = None
        facts = {"k": first.in_features, "other_k": second.in_features, "n": first.out_features}
        self._fused = _fusions(ops, "linear_sum", facts, first)

    def serves(self, rows: int) -> bool:
        """Whether ``total`` of ``rows`` rows is one op."""
        return row_bucket(rows) in self._fused

    def pack(self) -> None:
        """Make the sum of the biases, of those that were loaded."""
        first, second = (linear.bias for linear in self._linears)
        assert first is not None
        assert second is not None
        self._bias = (first.float() + second.float()).to(first.dtype)

    def total(self, x: torch.Tensor, other: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """The sum and ``residual`` [..., N], of ``x`` [..., K] and ``other`` [..., K']."""
        first, second = self._linears
        call = self._fused.get(row_bucket(x.numel() // first.in_features))
        if call is None:
            more: torch.Tensor = self(x, other)
            return residual + more
        out: torch.Tensor = call(x, first.weight, first.bias, other, second.weight, second.bias, residual)
        return out

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """The sum [..., N] of ``x`` [..., K] and ``other`` [..., K']."""
        assert self._bias is not None, "a sum of linears is packed once its weights are loaded (pack_weights)"
        first, second = self._linears
        out: torch.Tensor = second(other, first.with_bias(x, self._bias))
        return out


def _fusions(ops: OpTableLike, op: str, facts: dict[str, Any], linear: Linear) -> dict[int, OpCall]:
    """The providers of ``op`` by row bucket, where there is one."""
    facts["dtype"] = dtype_name(linear.weight.dtype)
    found = {rows: ops.find(OpQuery.of(op, rows=rows, **facts)) for rows in (*ROW_BUCKETS, 0)}
    return {rows: call for rows, call in found.items() if call is not None}
