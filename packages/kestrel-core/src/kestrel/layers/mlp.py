"""The feed-forward part of a block."""

from __future__ import annotations

import torch
from torch import nn

from kestrel.layers.linear import Linear, Packed
from kestrel.layers.norms import Deferred, NormKind
from kestrel.layers.scaled import ScaledLinear, ScaledPacked
from kestrel.spi.family import OpTableLike

__all__ = ["MLP"]


class MLP(nn.Module):
    """fc1, activation, fc2. ``activation``: an epilogue of ``ops.linear``; for a gated one ("silu_mul",
    "gelu_tanh_mul") fc1 is ``Packed`` of "gate" and "up", ``hidden`` rows each. ``norm``: as ``Linear`` has it;
    ``adds_bias``: likewise, of fc2. ``scaled``: weights of 8-bit floats (``layers.scaled``); it has no bias then."""

    def __init__(
        self,
        ops: OpTableLike,
        dim: int,
        hidden: int,
        *,
        out: int | None = None,
        activation: str = "gelu_tanh",
        bias: bool = True,
        residual: bool = False,
        accumulate: bool = False,
        adds_bias: bool = True,
        norm: NormKind | None = None,
        scaled: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        after = "accumulate" if accumulate else "residual" if residual else None
        if scaled:
            assert activation.endswith("_mul"), f"8-bit floats are for gated blocks, not {activation}"
            assert not bias, "8-bit floats are for blocks without bias"
            parts = {"gate": hidden, "up": hidden}
            self.fc1: Linear | ScaledLinear = ScaledPacked(ops, dim, parts, epilogue=activation, dtype=dtype)
            self.fc2: Linear | ScaledLinear = ScaledLinear(
                ops, hidden, out or dim, epilogue=after, dtype=dtype
            )
            return
        if activation.endswith("_mul"):
            parts = {"gate": hidden, "up": hidden}
            self.fc1 = Packed(ops, dim, parts, bias=bias, epilogue=activation, norm=norm, dtype=dtype)
        else:
            self.fc1 = Linear(ops, dim, hidden, bias=bias, epilogue=activation, norm=norm, dtype=dtype)
        self.fc2 = Linear(
            ops, hidden, out or dim, bias=bias, epilogue=after, adds_bias=adds_bias, dtype=dtype
        )

    def forward(self, x: torch.Tensor | Deferred, residual: torch.Tensor | None = None) -> torch.Tensor:
        """[..., dim] to [..., out]; ``residual`` is added when the module was built with ``residual`` or, in
        place, with ``accumulate``."""
        out: torch.Tensor = self.fc2(self.fc1(x), residual)
        return out
