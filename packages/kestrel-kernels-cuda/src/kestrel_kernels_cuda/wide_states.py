"""Recurrent states kept in 16 bits, for kernels that take float32: copies of the rows' states, and their way back.

Prompts go this way: over states of 16 bits, ptxas 12.8 makes a product that reads anywhere (see ``assembly``), and the
copies are few bytes beside what a prompt's tokens cost.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from kestrel.spi.batch import RecurrentView

__all__ = ["float32_states"]


@contextmanager
def float32_states(view: RecurrentView, layer: int, part: str) -> Iterator[RecurrentView]:
    """A view whose ``part`` has, in its ``layer``, float32 copies of the states of ``view``'s rows, and room for
    checkpoints. On leaving, both are rounded into ``view``'s pool."""
    pool, rows, count = view.parts[part][layer], view.slots_B.shape[0], view.stores.shape[0]
    wide = torch.empty((rows + count, *pool.shape[1:]), dtype=torch.float32, device=pool.device)
    wide[:rows] = pool.index_select(0, view.slots_B)
    places = torch.arange(rows + count, device=pool.device)
    stores = torch.cat((view.stores[:, :2], places[rows:].unsqueeze(1)), dim=1)
    seen = replace(
        view,
        parts={**view.parts, part: wide.expand(layer + 1, *wide.shape)},
        slots_B=places[:rows],
        stores=stores,
    )
    seen.memo.update(view.memo)
    yield seen
    pool.index_copy_(0, view.slots_B, wide[:rows].to(pool.dtype))
    if count:
        pool.index_copy_(0, view.stores[:, 2], wide[rows:].to(pool.dtype))
