"""The blocks of both transformers in launches that multiply in 8 bits (``prefill_dtype``)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kestrel.layers import MLP, AddNorm, E4M3Cast, E4M3Linear, E4M3Norm, LayerNorm, Linear
from kestrel.spi import OpTableLike

__all__ = ["EightBits"]


class EightBits:
    """What a block computes with: its norms, the product into attention, whose last ``values`` outputs are its values,
    the product out of it, and the MLP. ``offset``: the norms are given one. ``adds_biases``: the products that end in
    the residual stream do."""

    def __init__(
        self,
        ops: OpTableLike,
        norms: Sequence[LayerNorm | AddNorm],
        qkv: Linear,
        proj: Linear,
        mlp: MLP,
        *,
        values: int,
        offset: bool,
        adds_biases: bool,
    ) -> None:
        dtype, fc1, fc2 = qkv.weight.dtype, mlp.fc1, mlp.fc2
        assert isinstance(fc1, Linear)
        assert isinstance(fc2, Linear)
        self.norms = [E4M3Norm(ops, norm, offset=offset) for norm in norms]
        self.qkv, self.fc1 = (E4M3Linear(ops, linear, adds_bias=True) for linear in (qkv, fc1))
        self.proj, self.fc2 = (E4M3Linear(ops, linear, adds_bias=adds_biases) for linear in (proj, fc2))
        self.attended = E4M3Cast(ops, proj.in_features, dtype=dtype)
        self.inner = E4M3Cast(ops, fc2.in_features, fc1.epilogue, dtype=dtype)
        self._values = values

    def fill(self) -> None:
        """Make the weights, of those that were loaded."""
        self.attended.bound = float(self.qkv.of_norm(self.norms[0])[-self._values :].max())
        self.inner.bound = float(self.fc1.of_norm(self.norms[-1]).max())
        self.proj.of_cast(self.attended)
        self.fc2.of_cast(self.inner)

    def mlp(self, values: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """What the MLP makes of a norm, and ``residual``."""
        return self.fc2(self.inner(self.fc1(values)), residual)
