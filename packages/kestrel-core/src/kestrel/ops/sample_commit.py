"""sample_commit: what follows from the tokens that a step chose: stops, faults, and each row one token further.

Shapes: N rows of a step, A automata of a row, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from kestrel.ops.op import Case, Inputs, Op, Tolerance
from kestrel.ops.random import normal
from kestrel.ops.sample_cases import TableShape, make_rows, make_tables
from kestrel.ops.sample_tables import SampleTables

__all__ = ["EMPTY_MASK", "NON_FINITE", "OK", "SAMPLE_COMMIT", "sample_commit"]

OK, NON_FINITE, EMPTY_MASK = 0, 1, 2


def sample_commit(
    ids_N: torch.Tensor,
    first_N: torch.Tensor,
    best_N: torch.Tensor,
    rows_N: torch.Tensor,
    tables: SampleTables,
    *,
    advances: bool = False,
    penalties: bool = False,
    automata: bool = False,
    stops: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether each id stops its row, bool [N], and how sampling went, uint8 [N].

    ``first`` are the largest logits of the model, ``best`` those after processing: not a finite number before is
    NON_FINITE, −inf only after is EMPTY_MASK. In place, when the flags say so: ``index`` grows by one (``advances``),
    the id is counted (``penalties``), automata take it (``automata``). Rows are distinct but for a last one, the
    scratch row, whose own tables may hold anything afterwards.
    """
    status_N = (first_N - first_N).ne(0).view(torch.uint8)
    if best_N is not first_N:
        is_empty_N = best_N.isneginf() & (status_N == OK)
        status_N = status_N.masked_fill(is_empty_N, EMPTY_MASK)
    if advances:
        tables.index_R.index_add_(0, rows_N, torch.ones_like(rows_N))
    if penalties:
        assert tables.counts_RV is not None, "a row has penalties and nothing counts its tokens"
        places_N = rows_N * tables.counts_RV.shape[1] + ids_N
        tables.counts_RV.view(-1).index_add_(0, places_N, torch.ones_like(places_N, dtype=torch.int32))
    if automata:
        _advance(ids_N, rows_N, tables)
    if not stops:
        return torch.zeros_like(ids_N, dtype=torch.bool), status_N
    return (tables.stops.items_RKD.index_select(0, rows_N)[..., 0] == ids_N[:, None]).any(dim=1), status_N


def _advance(ids_N: torch.Tensor, rows_N: torch.Tensor, tables: SampleTables) -> None:
    bank = tables.bank
    numbers_NA = tables.automata.items_RKD.index_select(0, rows_N)[..., 0]
    states_NA = bank.base_A[numbers_NA] + tables.states_RA.index_select(0, rows_N)
    classes_NA = bank.classes_AV[numbers_NA, ids_N[:, None]]
    tables.states_RA.index_copy_(0, rows_N, bank.next[bank.offset_S[states_NA] + classes_NA].long())


_FLAGS = ("advances", "penalties", "automata", "stops")
_SHAPES = {  # and what is on
    "smallest": (TableShape(num_rows=1, vocab=1), ("stops",)),
    "odd": (TableShape(num_rows=7, vocab=33), _FLAGS),
    "empty": (TableShape(num_rows=0, vocab=50), _FLAGS),
    "greedy": (TableShape(num_rows=4, vocab=9), ()),
    "penalties": (TableShape(num_rows=5, vocab=70), ("advances", "penalties")),
    "automata": (TableShape(num_rows=130, vocab=1000), ("advances", "automata", "stops")),
}


def _make(
    shape: TableShape, flags: Sequence[str], seed: int, device: torch.device, dtype: torch.dtype
) -> Inputs:
    first = normal(seed, (shape.num_rows,), device, torch.float32)
    ids = first.mul(1000).long().remainder(shape.vocab)
    if shape.num_rows > 3:
        first[0], first[1], first[2] = torch.nan, torch.inf, -torch.inf
    best = first.clone()
    best[2:4] = -torch.inf
    tables = make_tables(shape, seed, device)
    counts = tables.counts_RV
    assert counts is not None
    return Inputs(
        args=(ids, first, best, make_rows(shape, seed, device), tables),
        kwargs=dict.fromkeys(flags, True),
        written=(tables.index_R, tables.states_RA, counts),
    )


def _cases() -> Sequence[Case]:
    return [
        Case(op="sample_commit", name=name, make=partial(_make, shape, flags), facts={"vocab": shape.vocab})
        for name, (shape, flags) in _SHAPES.items()
    ]


SAMPLE_COMMIT = Op(
    name="sample_commit",
    reference=sample_commit,
    cases=_cases,
    tolerances=dict.fromkeys(("float32", "bfloat16", "float16"), Tolerance(0.0, 0.0)),  # whole numbers
    facts={"vocab": "V", "dtype": "of the model's logits"},
)
