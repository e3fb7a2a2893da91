"""Input embeddings: token ids, and media features in their place."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from kestrel.spi.batch import Batch

__all__ = ["Embedding", "embed", "merge_media"]


def embed(ids_T: torch.Tensor, weight_VC: torch.Tensor) -> torch.Tensor:
    """Rows [T, C] of ``weight_VC`` for ``ids_T``."""
    if ids_T.is_cuda and ids_T.numel() > 1:
        return weight_VC[ids_T]  # 1.5 µs on an H200, where torch's embedding takes 2.2 to 7.6 for 2 to 16 ids
    return F.embedding(ids_T, weight_VC)


def merge_media(x_TC: torch.Tensor, batch: Batch) -> torch.Tensor:
    """``x_TC`` with the rows of media tokens replaced by their features (``batch.media_rows_T`` >= 0).

    ``x_TC`` itself when the launch has no media. Features are cast to x's dtype.
    """
    features = batch.features_RC
    if features is None or features.shape[0] == 0:
        return x_TC
    rows = batch.media_rows_T
    picked = features.index_select(0, rows.clamp(min=0)).to(x_TC.dtype)
    return torch.where((rows >= 0).unsqueeze(-1), picked, x_TC)


class Embedding(nn.Module):
    """A table ``weight`` [V, C] of token embeddings."""

    def __init__(self, vocab_size: int, dim: int, *, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, dim, dtype=dtype), requires_grad=False)

    def forward(self, ids_T: torch.Tensor) -> torch.Tensor:
        """Embeddings [T, C]."""
        return embed(ids_T, self.weight)
