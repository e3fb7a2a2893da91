"""resize_crops: both passes of a resize in one launch, no picture in between.

A program makes a tile of one crop. It runs down the rows of the picture that the tile needs; of each it makes the
tile's columns, rounds them to bytes, and adds them to the outputs that they count for.

Source: the integer arithmetic of Pillow's ``Image.resize``, see ``kestrel.ops.resampling``.
Letters: N bytes, M crops, F fields, S outputs of all tables, K taps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
import triton
import triton.language as tl

from kestrel.ops.resampling import CROP_FIELDS, PRECISION
from kestrel.spi import Impl, OpQuery, Yes
from kestrel_kernels_cuda.compiling import CompileCase
from kestrel_kernels_cuda.launch import Launch, compile_case_of

__all__ = ["IMPLS", "compile_cases", "resize_crops"]

ROWS = 16  # a tile: rows, and bytes of a row
BYTES = 128
TAPS = 8  # taps of a column read at a time


@triton.jit
def _byte(total, BITS: tl.constexpr):
    return tl.minimum(tl.maximum(total >> BITS, 0), 255)


@triton.jit(do_not_specialize=["outputs"])
def resize_crops_kernel(
    pixels, crops, starts, weights, out, outputs,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, FIELDS: tl.constexpr, BITS: tl.constexpr,
    ROWS: tl.constexpr, BYTES: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """Programs (crop, block of rows, block of a row's bytes). ``outputs``: S."""
    crop = tl.program_id(0).to(tl.int64)
    fields = crops + crop * FIELDS
    offset, height, width = tl.load(fields), tl.load(fields + 1), tl.load(fields + 2)
    first_row, first_column = tl.load(fields + 3), tl.load(fields + 4)
    row_taps, column_taps = tl.load(fields + 5).to(tl.int32), tl.load(fields + 6).to(tl.int32)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    place = tl.program_id(2) * BYTES + tl.arange(0, BYTES)
    inside = place < WIDTH * 3
    column = first_column + place // 3
    x = tl.load(starts + column, mask=inside, other=0)
    y = tl.load(starts + first_row + row, mask=row < HEIGHT, other=0)
    top = tl.load(starts + first_row + tl.program_id(1) * ROWS)
    last = tl.minimum(tl.program_id(1) * ROWS + ROWS, HEIGHT) - 1
    end = tl.minimum(tl.load(starts + first_row + last) + row_taps, height.to(tl.int32))
    tap = tl.arange(0, TAPS)[:, None]
    total = tl.full([ROWS, BYTES], 1 << (BITS - 1), tl.int32)
    for line in range(top, end):
        source = pixels + offset + width * 3 * line + (place % 3)[None, :]
        made = tl.full([BYTES], 1 << (BITS - 1), tl.int32)
        for first in range(0, column_taps, TAPS):
            held = inside[None, :] & (first + tap < column_taps)
            at = tl.minimum(x[None, :] + first + tap, width.to(tl.int32) - 1)
            value = tl.load(source + at * 3, mask=held, other=0).to(tl.int32)
            weight = tl.load(weights + (first + tap) * outputs + column[None, :], mask=held, other=0)
            made += tl.sum(value * weight, axis=0)
        nth = line - y
        counts = (row < HEIGHT) & (nth >= 0) & (nth < row_taps)
        share = tl.load(weights + nth * outputs + first_row + row, mask=counts, other=0)
        total += share[:, None] * _byte(made, BITS)[None, :]
    target = out + (crop * HEIGHT + row[:, None]) * (WIDTH * 3) + place[None, :]
    tl.store(target, _byte(total, BITS).to(tl.uint8), mask=(row[:, None] < HEIGHT) & inside[None, :])


def _launch(
    pixels_N: torch.Tensor,
    crops_MF: torch.Tensor,
    starts_S: torch.Tensor,
    weights_KS: torch.Tensor,
    size: tuple[int, int],
) -> tuple[Launch, torch.Tensor]:
    height, width = size
    assert crops_MF.shape[1] == len(CROP_FIELDS), "crops of other fields"
    assert pixels_N.is_contiguous(), "a picture's bytes are not adjacent"
    assert crops_MF.is_contiguous() and weights_KS.is_contiguous() and starts_S.is_contiguous()  # noqa: PT018
    out = torch.empty((crops_MF.shape[0], height, width, 3), dtype=torch.uint8, device=pixels_N.device)
    launch = Launch(
        resize_crops_kernel,
        (crops_MF.shape[0], triton.cdiv(height, ROWS), triton.cdiv(width * 3, BYTES)),
        (pixels_N, crops_MF, starts_S, weights_KS, out, weights_KS.shape[1]),
        {
            "HEIGHT": height, "WIDTH": width, "FIELDS": len(CROP_FIELDS), "BITS": PRECISION,
            "ROWS": ROWS, "BYTES": BYTES, "TAPS": TAPS, "num_warps": 4,
        },
    )  # fmt: skip
    return launch, out


def resize_crops(
    pixels_N: torch.Tensor,
    crops_MF: torch.Tensor,
    starts_S: torch.Tensor,
    weights_KS: torch.Tensor,
    size: tuple[int, int],
) -> torch.Tensor:
    """As ``kestrel.ops.resize_crops``."""
    launch, out = _launch(pixels_N, crops_MF, starts_S, weights_KS, size)
    launch.run()
    return out


def _supports(query: OpQuery) -> Yes:
    return Yes()


def _meta(height: int, width: int) -> Launch:
    shapes = (
        ((4,), torch.uint8),
        ((2, len(CROP_FIELDS)), torch.int64),
        ((4,), torch.int32),
        ((2, 4), torch.int32),
    )
    tensors = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in shapes]
    return _launch(tensors[0], tensors[1], tensors[2], tensors[3], (height, width))[0]


def _warm(query: OpQuery, row_counts: Sequence[int]) -> Iterable[Callable[[], object]]:
    """One job per query that says the crops' size."""
    if query.get("height") is None or query.get("width") is None:
        return ()
    return (_meta(query.get("height"), query.get("width")).compile,)


IMPLS: Mapping[str, Impl] = {"resize_crops": Impl(supports=_supports, fn=resize_crops, warm=_warm)}


def compile_cases() -> Iterator[CompileCase]:
    """Moondream's crops."""
    yield compile_case_of("resize_crops", _meta(378, 378))
