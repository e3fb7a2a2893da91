"""Random rows for cases of the sampling ops: settings of every kind, lists with padding, automata, counts.

The last row is the scratch row. Values are exact in any dtype, so that a provider cannot differ by rounding a table.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kestrel.ops.sample_tables import SEEN, AutomatonTables, RowList, SampleTables

__all__ = ["TableShape", "make_rows", "make_tables"]

INDEX = 3  # the output index around which windows open and close
CHOICES = {  # temperature, top_p (where no sum of equal masses is), min_p, top_k
    "plain": [(0.0, 1.0, 0.0, 0), (1.0, 1.0, 0.0, 0), (0.7, 1.0, 0.0, 0)],
    "ranks": [(1.0, 0.9003, 0.0, 0), (0.7, 1.0, 0.0, 5), (1.5, 0.613, 0.0, 40), (0.0, 0.5, 0.0, 3), (1.0, 1e-9, 0.0, 0),
              (0.3, 1.0, 0.0, 1), (1.0, 1.0, 0.0, 0), (2.5, 0.9903, 0.0, 0), (1.0, 0.9503, 0.0, 1000)],
    "all": [(1.0, 0.9003, 0.05, 0), (0.8, 1.0, 0.2, 0), (1.2, 0.8007, 0.01, 30), (0.0, 1.0, 0.1, 0),
            (1.0, 1.0, 1.0, 0)],
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TableShape:
    """A step in numbers: ``kind`` names the CHOICES that its rows take in turn."""

    num_rows: int
    vocab: int
    kind: str = "plain"
    places: int = 0


class _Draws:
    """Whole numbers from a seed."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, low: int, high: int) -> int:
        """A number from ``low`` to ``high``, excluded."""
        return int(torch.randint(low, high, (), generator=self._generator, device="cpu"))

    def span(self, vocab: int) -> tuple[int, int]:
        """A range of ids, at most a tenth of them."""
        start = self(0, vocab)
        return start, min(vocab, start + self(1, max(2, vocab // 10)))


def make_rows(shape: TableShape, seed: int, device: torch.device) -> torch.Tensor:
    """The rows of a step, in random order and distinct; one more than those exists and is left out."""
    order = torch.randperm(shape.num_rows + 1, generator=torch.Generator().manual_seed(seed), device="cpu")
    return order[: shape.num_rows].to(device)


def make_tables(shape: TableShape, seed: int, device: torch.device) -> SampleTables:
    """Tables of ``shape.num_rows`` + 2 rows, the last one blank."""
    draws, vocab = _Draws(seed), shape.vocab
    rows = range(shape.num_rows + 1)
    choices = CHOICES[shape.kind]
    floats, ints, index, states, numbers = [], [], [], [], []
    for row in rows:
        temperature, top_p, min_p, top_k = choices[row % len(choices)]
        penalties = ((1.0, 0.0, 0.0), (1.25, 0.5, 0.25), (0.75, -0.5, 0.0))[draws(0, 3)]
        floats.append((temperature, top_p, min_p, *penalties))
        ints.append((top_k if top_k < vocab else 0, draws(0, 2**62), draws(0, 4), row % 2))
        index.append(draws(INDEX - 1, INDEX + 2))
        numbers.append([(number,) for number in (draws(0, 3), draws(0, 3))])
        states.append([*(0 if number == 0 else draws(0, 2) for (number,) in numbers[-1]), 0])
    off = (vocab, vocab)
    windows = [(0, INDEX), (INDEX, 2**62), (0, 2**62)]
    counts = torch.zeros(len(rows) + 1, vocab, dtype=torch.int32, device="cpu")
    for row in rows:
        for _ in range(6):
            counts[row, draws(0, vocab)] += (1, 2, SEEN, SEEN + 1)[draws(0, 4)]
    statics, biases = (
        [[_item(draws, vocab, windows, k) for _ in range(draws(0, 4))] for _ in rows] for k in (0, 1)
    )
    return SampleTables(
        floats_R6=torch.tensor([*floats, (0.0, 0.0, 0.0, 1.0, 0.0, 0.0)], dtype=torch.float32, device=device),
        ints_R4=torch.tensor([*ints, (0, 0, 0, 0)], device=device),
        index_R=torch.tensor([*index, 0], device=device),
        states_RA=torch.tensor([*states, (0, 0, 0)], device=device),
        stops=_list([[(draws(0, vocab),) for _ in range(draws(0, 4))] for _ in rows], (-1,), device),
        biases=_list(biases, (0, 0, 0, 0), device),
        statics=_list(statics, (*off, 0, 0), device),
        hosts=_list([[draws.span(vocab) for _ in range(draws(0, 3))] for _ in rows], off, device),
        automata=_list(numbers, (0,), device),
        bank=_bank(draws, vocab, device),
        prefers=tuple(
            (
                _list([[draws.span(vocab) for _ in range(draws(0, 3))] for _ in rows], off, device),
                _list([[draws.span(vocab) for _ in range(draws(0, 2))] for _ in rows], off, device),
            )
            for _ in range(shape.places)
        ),
        counts_RV=counts.to(device),
    )


def _item(draws: _Draws, vocab: int, windows: Sequence[tuple[int, int]], kind: int) -> tuple[int, ...]:
    """A static range (``kind`` 0) or a bias, and when it is on."""
    window = windows[draws(0, len(windows))]
    if kind == 0:
        return *draws.span(vocab), *window
    value = (2.0, -1.5, float("-inf"))[draws(0, 3)]
    return draws(0, vocab), struct.unpack("<i", struct.pack("<f", value))[0], *window


def _list(rows: Sequence[Sequence[Sequence[int]]], fill: tuple[int, ...], device: torch.device) -> RowList:
    """Lists of ``rows`` and an empty one, inside a wider tensor, as records of several lists are."""
    most = max(1, *(len(items) for items in rows)) + 1
    padded = [
        [len(items), *(w for item in items for w in item), *fill * (most - len(items))]
        for items in (*rows, ())
    ]
    words = torch.tensor([[7, *words, 7] for words in padded], device=device)
    return RowList(items_RKD=words[:, 2:-1].view(-1, most, len(fill)), length_R=words[:, 1])


def _bank(draws: _Draws, vocab: int, device: torch.device) -> AutomatonTables:
    """The automaton that allows everything, and two of two states and two classes."""
    bounds = [[], *([draws.span(vocab) for _ in range(draws(0, 4))] for _ in range(4))]
    padded = [[*spans, *[(vocab, vocab)] * (4 - len(spans))] for spans in bounds]
    classes = [[0] * vocab, *([draws(0, 2) for _ in range(min(vocab, 64))] for _ in range(2))]
    whole = torch.tensor([(row * (vocab // len(row) + 1))[:vocab] for row in classes], dtype=torch.int32)
    return AutomatonTables(
        base_A=torch.tensor([0, 1, 3], device=device),
        offset_S=torch.tensor([0, 1, 3, 5, 7], device=device),
        next=torch.tensor([0, *(draws(0, 2) for _ in range(8))], dtype=torch.int32, device=device),
        classes_AV=whole.to(device),
        bounds_SK2=torch.tensor(padded, device=device),
        num_bounds_S=torch.tensor([len(spans) for spans in bounds], device=device),
    )
