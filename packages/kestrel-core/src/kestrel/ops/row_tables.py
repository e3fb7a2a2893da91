"""row_inputs, row_results: the first and the last thing that a decode step does with what the device keeps per row.

Shapes: N rows of a step, R rows of the tables, M numbers per row that the host wrote.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from kestrel.ops.op import Case, Inputs, Op, Tolerance
from kestrel.ops.random import normal

__all__ = ["ROW_INPUTS", "ROW_RESULTS", "row_inputs", "row_results"]


def row_inputs(
    rows_N: torch.Tensor,
    last_ids_R: torch.Tensor,
    live_R: torch.Tensor,
    block_MN: torch.Tensor,
    ids_N: torch.Tensor,
    shown_MN: torch.Tensor,
) -> None:
    """In place: ``ids`` become the ``last_ids`` of ``rows``; ``shown`` becomes ``block`` where a row is alive, else 0.

    All int64; ``live`` is 1 or 0.
    """
    torch.index_select(last_ids_R, 0, rows_N, out=ids_N)
    torch.mul(block_MN, live_R.index_select(0, rows_N), out=shown_MN)


def row_results(
    ids_N: torch.Tensor,
    stopped_N: torch.Tensor,
    status_N: torch.Tensor,
    rows_N: torch.Tensor,
    last_ids_R: torch.Tensor,
    live_R: torch.Tensor | None,
) -> torch.Tensor:
    """The bytes of ``ids`` int64, ``stopped`` bool and ``status`` uint8 side by side: uint8 [10 · N].

    In place: ``last_ids`` of ``rows`` become ``ids``; ``live`` (int64, None: nobody asks) stays 1 where it is and the
    row neither stopped nor has a status. Rows are distinct but for a last one, the scratch row, which is never alive.
    """
    last_ids_R.index_copy_(0, rows_N, ids_N)
    if live_R is not None:
        alive_N = torch.add(status_N, stopped_N).eq_(0)
        live_R.index_copy_(0, rows_N, live_R.index_select(0, rows_N).mul_(alive_N))
    return torch.cat([part.view(torch.uint8) for part in (ids_N, stopped_N, status_N)])


_ROWS = {"smallest": (1, 1, 1), "odd": (7, 9, 3), "empty": (0, 3, 2), "many": (300, 301, 4)}
"""Rows of the step, of the tables, numbers per row."""


def _tables(seed: int, shape: tuple[int, int, int], device: torch.device) -> list[torch.Tensor]:
    """Distinct rows, last ids above 2^32, and life; where there is room, the last two columns are the scratch row."""
    count, rows, _ = shape
    draws = normal(seed, (rows,), device, torch.float32)
    live = (draws > -0.5).long()
    chosen = draws[: rows - (count > 2)].argsort()[:count].contiguous()
    if count > 2:
        chosen[-2:] = rows - 1
        live[rows - 1] = 0
    return [chosen, draws.mul(2**40).long(), live]


def _make_inputs(shape: tuple[int, int, int], seed: int, device: torch.device, dtype: torch.dtype) -> Inputs:
    rows_N, last_ids_R, live_R = _tables(seed, shape, device)
    block_MN = normal(seed + 1, (shape[2], shape[0]), device, torch.float32).mul(2**40).long()
    ids_N, shown_MN = torch.zeros_like(rows_N), torch.zeros_like(block_MN)
    return Inputs(args=(rows_N, last_ids_R, live_R, block_MN, ids_N, shown_MN), written=(ids_N, shown_MN))


def _make_results(
    shape: tuple[int, int, int], tracks: bool, seed: int, device: torch.device, dtype: torch.dtype
) -> Inputs:
    rows_N, last_ids_R, live_R = _tables(seed, shape, device)
    draws_N = normal(seed + 1, (shape[0],), device, torch.float32)
    ids_N = draws_N.mul(2**40).long()
    ids_N[-2:] = 5  # the same from both columns of the scratch row, whichever writes last
    args = (ids_N, draws_N > 0.8, (draws_N < -0.8).to(torch.uint8), rows_N, last_ids_R)
    return Inputs(args=(*args, live_R if tracks else None), written=(last_ids_R, live_R))


def _input_cases() -> Sequence[Case]:
    return [
        Case(op="row_inputs", name=name, make=partial(_make_inputs, shape)) for name, shape in _ROWS.items()
    ]


def _result_cases() -> Sequence[Case]:
    return [
        Case(
            op="row_results",
            name=name if tracks else f"{name}, one step at a time",
            make=partial(_make_results, shape, tracks),
        )
        for name, shape in _ROWS.items()
        for tracks in (True, False)
    ]


_EXACT = {"float32": Tolerance(0.0, 0.0)}  # whole numbers, whatever the model computes in

ROW_INPUTS = Op(name="row_inputs", reference=row_inputs, cases=_input_cases, tolerances=_EXACT)
ROW_RESULTS = Op(name="row_results", reference=row_results, cases=_result_cases, tolerances=_EXACT)
