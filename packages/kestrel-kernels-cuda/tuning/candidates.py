"""What ``linear.py`` beside this measures: weights as models use them, and configurations that may be the fastest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kestrel_kernels_cuda.linear_config import Config, is_gated

__all__ = ["SHAPES", "Shape", "candidates"]

PROCESSORS = 132
SHARED = 231_000  # bytes that the programs of a processor share on sm_90


@dataclass(frozen=True, slots=True)
class Shape:
    """A weight [n, k] as a model uses it."""

    name: str
    n: int
    k: int
    epilogue: str | None = None
    norm: str | None = None
    bias: bool = False

    @property
    def outputs(self) -> int:
        """Columns of the output: half of the weight's rows where they are gated."""
        return self.n // 2 if is_gated(self.epilogue) else self.n


SHAPES = (
    Shape("qwen 4b gate_up", 18432, 2560, "silu_mul", "rms_plus_one"),
    Shape("qwen 4b down", 2560, 9216, "accumulate"),
    Shape("qwen 4b in_proj", 12352, 2560, None, "rms_plus_one"),
    Shape("qwen 4b out_proj", 2560, 4096, "accumulate"),
    Shape("qwen 4b qkv", 10240, 2560, None, "rms_plus_one"),
    Shape("qwen 4b lm_head", 248320, 2560, None, "rms_plus_one"),
    Shape("whisper turbo qkv", 3840, 1280, None, "layer", True),
    Shape("whisper turbo out_proj", 1280, 1280, "residual", None, True),
    Shape("whisper turbo fc1", 5120, 1280, "gelu", "layer", True),
    Shape("whisper turbo fc2", 1280, 5120, "residual", None, True),
    Shape("whisper turbo head", 51866, 1280, None, "layer", False),
    Shape("moondream 2 qkv", 6144, 2048, None, "layer", True),
    Shape("moondream 2 proj", 2048, 2048, "residual", None, True),
    Shape("moondream 2 fc1", 8192, 2048, "gelu_tanh", "layer", True),
    Shape("moondream 2 fc2", 2048, 8192, "residual", None, True),
    Shape("moondream 2 lm_head", 51200, 2048, None, "layer", True),
)


def candidates(shape: Shape, rows: int) -> list[Config]:
    """What may be the fastest for ``rows`` rows, torch aside."""
    if rows == 1:
        return list(gemvs(shape))
    streamed = list(streams(shape, rows)) if rows <= 64 else []
    heights = {8: (16,), 16: (16,), 32: (32,), 64: (64,), 128: (64, 128), 256: (128, 256)}[rows]
    return streamed + [config for bm in heights for config in gemms(shape, bm)]


def streams(shape: Shape, bm: int) -> Iterator[Config]:
    """Programs that stream the weight, at least two of which fit on a processor, few enough to run at once with those
    of the product after."""
    halves = 2 if is_gated(shape.epilogue) else 1
    for bn, bk in ((64, 128), (64, 64), (128, 64), (128, 128)):
        tiles, stage = -(-shape.outputs // bn), (halves * bn + bm) * bk * 2 + 8
        for split in (1,) if halves == 2 or tiles >= 0.7 * PROCESSORS else (2, 3, 4, 6, 8):
            if shape.k % bk or not 0.5 * PROCESSORS <= tiles * split <= 1.5 * PROCESSORS:
                continue
            for room in (SHARED // 2, SHARED // 3):
                stages = min(12, room // stage)
                if stages > 1:
                    yield Config(kernel="stream", bm=bm, bn=bn, bk=bk, stages=stages, split=split)


def gemvs(shape: Shape) -> Iterator[Config]:
    """Programs of a few rows of the weight, held in registers."""
    for bk in (256, 512, 1024, 2048):
        for bn, warps in ((1, 4), (2, 4), (4, 4), (8, 4), (1, 2), (2, 2), (2, 8), (4, 8)):
            if (
                shape.outputs // bn >= PROCESSORS
                and -(-shape.k // bk) * bk <= 1.25 * shape.k
                and 8 <= bn * bk // (32 * warps) <= 64
                and bn * shape.k // warps <= 10240 // (1 + is_gated(shape.epilogue))
            ):
                yield Config(kernel="gemv", bn=bn, bk=bk, warps=warps)


TILES = {
    # bm: (bn, bk, stages, warps, swap, tma); a gated product has two tiles of the weight, so half of bn
    16: ((64, 128, 6, 4, 1, 0), (64, 128, 5, 4, 1, 1), (64, 128, 9, 4, 1, 1), (64, 256, 4, 4, 1, 1),
         (128, 128, 5, 4, 1, 1), (16, 256, 4, 4, 0, 0), (32, 256, 4, 4, 0, 0), (32, 256, 5, 4, 0, 1),
         (32, 256, 8, 4, 0, 1), (16, 512, 4, 4, 0, 1)),
    32: ((64, 128, 5, 4, 1, 1), (64, 128, 8, 4, 1, 1), (128, 64, 9, 4, 1, 1), (128, 128, 5, 4, 1, 1)),
    64: ((128, 64, 4, 4, 1, 1), (128, 64, 8, 4, 1, 1), (128, 128, 4, 8, 1, 1), (64, 128, 3, 4, 1, 1),
         (64, 128, 6, 4, 1, 1), (128, 64, 8, 8, 1, 1), (64, 128, 6, 4, 0, 1), (256, 64, 5, 8, 1, 1)),
    128: ((128, 64, 6, 8, 1, 1), (128, 64, 6, 8, 0, 1), (256, 64, 4, 8, 1, 1)),
    256: ((128, 64, 4, 8, 1, 1), (64, 64, 5, 8, 1, 1)),
}  # fmt: skip


def gemms(shape: Shape, bm: int) -> Iterator[Config]:
    """Configurations of tiles ``bm`` rows high, split so that the processors have one or two each."""
    for bn, bk, stages, warps, swap, tma in TILES[bm]:
        bn = max(16, bn // 2) if is_gated(shape.epilogue) and bn > 32 else bn
        if shape.k % bk or (swap and bn < 64 and not is_gated(shape.epilogue)):
            continue
        tiles, steps = -(-shape.outputs // bn), shape.k // bk
        splits = [s for s in range(1, 13) if steps % s == 0 and (s == 1 or tiles * s <= 2.2 * PROCESSORS)]
        enough = [s for s in splits if tiles * s >= 0.7 * PROCESSORS] or splits[-1:]
        for split in enough[:2]:
            yield Config(
                kernel="gemm",
                bm=bm,
                bn=bn,
                bk=bk,
                stages=stages,
                warps=warps,
                split=split,
                swap=bool(swap),
                tma=bool(tma),
            )
