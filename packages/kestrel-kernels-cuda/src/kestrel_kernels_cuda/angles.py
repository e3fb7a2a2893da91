"""rope_angles: one launch for all cosines and sines of a forward.

Letters: P position rows, T tokens, R rotated dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
import triton
import triton.language as tl

from kestrel.spi import Impl, OpQuery, Yes
from kestrel_kernels_cuda.compiling import CompileCase
from kestrel_kernels_cuda.launch import Launch, compile_case_of, power_of_two
from kestrel_kernels_cuda.overlap import overlap, start_next, wait_for_previous

__all__ = ["IMPLS", "compile_cases", "rope_angles"]

TILE = 512  # numbers of one program


@triton.jit
def _cosine_and_sine(angle):
    """(cosine, sine) of a float32 angle, to float32 accuracy, up to angles of 2^24.

    Triton's own call a routine that spills. The angle is reduced to a quarter turn around zero, where a Taylor series
    of few terms is exact enough, all in float64.
    """
    wide = angle.to(tl.float64)
    quarter = tl.floor(wide * 0.6366197723675814 + 0.5)
    r = wide - quarter * 1.5707963267948966
    s = r * r
    even = 1.0 - s * (0.5 - s * (1 / 24 - s * (1 / 720 - s * (1 / 40320 - s * (1 / 3628800)))))
    odd = r * (1.0 - s * (1 / 6 - s * (1 / 120 - s * (1 / 5040 - s * (1 / 362880)))))
    turn = quarter.to(tl.int64) & 3
    cosine = tl.where(turn == 0, even, tl.where(turn == 1, -odd, tl.where(turn == 2, -even, odd)))
    sine = tl.where(turn == 0, odd, tl.where(turn == 1, even, tl.where(turn == 2, -odd, -even)))
    return cosine.to(tl.float32), sine.to(tl.float32)


@triton.jit(
    do_not_specialize=["tokens", "stride_p", "stride_t"],
    do_not_specialize_on_alignment=["positions"],  # they lie somewhere in a step's inputs
)
def rope_angles_kernel(
    positions, freq, rows, cos, sin, tokens, stride_p, stride_t,
    ROTATED: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``cos`` and ``sin`` [T, R]; ``rows`` may be None."""
    start_next(PDL)
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None]
    dim = tl.arange(0, BLOCK)[None, :]
    inside = (token < tokens) & (dim < ROTATED)
    place = token * stride_t + 0 * dim
    if rows is not None:
        place += tl.load(rows + dim, mask=dim < ROTATED, other=0) * stride_p
    position = tl.load(positions + place, mask=inside, other=0).to(tl.float32)
    c, s = _cosine_and_sine(position * tl.load(freq + dim, mask=dim < ROTATED, other=0.0))
    tl.store(cos + token * ROTATED + dim, c, mask=inside)
    tl.store(sin + token * ROTATED + dim, s, mask=inside)


def _launch(
    positions_PT: torch.Tensor, freq_R: torch.Tensor, rows_R: torch.Tensor | None
) -> tuple[Launch, torch.Tensor, torch.Tensor]:
    tokens, rotated = positions_PT.shape[1], freq_R.shape[0]
    block = power_of_two(rotated)
    each = max(1, TILE // block)
    cos = torch.empty((tokens, rotated), dtype=torch.float32, device=positions_PT.device)
    sin = torch.empty_like(cos)
    launch = Launch(
        rope_angles_kernel,
        (triton.cdiv(tokens, each),),
        (positions_PT, freq_R, rows_R, cos, sin, tokens, *positions_PT.stride()),
        {"ROTATED": rotated, "BLOCK": block, "TOKENS": each, "num_warps": 4, **overlap(cos.device)},
    )
    return launch, cos, sin


def rope_angles(
    positions_PT: torch.Tensor, freq_R: torch.Tensor, rows_R: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``kestrel.ops.rope_angles``."""
    launch, cos, sin = _launch(positions_PT, freq_R, rows_R)
    launch.run()
    return cos, sin


def _supports(query: OpQuery) -> Yes:
    return Yes()


def _meta(rotated: int, choices: int) -> Launch:
    positions = torch.empty((choices, 2), dtype=torch.int64, device="meta")
    freq = torch.empty(rotated, dtype=torch.float32, device="meta")
    rows = torch.empty(rotated, dtype=torch.int64, device="meta") if choices > 1 else None
    return _launch(positions, freq, rows)[0]


def _warm(query: OpQuery, row_counts: Sequence[int]) -> Iterable[Callable[[], object]]:
    return (_meta(query.get("rot_dim"), query.get("rows")).compile,)


IMPLS: Mapping[str, Impl] = {"rope_angles": Impl(supports=_supports, fn=rope_angles, warm=_warm)}


def compile_cases() -> Iterator[CompileCase]:
    """Qwen's three rows."""
    yield compile_case_of("rope_angles", _meta(64, 3))
