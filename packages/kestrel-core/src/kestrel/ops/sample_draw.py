"""sample_draw: one token per row: temperature, top-k, top-p, min-p, then the Gumbel maximum.

Shapes: N rows of a step, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from kestrel.ops.op import Case, Inputs, Op, Tolerance
from kestrel.ops.philox import Gumbel
from kestrel.ops.random import normal
from kestrel.ops.sample_cases import TableShape, make_rows, make_tables
from kestrel.ops.sample_tables import SampleTables

__all__ = ["SAMPLE_DRAW", "sample_draw"]


def sample_draw(
    logits_NV: torch.Tensor,
    best_N: torch.Tensor,
    greedy_N: torch.Tensor,
    rows_N: torch.Tensor,
    tables: SampleTables,
    *,
    ranks: bool = False,
    min_p: bool = False,
) -> torch.Tensor:
    """Ids [N] int64: ``greedy`` for rows of temperature 0, else drawn. ``best`` are the rows' largest logits.

    Filters cut on the tempered distribution: top-k first, then top-p on what is left (a token goes when the mass
    before it exceeds top_p; the first one always stays), then min-p. Equal logits rank by id: exactly ``top_k`` stay,
    the lowest ids, and top-p cuts among equals in the same order. What is left gets standard Gumbel noise (philox.py:
    key = seed, counter = output index, choice, vocabulary block); the largest sum is drawn. Sums of mass are float32
    in any order, so a token whose mass before it equals top_p up to rounding may stay or go, the same way each time.

    ``ranks``: any of the rows has top-k or top-p; ``min_p``: any has it. What a row without a finite best logit draws
    is undefined, but in range.
    """
    floats_N6, ints_N4 = (
        tables.floats_R6.index_select(0, rows_N),
        tables.ints_R4.index_select(0, rows_N),
    )
    temperature_N, top_p_N, min_p_N = floats_N6[:, :3].unbind(1)
    top_k_N, seed_N, choice_N, _ = ints_N4.unbind(1)
    noise_NV = Gumbel(logits_NV.shape[1], logits_NV.device)(
        seed_N, tables.index_R.index_select(0, rows_N), choice_N
    )
    logits_NV = logits_NV.float()
    divisor_N1 = temperature_N.masked_fill(temperature_N == 0, 1.0)[:, None]
    scaled_NV = _tempered(logits_NV, best_N, divisor_N1)
    if ranks:
        ranked_NV = logits_NV.sort(dim=1, descending=True).values
        num_kept_N1 = _num_kept(_tempered(ranked_NV, best_N, divisor_N1), top_k_N, top_p_N)
        scaled_NV = scaled_NV.masked_fill(~_first_ranks(logits_NV, ranked_NV, num_kept_N1), -torch.inf)
    if min_p:
        scaled_NV = scaled_NV.masked_fill(scaled_NV < min_p_N.log()[:, None], -torch.inf)
    return torch.where(temperature_N == 0, greedy_N, (scaled_NV + noise_NV).argmax(dim=1))


def _tempered(logits_NV: torch.Tensor, best_N: torch.Tensor, divisor_N1: torch.Tensor) -> torch.Tensor:
    """Logits over the temperature, relative to the best: a tiny temperature underflows to certainty.

    A row with nothing left has no best (not a number); it fails by its status, whatever is drawn.
    """
    return (logits_NV - best_N[:, None]) / divisor_N1


def _num_kept(ranked_NV: torch.Tensor, top_k_N: torch.Tensor, top_p_N: torch.Tensor) -> torch.Tensor:
    """How many of the ranked tokens top-k and top-p keep, at least one: [N, 1]."""
    rank_V = torch.arange(ranked_NV.shape[1], device=ranked_NV.device)
    in_k_NV = (rank_V < top_k_N[:, None]) | (top_k_N == 0)[:, None]
    mass_NV = ranked_NV.masked_fill(~in_k_NV, -torch.inf).softmax(dim=1)
    before_NV = mass_NV.cumsum(dim=1) - mass_NV
    in_p_NV = (before_NV <= top_p_N[:, None]) | (top_p_N >= 1)[:, None]
    return (in_k_NV & in_p_NV).sum(dim=1, keepdim=True).clamp_(min=1)


def _first_ranks(logits_NV: torch.Tensor, ranked_NV: torch.Tensor, num_kept_N1: torch.Tensor) -> torch.Tensor:
    """The ids [N, V] of the first ``num_kept`` ranks. Equal logits rank by id, so exactly as many stay."""
    least_N1 = ranked_NV.gather(1, num_kept_N1 - 1)
    above_NV, level_NV = logits_NV > least_N1, logits_NV == least_N1
    num_level_N1 = num_kept_N1 - above_NV.sum(dim=1, keepdim=True)
    return above_NV | (level_NV & (level_NV.cumsum(dim=1) <= num_level_N1))


_SHAPES = {
    "smallest": TableShape(num_rows=1, vocab=1),
    "odd": TableShape(num_rows=5, vocab=2051),
    "empty": TableShape(num_rows=0, vocab=50, kind="all"),
    "ranks": TableShape(num_rows=9, vocab=4099, kind="ranks"),
    "all filters": TableShape(num_rows=6, vocab=2500, kind="all"),
    "ties": TableShape(num_rows=9, vocab=3001, kind="ranks"),
    "few logits": TableShape(num_rows=9, vocab=1030, kind="ranks"),
    "many rows": TableShape(num_rows=20, vocab=130, kind="all"),
    "largest": TableShape(num_rows=3, vocab=151_936, kind="ranks"),
}


def _make(shape: TableShape, name: str, seed: int, device: torch.device, dtype: torch.dtype) -> Inputs:
    logits = normal(seed, (shape.num_rows, shape.vocab), device, dtype, scale=3.0)
    if name == "ties":
        logits = logits.round()
    if name == "few logits":
        logits[:, 3:] = -torch.inf
    best_N, greedy_N = logits.float().max(dim=1)
    flags = {"ranks": shape.kind != "plain", "min_p": shape.kind == "all"}
    rows, tables = make_rows(shape, seed, device), make_tables(shape, seed, device)
    return Inputs(args=(logits, best_N, greedy_N, rows, tables), kwargs=flags)


def _cases() -> Sequence[Case]:
    return [
        Case(op="sample_draw", name=name, make=partial(_make, shape, name), facts={"vocab": shape.vocab})
        for name, shape in _SHAPES.items()
    ]


SAMPLE_DRAW = Op(
    name="sample_draw",
    reference=sample_draw,
    cases=_cases,
    tolerances=dict.fromkeys(("float32", "bfloat16", "float16"), Tolerance(0.0, 0.0)),  # ids
    facts={"vocab": "V", "dtype": "of the logits"},
)
