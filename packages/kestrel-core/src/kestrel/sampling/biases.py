"""What is added to logits at given ids while the output index is in a window: the caller's biases, bans of a few ids.

Shapes: N rows, V vocabulary, K biases per row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kestrel.sampling.params import Bias
from kestrel.sampling.table import RowLists

__all__ = ["Biases"]


class Biases:
    """The biases of every row, on the device."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self._where = RowLists(rows, (0, 0, 0), device=device)  # id, first, last
        self._values = RowLists(rows, (0.0,), device=device, dtype=torch.float32)

    def set(self, row: int, biases: Sequence[Bias]) -> None:
        """Biases of a row; none: its logits stay as they are."""
        self._where.set(row, [(token_id, first, last) for token_id, _, first, last in biases])
        self._values.set(row, [(value,) for _, value, _, _ in biases])

    def apply(self, logits_NV: torch.Tensor, rows: torch.Tensor, index_N: torch.Tensor) -> torch.Tensor:
        """The logits with what is on at each row's output index added."""
        ids_NK, first_NK, last_NK = self._where.of(rows).unbind(-1)
        index_N1 = index_N[:, None]
        is_on_NK = (first_NK <= index_N1) & (index_N1 < last_NK)
        added_NK = self._values.of(rows)[..., 0].masked_fill(~is_on_NK, 0.0)
        return logits_NV.scatter_add(1, ids_NK, added_NK)
