"""The sparse feed-forward part: a few of many experts, and one that every token passes through a gate of its own."""

from __future__ import annotations

import torch

from kestrel.layers import MLP, Linear, MoE
from kestrel.spi import OpTableLike
from kestrel_qwen.config import MoEConfig

__all__ = ["SparseMLP"]


class SparseMLP(MoE):
    """Σ p_e · expert_e(x) + σ(shared_expert_gate · x) · shared_expert(x)."""

    def __init__(self, dim: int, config: MoEConfig, ops: OpTableLike, dtype: torch.dtype) -> None:
        super().__init__(ops, dim, config.intermediate_size, config.experts, config.top_k, dtype=dtype)
        hidden = config.shared_intermediate_size
        self.shared_expert = MLP(ops, dim, hidden, activation="silu_mul", bias=False, dtype=dtype)
        self.shared_expert_gate = Linear(ops, dim, 1, bias=False, dtype=dtype)

    def forward(self, x_TC: torch.Tensor) -> torch.Tensor:
        shared_TC = self.shared_expert_gate(x_TC).sigmoid() * self.shared_expert(x_TC)
        return super().forward(x_TC) + shared_TC
