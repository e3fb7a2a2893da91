"""Mixture of experts: a router, and feed-forward experts of which each token takes a few."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from kestrel.layers.linear import Linear
from kestrel.layers.mlp import MLP
from kestrel.layers.scaled import ScaledExperts
from kestrel.layers.stored import PackedPart, Stored
from kestrel.ops.op import dtype_name
from kestrel.spi.backend import OpQuery
from kestrel.spi.family import OpTableLike

__all__ = ["Experts", "MoE"]


class Experts(Stored):
    """Gated feed-forward experts. Parameters ``gate_up_proj`` [E · 2I, C] (each expert's gate rows before its others)
    and ``down_proj`` [E · C, I].

    A checkpoint may hold them whole, as [E, 2I, C] and [E, C, I] with their first two axes flattened, or expert by
    expert ("3.gate_proj.weight", "3.up_proj.weight", "3.down_proj.weight").
    """

    def __init__(
        self,
        ops: OpTableLike,
        dim: int,
        hidden: int,
        experts: int,
        top_k: int,
        *,
        activation: str = "silu_mul",
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.dim, self.hidden, self.experts, self.activation = dim, hidden, experts, activation
        self.gate_up_proj = nn.Parameter(
            torch.empty(experts * 2 * hidden, dim, dtype=dtype), requires_grad=False
        )
        self.down_proj = nn.Parameter(torch.empty(experts * dim, hidden, dtype=dtype), requires_grad=False)
        name = dtype_name(dtype or torch.get_default_dtype())
        query = OpQuery.of(
            "grouped_experts",
            hidden=dim, experts=experts, top_k=top_k, width=hidden, activation=activation, dtype=name,
        )  # fmt: skip
        self._call = ops.resolve(query)

    def forward(self, x_TC: torch.Tensor, weights_TK: torch.Tensor, experts_TK: torch.Tensor) -> torch.Tensor:
        """Outputs [T, C]; arguments as ``ops.grouped_experts`` takes them."""
        gate_up = self.gate_up_proj.view(self.experts, 2 * self.hidden, self.dim)
        down = self.down_proj.view(self.experts, self.dim, self.hidden)
        out: torch.Tensor = self._call(x_TC, weights_TK, experts_TK, gate_up, down, self.activation)
        return out

    def stored_parts(self) -> Mapping[str, PackedPart]:
        """The weights of each expert."""
        parts: dict[str, PackedPart] = {}
        for e in range(self.experts):
            gate = 2 * e * self.hidden
            up = gate + self.hidden
            parts[f"{e}.gate_proj.weight"] = PackedPart("gate_up_proj", gate, up)
            parts[f"{e}.up_proj.weight"] = PackedPart("gate_up_proj", up, up + self.hidden)
            parts[f"{e}.down_proj.weight"] = PackedPart("down_proj", e * self.dim, (e + 1) * self.dim)
        return parts


class MoE(nn.Module):
    """``gate`` (the router's weight [E, C]) and ``experts``: the ``top_k`` most likely experts of a token, weighted by
    their likelihood among themselves.

    ``shared_hidden``: width of a ``shared_expert`` that every token passes as well, let through by σ of
    ``shared_expert_gate`` (one number per token). ``scaled``: the experts' weights are 8-bit floats
    (``layers.scaled``).
    """

    def __init__(
        self,
        ops: OpTableLike,
        dim: int,
        hidden: int,
        experts: int,
        top_k: int,
        *,
        shared_hidden: int | None = None,
        activation: str = "silu_mul",
        scaled: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.top_k = top_k
        self.gate = Linear(ops, dim, experts, bias=False, dtype=dtype)
        made = ScaledExperts if scaled else Experts
        self.experts: Experts | ScaledExperts = made(
            ops, dim, hidden, experts, top_k, activation=activation, dtype=dtype
        )
        name = dtype_name(dtype or torch.get_default_dtype())
        self._route = ops.resolve(OpQuery.of("moe_route", experts=experts, top_k=top_k, dtype=name))
        self.shared_expert: MLP | None = None
        if shared_hidden is not None:
            self.shared_expert = MLP(
                ops, dim, shared_hidden, activation=activation, bias=False, scaled=scaled, dtype=dtype
            )
            self.shared_expert_gate = Linear(ops, dim, 1, bias=False, dtype=dtype)
            add = OpQuery.of("output_gate", per_token=True, residual=True, dim=dim, dtype=name)
            self._add = ops.resolve(add)

    def forward(self, x_TC: torch.Tensor) -> torch.Tensor:
        """Outputs [T, C]."""
        weights_TK, experts_TK = self._route(self.gate(x_TC), self.top_k)
        routed_TC: torch.Tensor = self.experts(x_TC, weights_TK, experts_TK)
        if self.shared_expert is None:
            return routed_TC
        out: torch.Tensor = self._add(self.shared_expert(x_TC), self.shared_expert_gate(x_TC), routed_TC)
        return out
