"""Products on a CPU that read their weights as float16: half of the bytes, and the same numbers.

Whisper's weights were trained and published as float16, so in float32 each of them is still a float16 number. FBGEMM,
which is part of torch on x86, multiplies float32 inputs by such weights and adds up in float32. Decoding one token is
a matter of reading all weights once, so this is what its time depends on. And a row's result is the same, to the last
bit, however many rows are multiplied at once.

Letters: … any leading axes, K inputs, N outputs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from kestrel.layers import Deferred, Linear

__all__ = ["HalfLinear", "halve"]

LARGEST = 65504.0
EPILOGUES = (None, "gelu", "residual", "accumulate")


class HalfLinear(nn.Module):
    """What ``linear`` computes, from its weight as float16. Made by ``of``."""

    def __init__(self, linear: Linear, packed: Any) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.epilogue = linear.epilogue
        self._packed = packed

    @classmethod
    def of(cls, linear: Linear) -> HalfLinear | None:
        """None where the weight holds other numbers than float16's, or this torch has no such product."""
        weight = linear.weight
        fits = weight.device.type == "cpu" and weight.dtype == torch.float32
        if not fits or linear.epilogue not in EPILOGUES or weight.abs().max() > LARGEST:
            return None
        try:
            packed = torch.ops.quantized.linear_prepack_fp16(
                weight, linear.bias if linear.adds_bias else None
            )
            stored, _ = torch.ops.quantized.linear_unpack_fp16(packed)
        except (AttributeError, RuntimeError):
            return None
        return cls(linear, packed) if torch.equal(stored, weight) else None

    def forward(self, x: torch.Tensor | Deferred, residual: torch.Tensor | None = None) -> torch.Tensor:
        """The product [..., N] of ``x`` [..., K], then the epilogue."""
        if isinstance(x, Deferred):
            x = x.value()
        y: torch.Tensor = torch.ops.quantized.linear_dynamic_fp16(x, self._packed)
        if self.epilogue == "gelu":
            return F.gelu(y)
        if self.epilogue == "residual":
            assert residual is not None, "the residual epilogue needs a residual"
            return y.add_(residual)
        if self.epilogue == "accumulate":
            assert residual is not None, "the accumulate epilogue needs a residual"
            return residual.add_(y)
        return y


def halve(module: nn.Module) -> int:
    """Replace every ``Linear`` below ``module`` that can be; how many were. Their float32 weights go, unless something
    else holds them."""
    count = 0
    for name, child in list(module.named_children()):
        half = HalfLinear.of(child) if isinstance(child, Linear) else None
        if half is not None:
            setattr(module, name, half)
            count += 1
        else:
            count += halve(child)
    return count
