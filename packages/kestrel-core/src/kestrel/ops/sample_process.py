"""sample_process: what a row's penalties, biases, masks and preferred groups make of its logits.

Shapes: N rows of a step, V vocabulary, K entries of a list.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from kestrel.ops.op import Case, Inputs, Op, Tolerance
from kestrel.ops.random import normal
from kestrel.ops.sample_cases import TableShape, make_rows, make_tables
from kestrel.ops.sample_tables import COUNT, RowList, SampleTables

__all__ = ["SAMPLE_PROCESS", "covered_by", "sample_process"]


def sample_process(
    logits_NV: torch.Tensor,
    rows_N: torch.Tensor,
    tables: SampleTables,
    *,
    penalties: bool = False,
    biases: bool = False,
    statics: bool = False,
    automata: bool = False,
    hosts: bool = False,
    prefers: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Processed logits [N, V] float32, the id and value of the largest of each row, and the largest before.

    In order: penalties (a seen token's logit is divided by ``repetition`` when positive, else multiplied; ``presence``
    is taken off what was written, ``frequency`` once per occurrence), biases, then −inf for what a static range, an
    automaton or a host mask bans at the row's output index, then preferred groups: when the log-sum-exp of a group
    exceeds the largest logit outside it, everything outside becomes −inf; ids of ``unless`` are on neither side. The
    flags name the stages that any of the rows needs; the tables of a row that does not need one leave its logits as
    they are. The logits are not changed. Ties and NaN as in sample_argmax.
    """
    first_N = logits_NV.amax(1).float()
    processed_NV = logits_NV.float()
    if penalties:
        processed_NV = _penalised(processed_NV, rows_N, tables)
    index_N1 = tables.index_R.index_select(0, rows_N)[:, None]
    if biases:
        processed_NV = _biased(processed_NV, rows_N, index_N1, tables)
    parts = list(_banned(rows_N, index_N1, tables, statics=statics, automata=automata, hosts=hosts))
    if parts:
        processed_NV = processed_NV.masked_fill(_covered(parts, logits_NV.shape[1]), -torch.inf)
    if prefers:
        for group, unless in tables.prefers:
            processed_NV = _preferred(
                processed_NV, _member(group, rows_N, logits_NV), _member(unless, rows_N, logits_NV)
            )
    best_N, ids_N = processed_NV.max(dim=1)
    return processed_NV, ids_N, best_N, first_N


def _penalised(logits_NV: torch.Tensor, rows_N: torch.Tensor, tables: SampleTables) -> torch.Tensor:
    assert tables.counts_RV is not None, "a row has penalties and nothing counts its tokens"
    repetition_N1, presence_N1, frequency_N1 = tables.floats_R6.index_select(0, rows_N)[:, 3:, None].unbind(1)
    seen_NV = tables.counts_RV.index_select(0, rows_N)
    counts_NV = seen_NV & COUNT
    scaled_NV = torch.where(logits_NV > 0, logits_NV / repetition_N1, logits_NV * repetition_N1)
    logits_NV = torch.where(seen_NV != 0, scaled_NV, logits_NV)
    return logits_NV - presence_N1 * (counts_NV > 0) - frequency_N1 * counts_NV


def _biased(
    logits_NV: torch.Tensor, rows_N: torch.Tensor, index_N1: torch.Tensor, tables: SampleTables
) -> torch.Tensor:
    ids_NK, bits_NK, first_NK, last_NK = tables.biases.items_RKD.index_select(0, rows_N).unbind(-1)
    is_on_NK = (first_NK <= index_N1) & (index_N1 < last_NK)
    added_NK = bits_NK.to(torch.int32).view(torch.float32).masked_fill(~is_on_NK, 0.0)
    return logits_NV.scatter_add(1, ids_NK, added_NK)


def _banned(
    rows_N: torch.Tensor,
    index_N1: torch.Tensor,
    tables: SampleTables,
    *,
    statics: bool,
    automata: bool,
    hosts: bool,
) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
    """Bounds [N, K, 2] per kind of mask, and which of them are on (None: all)."""
    if statics:
        static_NK4 = tables.statics.items_RKD.index_select(0, rows_N)
        yield static_NK4[..., :2], (static_NK4[..., 2] <= index_N1) & (index_N1 < static_NK4[..., 3])
    if automata:
        numbers_NA = tables.automata.items_RKD.index_select(0, rows_N)[..., 0]
        states_NA = tables.bank.base_A[numbers_NA] + tables.states_RA.index_select(0, rows_N)
        yield tables.bank.bounds_SK2[states_NA].flatten(1, 2), None
    if hosts:
        yield tables.hosts.items_RKD.index_select(0, rows_N), None


def _covered(parts: list[tuple[torch.Tensor, torch.Tensor | None]], vocab_size: int) -> torch.Tensor:
    if len(parts) == 1:
        return covered_by(*parts[0], vocab_size)
    is_on = [torch.ones_like(b[..., 0], dtype=torch.bool) if on is None else on for b, on in parts]
    return covered_by(torch.cat([b for b, _ in parts], 1), torch.cat(is_on, 1), vocab_size)


def covered_by(bounds_NK2: torch.Tensor, is_on_NK: torch.Tensor | None, vocab_size: int) -> torch.Tensor:
    """A mask [N, V] of the ids that any of the row's ranges covers; ranges that are not on cover nothing.

    ``bounds`` are starts and ends, in any order, overlapping or not; padding starts and ends at ``vocab_size``.
    Integer arithmetic: the same whatever the batch.
    """
    num_rows, num_ranges, _ = bounds_NK2.shape
    steps_NK = torch.ones(num_rows, num_ranges, dtype=torch.int32, device=bounds_NK2.device)
    if is_on_NK is not None:
        steps_NK = steps_NK.mul_(is_on_NK)
    edges = torch.zeros(num_rows, vocab_size + 1, dtype=torch.int32, device=bounds_NK2.device)
    edges.scatter_add_(1, bounds_NK2.flatten(1), torch.stack((steps_NK, -steps_NK), dim=-1).flatten(1))
    return edges.cumsum_(1)[:, :vocab_size] > 0


def _preferred(logits_NV: torch.Tensor, group_NV: torch.Tensor, free_NV: torch.Tensor) -> torch.Tensor:
    inside_NV, outside_NV = group_NV & ~free_NV, ~group_NV & ~free_NV
    mass_N = logits_NV.masked_fill(~inside_NV, -torch.inf).logsumexp(1)
    best_N = logits_NV.masked_fill(~outside_NV, -torch.inf).amax(1)
    return logits_NV.masked_fill(outside_NV & (mass_N > best_N)[:, None], -torch.inf)


def _member(ranges: RowList, rows_N: torch.Tensor, logits_NV: torch.Tensor) -> torch.Tensor:
    return covered_by(ranges.items_RKD.index_select(0, rows_N), None, logits_NV.shape[1])


_STAGES = ("penalties", "biases", "statics", "automata", "hosts", "prefers")
_SHAPES = {  # and the stages that are on
    "smallest": (TableShape(num_rows=1, vocab=1), ("biases",)),
    "odd": (TableShape(num_rows=5, vocab=2051, places=1), _STAGES),
    "empty": (TableShape(num_rows=0, vocab=50), ("biases", "statics")),
    "penalties": (TableShape(num_rows=4, vocab=500), ("penalties",)),
    "masks": (TableShape(num_rows=6, vocab=517), ("statics", "automata", "hosts")),
    "two preferred groups": (TableShape(num_rows=7, vocab=700, places=2), ("prefers",)),
    "faults": (TableShape(num_rows=4, vocab=300, places=1), ("statics", "prefers")),
    "many rows": (TableShape(num_rows=70, vocab=130, places=1), _STAGES),
    "largest": (TableShape(num_rows=2, vocab=151_936, places=1), _STAGES),
}


def _make(
    shape: TableShape,
    stages: Sequence[str],
    has_faults: bool,
    seed: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Inputs:
    logits = normal(seed, (shape.num_rows, shape.vocab), device, dtype, scale=3.0)
    if has_faults:
        logits[0, 7], logits[1, 8], logits[2] = torch.nan, torch.inf, -torch.inf
    tables = make_tables(shape, seed, device)
    return Inputs(args=(logits, make_rows(shape, seed, device), tables), kwargs=dict.fromkeys(stages, True))


def _cases() -> Sequence[Case]:
    return [
        Case(
            op="sample_process",
            name=name,
            make=partial(_make, shape, stages, name == "faults"),
            facts={"vocab": shape.vocab},
        )
        for name, (shape, stages) in _SHAPES.items()
    ]


SAMPLE_PROCESS = Op(
    name="sample_process",
    reference=sample_process,
    cases=_cases,
    # float32 whatever the logits: a quotient or a sum may be rounded or fused in another way
    tolerances=dict.fromkeys(("float32", "bfloat16", "float16"), Tolerance(1e-5, 1e-6)),
    facts={"vocab": "V", "dtype": "of the logits"},
)
