"""Norms over the last axis. ``weight`` (and ``bias``) under the names that checkpoints use."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn

from kestrel.ops.op import dtype_name
from kestrel.spi.backend import OpQuery
from kestrel.spi.family import OpTableLike

__all__ = ["AddNorm", "Deferred", "LayerNorm", "NormKind", "RMSNorm"]

NormKind = Literal["rms", "rms_plus_one", "layer"]


class _Norm(nn.Module):
    def __init__(
        self, dim: int, kind: NormKind, eps: float, *, weight: bool, bias: bool, dtype: torch.dtype | None
    ) -> None:
        super().__init__()
        self.kind, self.eps = kind, eps
        start = torch.zeros if kind == "rms_plus_one" else torch.ones
        self.weight = nn.Parameter(start(dim, dtype=dtype), requires_grad=False) if weight else None
        self.bias = nn.Parameter(torch.zeros(dim, dtype=dtype), requires_grad=False) if bias else None

    def _query(self, op: str, dim: int, dtype: torch.dtype | None, **more: Any) -> OpQuery:
        name = dtype_name(dtype or torch.get_default_dtype())
        return OpQuery.of(op, dim=dim, kind=self.kind, dtype=name, **more)


class Deferred:
    """The norm of ``x`` [..., C], for linears to compute on their way where a provider fuses the two.

    A ``Linear`` built with ``norm`` takes one in place of a tensor. ``value()`` is computed once, for all who ask.
    """

    __slots__ = ("_value", "norm", "x")

    def __init__(self, norm: LayerNorm | RMSNorm, x: torch.Tensor) -> None:
        self.norm, self.x = norm, x
        self._value: torch.Tensor | None = None

    def value(self) -> torch.Tensor:
        """The norm itself, [..., C]."""
        if self._value is None:
            self._value = self.norm(self.x)
        return self._value


class LayerNorm(_Norm):
    """LayerNorm with weight and, unless ``bias`` is False, bias. ``offset``: it is given one."""

    def __init__(
        self,
        ops: OpTableLike,
        dim: int,
        eps: float = 1e-5,
        *,
        bias: bool = True,
        offset: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(dim, "layer", eps, weight=True, bias=bias, dtype=dtype)
        self._call = ops.resolve(self._query("layer_norm", dim, dtype, offset=offset))

    def defer(self, x: torch.Tensor) -> Deferred:
        """The same as calling this, left to the linears that take it."""
        return Deferred(self, x)

    def forward(self, x: torch.Tensor, offset: torch.Tensor | None = None) -> torch.Tensor:
        """``x`` [..., C], or the sum of it and ``offset`` [C] float32, normalised."""
        out: torch.Tensor = self._call(x, self.weight, self.bias, self.eps, offset)
        return out


class RMSNorm(_Norm):
    """RMSNorm. ``add_one``: the stored weight is the factor minus one. ``weight`` False: no factor at all."""

    def __init__(
        self,
        ops: OpTableLike,
        dim: int,
        eps: float = 1e-6,
        *,
        add_one: bool = False,
        weight: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            dim, "rms_plus_one" if add_one else "rms", eps, weight=weight, bias=False, dtype=dtype
        )
        self._call = ops.resolve(self._query("rms_norm", dim, dtype))

    def defer(self, x: torch.Tensor) -> Deferred:
        """The same as calling this, left to the linears that take it."""
        return Deferred(self, x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [..., C] normalised."""
        out: torch.Tensor = self._call(x, self.weight, self.eps, add_one=self.kind == "rms_plus_one")
        return out


class AddNorm(_Norm):
    """A norm that first adds what the layer before computed to the residual stream: one op instead of two.

    ``kind`` is "rms", "rms_plus_one" or "layer"; only "layer" takes a bias.
    """

    def __init__(
        self,
        ops: OpTableLike,
        dim: int,
        eps: float = 1e-6,
        *,
        kind: NormKind = "rms",
        bias: bool | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        has_bias = kind == "layer" if bias is None else bias
        super().__init__(dim, kind, eps, weight=True, bias=has_bias, dtype=dtype)
        self._add = ops.resolve(self._query("add_norm", dim, dtype))
        if kind == "layer":
            self._norm = ops.resolve(self._query("layer_norm", dim, dtype, offset=False))
        else:
            self._norm = ops.resolve(self._query("rms_norm", dim, dtype))

    def forward(self, x: torch.Tensor, delta: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """``x + delta`` and its norm. Without a ``delta`` (the first block) ``x`` itself and its norm."""
        if delta is not None:
            total, normed = self._add(x, delta, self.weight, self.bias, self.eps, kind=self.kind)
            return total, normed
        if self.kind == "layer":
            return x, self._norm(x, self.weight, self.bias, self.eps)
        return x, self._norm(x, self.weight, self.eps, add_one=self.kind == "rms_plus_one")
