"""What ``linear.py`` beside this measures: weights as models use them, and configurations that may be the fastest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from kestrel_kernels_cuda.linear_config import Config, Product, choose, is_gated

__all__ = ["PROCESSORS", "SHAPES", "Shape", "candidates", "variants"]

PROCESSORS = 132
SHARED = 232_448 - 4096  # bytes of a block's tiles
WIDEST = 288  # outputs of a band, both halves
ARCH = 90


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
    """What may be the fastest for ``rows`` rows, torch aside: what is chosen now, and bands or, for one row, gemvs."""
    if rows == 1:
        return list(gemvs(shape))
    now = choose(Product.of(shape.n, shape.k, rows, shape.epilogue), ARCH)
    kept = [] if now.kernel in ("blas", "band") else [now]
    heights = (16, 64) if rows <= 16 else (64,)
    return kept + [config for bm in heights for config in bands(shape, bm)]


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


def bands(shape: Shape, bm: int) -> Iterator[Config]:
    """Bands that divide the weight evenly among programs, one or two to a processor."""
    halves = 2 if is_gated(shape.epilogue) else 1
    for programs in (1, 2):
        for width, split in _even(shape, bm, programs, (WIDEST if bm >= 64 else 160) // halves // programs)[
            : 3 - programs
        ]:
            bn = 1 << (width.bit_length() - 1)
            for bk, room in ((64, 1), (128, 1), (64, 2), (128, 2)):
                stage = (bm + halves * width) * bk * 2
                stages = min(10, SHARED // max(room, programs) // stage)
                if stages >= 3 and shape.k % bk == 0 and room >= programs:
                    yield Config(
                        kernel="band", bm=bm, bn=bn, rest=width - bn, bk=bk, stages=stages, split=split,
                        ahead=512 // bk, late=True,
                    )  # fmt: skip


def _even(shape: Shape, bm: int, programs: int, widest: int) -> list[tuple[int, int]]:
    """Widths and numbers of shares, those that leave the fewest programs idle first. The wide matrix instructions
    take no tile of 8 outputs."""
    odd = bm < 64 or is_gated(shape.epilogue)
    widths = [w for w in _WIDTHS if odd or w % 16 == 0]
    found: dict[tuple[int, int], float] = {}
    for split in range(1, 2 if is_gated(shape.epilogue) else 9):
        if split > 1 and shape.k // split < 384:
            continue
        for rounds in range(1, 25 if split == 1 else 2):
            slots = programs * PROCESSORS * rounds
            need = -(-shape.outputs // (slots // split))
            width = next((w for w in widths if w >= need), widest + 1)
            if width <= widest:
                idle = 1 - shape.outputs * split / (width * slots)
                reads = 2.5 / width  # x is read once more by each band
                found.setdefault((width, split), idle + 0.012 * split + reads)
    return sorted(found, key=lambda key: found[key])


_WIDTHS = sorted(
    {1 << a for a in range(4, 9)} | {(1 << a) + (1 << b) for a in range(4, 9) for b in range(3, a)}
)


def variants(shape: Shape, best: list[Config]) -> list[Config]:
    """The fastest bands with other ways of overlapping, and with the norm before them."""
    found: list[Config] = []
    for config in best:
        if config.kernel != "band":
            continue
        steps = 1024 // config.bk
        tried = [replace(config, ahead=0), replace(config, late=False), replace(config, ahead=steps)]
        tried += [replace(config, ahead=0, late=False), replace(config, warps=8)]
        found += [c for c in tried if c not in found]
        if shape.norm in ("rms", "rms_plus_one") and config.split == 1:
            found += [
                replace(config, norm=True, stages=max(3, s)) for s in (config.stages - 1, config.stages - 2)
            ]
    return found
