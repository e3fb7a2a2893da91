"""Coordinates and sizes: numbers to embeddings by Fourier features, hidden states to bins.

As aux values bins count from 1, since 0 says that a token carries none; ``parser.Coordinates`` reads them.

Letters: T tokens, N rows, C hidden, W aux width (coordinate, width, height), F numbers of a token (1 or 2).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from kestrel.layers import MLP, Linear
from kestrel.spi import OpTableLike
from kestrel_moondream.config import RegionConfig

__all__ = ["Region", "coordinate_of", "size_of"]


def coordinate_of(bins: torch.Tensor, num_bins: int) -> torch.Tensor:
    """Coordinates 0–1, float32, of aux values."""
    return (bins - 1).float() / num_bins


def size_of(bins: torch.Tensor, num_bins: int) -> torch.Tensor:
    """Widths or heights 1/1024 … 1, float32, of aux values: bins are even steps of their logarithm."""
    return torch.exp2((bins - 1).float() / (num_bins - 1) * 10 - 10)


class Region(nn.Module):
    """Encodes and decodes coordinates and sizes."""

    def __init__(self, config: RegionConfig, ops: OpTableLike, dtype: torch.dtype) -> None:
        super().__init__()
        self.config, self.dtype = config, dtype
        self.coord_features = _frozen(1, config.coord_feat_dim // 2, dtype)
        self.size_features = _frozen(2, config.size_feat_dim // 2, dtype)
        self.coord_encoder = Linear(ops, config.coord_feat_dim, config.dim, dtype=dtype)
        self.size_encoder = Linear(ops, config.size_feat_dim, config.dim, dtype=dtype)
        self.coord_decoder = MLP(ops, config.dim, config.inner_dim, out=config.coord_out_dim, dtype=dtype)
        self.size_decoder = MLP(ops, config.dim, config.inner_dim, out=config.size_out_dim, dtype=dtype)

    def encode_coordinates(self, x_TF: torch.Tensor) -> torch.Tensor:
        """Embeddings [T, C] of coordinates [T, 1]."""
        return self.coord_encoder(self._fourier(x_TF, self.coord_features))

    def encode_sizes(self, x_TF: torch.Tensor) -> torch.Tensor:
        """Embeddings [T, C] of widths and heights [T, 2]."""
        return self.size_encoder(self._fourier(x_TF, self.size_features))

    def embed_bins(
        self, x_TC: torch.Tensor, is_coord_T: torch.Tensor, is_size_T: torch.Tensor, aux_TW: torch.Tensor
    ) -> torch.Tensor:
        """``x_TC``, but for coordinate and size tokens that carry bins the embedding of their value."""
        coordinates = self.encode_coordinates(coordinate_of(aux_TW[:, :1], self.config.coord_out_dim))
        sizes = self.encode_sizes(size_of(aux_TW[:, 1:], self.config.size_bins))
        has_coord_T = is_coord_T & (aux_TW[:, 0] > 0)
        has_size_T = is_size_T & (aux_TW[:, 1] > 0)
        x_TC = torch.where(has_coord_T[:, None], coordinates, x_TC)
        return torch.where(has_size_T[:, None], sizes, x_TC)

    def bin_logits(self, h_NC: torch.Tensor) -> torch.Tensor:
        """Logits [N, 3, bins + 1] of aux values (coordinate, width, height); never 0, the place of "none"."""
        coordinate = self.coord_decoder(h_NC).unsqueeze(1)
        size = self.size_decoder(h_NC).unflatten(-1, (2, -1))
        bins = max(coordinate.shape[-1], size.shape[-1])
        lowest = torch.finfo(h_NC.dtype).min
        padded = [F.pad(logits, (1, bins - logits.shape[-1]), value=lowest) for logits in (coordinate, size)]
        return torch.cat(padded, dim=1)

    def _fourier(self, x_TF: torch.Tensor, weight_FD: torch.Tensor) -> torch.Tensor:
        phase = 2 * math.pi * x_TF.to(self.dtype) @ weight_FD
        return torch.cat([phase.cos(), phase.sin()], dim=-1)


def _frozen(rows: int, columns: int, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(rows, columns, dtype=dtype), requires_grad=False)
