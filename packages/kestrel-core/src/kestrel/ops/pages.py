"""Where positions lie in a paged pool, as row indices that reference ops share. A pool of one layer is seen as rows
of D numbers: row ``(page · K + head) · S + offset``.

Letters: B sequences, T tokens, J key positions, K key/value heads, S page size, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from kestrel.spi.batch import CrossView, PagedView, RecurrentView

__all__ = ["bytes_of", "gather_rows", "once_per_launch", "rows_of_positions", "rows_of_slots"]

Staged = TypeVar("Staged")
AnyView = TypeVar("AnyView", PagedView, RecurrentView, CrossView)


def once_per_launch(view: AnyView, layer: int, name: str, build: Callable[[AnyView], Staged]) -> Staged:
    """``build(view)``, computed at layer 0 of a launch and reused by the layers after it."""
    if layer == 0 or name not in view.memo:
        view.memo[name] = build(view)
    staged: Staged = view.memo[name]
    return staged


def rows_of_slots(slots_T: torch.Tensor, num_heads: int, page_size: int) -> torch.Tensor:
    """Pool rows [T, K] of ``slots_T``, int64."""
    page = slots_T.div(page_size, rounding_mode="floor")
    first = slots_T.add(page, alpha=page_size * (num_heads - 1))  # the row of head 0
    return first.unsqueeze(1) + _head_steps(num_heads, page_size, slots_T.device)


def rows_of_positions(
    page_table_BN: torch.Tensor, positions_BJ: torch.Tensor, num_heads: int, page_size: int
) -> torch.Tensor:
    """Pool rows [B, K, J] of absolute positions (int64) of each sequence, int64."""
    page_idx = positions_BJ.div(page_size, rounding_mode="floor")
    page = page_table_BN.gather(1, page_idx)
    first = positions_BJ.sub(page_idx, alpha=page_size).add_(page, alpha=page_size * num_heads)
    return first.unsqueeze(1) + _head_steps(num_heads, page_size, page.device).unsqueeze(1)


def _head_steps(num_heads: int, page_size: int, device: torch.device) -> torch.Tensor:
    return torch.arange(0, num_heads * page_size, page_size, device=device)


def gather_rows(pool_PKSD: torch.Tensor, rows_BKJ: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Keys or values [B, K, J, D] at ``rows_BKJ`` of one layer's pool, in ``dtype``."""
    dim = pool_PKSD.shape[-1]
    picked = bytes_of(pool_PKSD).view(-1, dim).index_select(0, rows_BKJ.view(-1)).view(pool_PKSD.dtype)
    return picked.view(*rows_BKJ.shape, dim).to(dtype)


def bytes_of(x: torch.Tensor) -> torch.Tensor:
    """``x``, as bytes when it has 8 bits: torch moves no floats of 8 bits by index."""
    return x.view(torch.uint8) if x.element_size() == 1 else x
