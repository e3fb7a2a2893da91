"""sample_argmax: the largest logit of each chunk, then of each row.

Shapes: N rows, V vocabulary, C chunks of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import triton
import triton.language as tl

from kestrel.spi import Impl, OpQuery
from kestrel_kernels_cuda.compiling import CompileCase
from kestrel_kernels_cuda.launch import Launch, dtype_of, jobs_of
from kestrel_kernels_cuda.overlap import start_next, wait_for_previous
from kestrel_kernels_cuda.sampling_parts import (
    CHUNK,
    best_of,
    cases_of,
    chained,
    chunks_of,
    joined,
    rows_of,
    supports,
)

__all__ = ["IMPLS", "compile_cases", "sample_argmax"]


@triton.jit
def argmax_kernel(logits, parts, stride_n, vocab, CHUNK: tl.constexpr, PDL: tl.constexpr):
    """The packed largest logit of each chunk of each row."""
    start_next(PDL)
    wait_for_previous(PDL)
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    place = chunk * CHUNK + tl.arange(0, CHUNK)
    is_in = place < vocab
    x = tl.load(logits + row * stride_n + place, mask=is_in, other=0.0).to(tl.float32)
    tl.store(parts + row * tl.num_programs(0) + chunk, best_of(x, place, is_in))


def _launches(logits_NV: torch.Tensor) -> tuple[tuple[torch.Tensor, torch.Tensor], list[Launch]]:
    logits_NV = rows_of(logits_NV)
    num_rows, vocab = logits_NV.shape
    parts_NC = torch.empty(num_rows, chunks_of(vocab), dtype=torch.int64, device=logits_NV.device)
    ids_N, best_N, join = joined(parts_NC, vocab)
    args = (logits_NV, parts_NC, logits_NV.stride(0), vocab)
    first = Launch(argmax_kernel, (chunks_of(vocab), num_rows), args, {"CHUNK": CHUNK})
    return (ids_N, best_N), chained([first, join], logits_NV.device)


def sample_argmax(logits_NV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``kestrel.ops.sample_argmax``."""
    out, launches = _launches(logits_NV)
    for launch in launches:
        launch.run()
    return out


def _planned(query: OpQuery) -> list[Launch]:
    return _launches(torch.empty((2, query.get("vocab")), dtype=dtype_of(query), device="meta"))[1]


def _warm(query: OpQuery, row_counts: Sequence[int]) -> Iterable[Callable[[], object]]:
    return jobs_of(_planned(query))


IMPLS = {"sample_argmax": Impl(supports=supports, fn=sample_argmax, warm=_warm)}


def compile_cases() -> Iterator[CompileCase]:
    """Qwen 3.5's vocabulary."""
    yield from cases_of(
        "sample_argmax", _planned(OpQuery.of("sample_argmax", vocab=248_320, dtype="bfloat16"))
    )
