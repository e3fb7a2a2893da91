"""The tensors of a product, as its kernels take them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kestrel_kernels_cuda.linear_config import is_gated

__all__ = ["Norm", "Operands"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    """The norm before a product: ``kind``, ``gain`` and ``shift`` as ``kestrel.ops.norm_linear`` has them."""

    kind: str
    gain: torch.Tensor
    shift: torch.Tensor | None
    eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Operands:
    """The tensors of a product, ``x`` [rows, K] and ``residual`` [rows, N] with adjacent columns. ``scale``: of the
    blocks of an 8-bit weight, [⌈N / 128⌉, ⌈K / 128⌉]."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    residual: torch.Tensor | None
    epilogue: str | None
    norm: Norm | None
    scale: torch.Tensor | None = None

    @property
    def outputs(self) -> int:
        """Columns of the output."""
        n = self.weight.shape[0]
        return n // 2 if is_gated(self.epilogue) else n

    def output(self) -> torch.Tensor:
        """Where the output [rows, outputs] goes: over a residual whose rows lie side by side when that accumulates."""
        if self.epilogue == "accumulate" and self.residual is not None and self.residual.is_contiguous():
            return self.residual
        return torch.empty((self.x.shape[0], self.outputs), dtype=self.x.dtype, device=self.x.device)
