"""How the tokens of a launch lie in its sequences, computed on the device once for all recurrent layers.

Letters: B sequences, T tokens, N chunks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kestrel.ops.pages import once_per_launch
from kestrel.spi.batch import Limits, RecurrentView

__all__ = ["CHUNK", "Plan", "meta_view", "plan_of"]

CHUNK = 64  # tokens of one sequence that are solved together
BEHIND = 1 << 30  # the place of a token that no sequence has


@dataclass(frozen=True, slots=True)
class Plan:
    """``place_T`` int32: each token's place in its sequence; BEHIND for tokens behind the last sequence.

    Sequence b has the chunks ``starts[b]`` to ``starts[b + 1]`` (int32 [B + 1]). ``row_N`` int32: each chunk's
    sequence, B for those that hold tokens behind the last sequence, or nothing. ``first_N`` int32: its first token.
    """

    place_T: torch.Tensor
    starts: torch.Tensor
    row_N: torch.Tensor
    first_N: torch.Tensor

    @property
    def num_chunks(self) -> int:
        """N: no launch of these shapes has more, with one for each sequence's rest and one for spare tokens."""
        return self.row_N.shape[0]


def plan_of(view: RecurrentView, layer: int, num_tokens: int) -> Plan:
    """The plan of ``view``'s sequences among ``num_tokens`` tokens."""
    return once_per_launch(
        view, layer, f"recurrent_plan {num_tokens}", lambda view: _build(view.cu_seqlens, num_tokens)
    )


def _build(cu_seqlens: torch.Tensor, num_tokens: int) -> Plan:
    device, rows = cu_seqlens.device, cu_seqlens.shape[0] - 1
    token = torch.arange(num_tokens, dtype=torch.int32, device=device)
    row_T = torch.searchsorted(cu_seqlens[1:], token, right=True)
    place_T = (token - cu_seqlens[row_T]).masked_fill_(row_T == rows, BEHIND)

    counts = (cu_seqlens.diff() + (CHUNK - 1)).div(CHUNK, rounding_mode="floor")
    starts = torch.zeros_like(cu_seqlens)
    torch.cumsum(counts, 0, out=starts[1:])
    number = torch.arange(num_tokens // CHUNK + rows + 1, dtype=torch.int32, device=device)
    row_N = torch.searchsorted(starts[1:], number, right=True)
    first_N = cu_seqlens[row_N] + (number - starts[row_N]) * CHUNK
    return Plan(place_T, starts, row_N.to(torch.int32), first_N)


def meta_view(parts: Mapping[str, torch.Tensor], rows: int, tokens: int, stores: int = 0) -> RecurrentView:
    """A view without memory, to build launches for compiling: ``parts`` are of the meta device."""
    longest = -(-tokens // rows)
    return RecurrentView(
        parts=parts,
        slots_B=torch.empty(rows, dtype=torch.int64, device="meta"),
        cu_seqlens=torch.empty(rows + 1, dtype=torch.int32, device="meta"),
        stores=torch.empty(stores, 3, dtype=torch.int64, device="meta"),
        limits=Limits(max_rows=rows, max_tokens=tokens, max_query_len=longest, max_context_len=longest),
    )
