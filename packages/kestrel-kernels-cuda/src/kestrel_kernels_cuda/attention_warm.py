"""Launches without tensors: what to compile while a model loads, and what the compile test looks at."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from kestrel.spi.batch import Limits
from kestrel_kernels_cuda.compiling import CompileCase
from kestrel_kernels_cuda.launch import Launch, compile_case_of, distinct

__all__ = ["DECODES", "META", "any_limits", "cases_of"]

META = torch.device("meta")

DECODES = (
    *((rows, 64, 64, 4096) for rows in (1, 2, 4, 8)),
    (1, 1, 1, 4096), (512, 1, 2, 4096), (512, 1, 1, 4096), (512, 1, 1, 128),
)  # fmt: skip
"""Rows, wanted blocks of a row, splits and longest context of decode launches: few rows whose blocks are joined, or
that have one; many rows, of which long ones may have several, or none; many short ones."""


def any_limits(rows: int, tokens: int, query_len: int, context: int) -> Limits:
    """Ceilings of a launch that is only compiled."""
    return Limits(max_rows=rows, max_tokens=tokens, max_query_len=query_len, max_context_len=context)


def cases_of(name: str, launches: Iterable[Launch], archs: tuple[int, ...]) -> Iterator[CompileCase]:
    """The compile cases of launches."""
    for launch in distinct(launches):
        yield compile_case_of(f"{name} {launch.kernel.__name__}", launch, archs)
