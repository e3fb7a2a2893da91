"""Penalties for repetition: which tokens a row has seen and how often it wrote them.

Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kestrel.ops.sample_tables import SEEN

__all__ = ["Penalties"]


class Penalties:
    """Counts behind the penalties. Repetition looks at prompt and output; presence and frequency at output alone.

    Hugging Face's ``repetition_penalty``; OpenAI's ``presence`` and ``frequency``. ``counts_RV`` exists once a request
    asks for a penalty, or ``prepare`` was called; ``generation`` moves then.
    """

    def __init__(self, vocab_size: int, rows: int, device: torch.device) -> None:
        self._shape, self._device = (rows, vocab_size), device
        self.counts_RV: torch.Tensor | None = None
        self.generation = 0

    def prepare(self) -> torch.Tensor:
        """The counts of every row, int32 [R, V] as in SampleTables."""
        if self.counts_RV is None:
            self.counts_RV = torch.zeros(self._shape, dtype=torch.int32, device=self._device)
            self.generation += 1
        return self.counts_RV

    def set(self, row: int, prompt: Sequence[int], output: Sequence[int]) -> None:
        """Count what a new row has already read and written."""
        counts_V = self.prepare()[row].zero_()
        if prompt:
            counts_V.index_fill_(0, self._ids(sorted(set(prompt))), SEEN)
        if output:
            ids = self._ids(output)
            counts_V.index_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))

    def _ids(self, ids: Sequence[int]) -> torch.Tensor:
        host = torch.tensor(ids)
        if self._device.type == "cuda":
            host = host.pin_memory()  # the caching host allocator keeps it alive until the copy ran
        return host.to(self._device, non_blocking=True)
