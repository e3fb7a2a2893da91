"""Rotary positions: angles once per launch, rotation in every layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from kestrel.ops.op import dtype_name
from kestrel.spi.backend import OpQuery
from kestrel.spi.family import OpTableLike

__all__ = ["Angles", "Rope"]


class Angles(NamedTuple):
    """Cosines and sines [T, R], float32, as ``ops.rope`` takes them."""

    cos_TR: torch.Tensor
    sin_TR: torch.Tensor


class Rope(nn.Module):
    """Rotates the first ``rot_dim`` dimensions of each head by position · ``base`` ^ (−2i / rot_dim).

    A model computes ``angles = rope(batch.positions_PT)`` once per forward and hands them to every layer.
    ``inv_freq``: the frequencies themselves [rot_dim / 2], for scaled variants. ``rows``: the position row (0 … P − 1)
    that each frequency reads; None reads row 0 (plain rope). Holds no weights.
    """

    def __init__(
        self,
        ops: OpTableLike,
        head_dim: int,
        rot_dim: int | None = None,
        base: float = 10000.0,
        *,
        inv_freq: torch.Tensor | None = None,
        rows: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.rot_dim = head_dim if rot_dim is None else rot_dim
        if inv_freq is None:  # on the CPU by name: modules are built under the meta device
            steps = torch.arange(0, self.rot_dim, 2, dtype=torch.float64, device="cpu")
            inv_freq = (base ** (-steps / self.rot_dim)).to(torch.float32)
        assert inv_freq.shape == (self.rot_dim // 2,), (
            f"{tuple(inv_freq.shape)} frequencies for {self.rot_dim} dims"
        )
        self._freq_R = torch.cat(
            (-inv_freq, inv_freq)
        )  # cos and sin of these angles are laid out as ops.rope wants
        self._rows_R = None if rows is None else torch.tensor([*rows, *rows], dtype=torch.int64, device="cpu")
        name = dtype_name(dtype or torch.get_default_dtype())
        self._call = ops.resolve(OpQuery.of("rope", head_dim=head_dim, rot_dim=self.rot_dim, dtype=name))
        choices = 1 if rows is None else max(rows) + 1
        self._angles = ops.resolve(
            OpQuery.of("rope_angles", rot_dim=self.rot_dim, rows=choices, dtype="float32")
        )

    def forward(self, positions_PT: torch.Tensor) -> Angles:
        """The angles of every token of a launch."""
        if self._freq_R.device != positions_PT.device:
            self._freq_R = self._freq_R.to(positions_PT.device)
            self._rows_R = None if self._rows_R is None else self._rows_R.to(positions_PT.device)
        return Angles(*self._angles(positions_PT, self._freq_R, self._rows_R))

    def rotate(self, x_THD: torch.Tensor, angles: Angles) -> torch.Tensor:
        """``x_THD`` rotated, a new tensor."""
        out: torch.Tensor = self._call(x_THD, angles.cos_TR, angles.sin_TR)
        return out
