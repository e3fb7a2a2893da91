"""Penalties for repetition: which tokens a row has seen and how often it wrote them.

Shapes: N rows, V vocabulary. The tables are [rows, V] and exist once a request asks for a penalty.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kestrel.sampling.params import SamplingParams

__all__ = ["Penalties"]


class Penalties:
    """Counts behind the penalties. Repetition looks at prompt and output; presence and frequency at output alone.

    ``repetition``: a seen token's logit is divided by it when positive, else multiplied (Hugging Face's
    ``repetition_penalty``). ``presence`` is taken off once, ``frequency`` once per occurrence (OpenAI's).
    """

    def __init__(self, vocab_size: int, rows: int, device: torch.device) -> None:
        self._shape, self._device = (rows, vocab_size), device
        self._written: torch.Tensor | None = None
        self._seen: torch.Tensor | None = None
        self._factors = torch.tensor([1.0, 0.0, 0.0], device=device).repeat(rows, 1)

    def set(self, row: int, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]) -> None:
        """Count what a new row has already read and written."""
        written, seen = self._tables()
        written[row] = self._count(output)
        seen[row] = (self._count(prompt) + written[row]) > 0
        self._factors[row] = torch.tensor(
            (params.repetition_penalty, params.presence_penalty, params.frequency_penalty),
            device=self._device,
        )

    def clear(self, row: int) -> None:
        """The row has no penalties."""
        self._factors[row] = torch.tensor((1.0, 0.0, 0.0), device=self._device)

    def apply(self, logits_NV: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """The penalised logits; rows without penalties keep theirs exactly."""
        written, seen = self._tables()
        repetition_N1, presence_N1, frequency_N1 = self._factors[rows, :, None].unbind(1)
        scaled = torch.where(logits_NV > 0, logits_NV / repetition_N1, logits_NV * repetition_N1)
        logits_NV = torch.where(seen[rows], scaled, logits_NV)
        counts_NV = written[rows]
        return logits_NV - presence_N1 * (counts_NV > 0) - frequency_N1 * counts_NV

    def advance(self, rows: torch.Tensor, ids_N: torch.Tensor) -> None:
        """Count one token per row."""
        written, seen = self._tables()
        written[rows, ids_N] += 1
        seen[rows, ids_N] = True

    def _tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self._written is None or self._seen is None:
            self._written = torch.zeros(self._shape, dtype=torch.int32, device=self._device)
            self._seen = torch.zeros(self._shape, dtype=torch.bool, device=self._device)
        return self._written, self._seen

    def _count(self, ids: Sequence[int]) -> torch.Tensor:
        counts = torch.zeros(self._shape[1], dtype=torch.int32, device=self._device)
        if ids:
            where = torch.tensor(ids, device=self._device)
            counts.index_add_(0, where, torch.ones_like(where, dtype=torch.int32))
        return counts
