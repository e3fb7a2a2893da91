"""Measures products in candidate configurations on this GPU and writes the best as ``linear_table.json``.

``python tuning/linear.py --out DIRECTORY [--seconds 115] [--only qwen]``. Kernels are compiled by a pool of processes
first. Weights take turns among copies that together exceed the second-level cache; launches are timed inside a CUDA
graph, as they run in service. Each configuration's result is checked against torch before it is timed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch

from kestrel.ops import row_bucket
from kestrel.ops.linear import linear as reference
from kestrel.ops.norm_linear import norm_linear as norm_reference
from kestrel_kernels_cuda.linear_blas import product
from kestrel_kernels_cuda.linear_config import BLAS, Config, Product, is_gated
from kestrel_kernels_cuda.linear_launch import Norm, Operands, launch

ROWS = (1, 8, 16, 32, 64, 128, 256)
CACHE = 240e6  # bytes of weights to go through before one comes again
PROCESSORS = 132


@dataclass(frozen=True, slots=True)
class Shape:
    """A weight [n, k] as a model uses it; ``most``: the most rows worth measuring."""

    name: str
    n: int
    k: int
    epilogue: str | None = None
    norm: str | None = None
    bias: bool = False
    most: int = 256

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
    Shape("moondream 2 qkv", 6144, 2048, None, "layer", True, 64),
    Shape("moondream 2 proj", 2048, 2048, "residual", None, True, 64),
    Shape("moondream 2 fc1", 8192, 2048, "gelu_tanh", "layer", True, 64),
    Shape("moondream 2 fc2", 2048, 8192, "residual", None, True, 64),
    Shape("moondream 2 lm_head", 51200, 2048, None, "layer", True, 64),
    Shape("whisper turbo qkv", 3840, 1280, None, "layer", True, 64),
    Shape("whisper turbo out_proj", 1280, 1280, "residual", None, True, 64),
    Shape("whisper turbo fc1", 5120, 1280, "gelu", "layer", True, 64),
    Shape("whisper turbo fc2", 1280, 5120, "residual", None, True, 64),
    Shape("whisper turbo head", 51866, 1280, None, "layer", False, 64),
)


def gemvs(shape: Shape) -> Iterator[Config]:
    """Configurations for one row."""
    sizes = [bk for bk in (256, 512, 1024, 2048) if shape.k % bk == 0][-3:]
    for bk in sizes:
        for bn, warps in ((1, 4), (2, 4), (4, 4), (8, 4), (1, 2), (2, 2), (2, 8), (4, 8)):
            if (
                shape.outputs // bn >= 400
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


def candidates(shape: Shape, rows: int) -> list[Config]:
    """What may be the fastest for ``rows`` rows, torch aside."""
    if rows == 1:
        return list(gemvs(shape))
    heights = {8: (16,), 16: (16,), 32: (32,), 64: (64,), 128: (64, 128), 256: (128, 256)}[rows]
    return [config for bm in heights for config in gemms(shape, bm)]


def operands(
    shape: Shape, rows: int, device: str, *, fused: bool, weight: torch.Tensor | None = None
) -> Operands:
    """Random tensors, or ones of the meta device to compile with."""

    def draw(*size: int, scale: float = 1.0) -> torch.Tensor:
        if device == "meta":
            return torch.empty(size, dtype=torch.bfloat16, device="meta")
        return torch.randn(size, dtype=torch.bfloat16, device=device) * scale

    k = shape.k
    norm = Norm(kind=shape.norm, gain=draw(k), shift=draw(k) if shape.norm == "layer" else None, eps=1e-6) if (
        fused and shape.norm) else None  # fmt: skip
    return Operands(
        x=draw(rows, k),
        weight=draw(shape.n, k, scale=k**-0.5) if weight is None else weight,
        bias=draw(shape.n) if shape.bias else None,
        residual=draw(rows, shape.n) if shape.epilogue in ("residual", "accumulate") else None,
        epilogue=shape.epilogue,
        norm=norm,
    )


def compile_one(shape: Shape, rows: int, config: Config, fused: bool, overlaps: bool) -> None:
    """In a worker: leaves the kernel in Triton's cache."""
    launch(config, operands(shape, rows, "meta", fused=fused), overlaps=overlaps)[0].compile()


@dataclass(slots=True)
class Bench:
    """One shape on the GPU: its weights, and what was measured, in µs, by rows and configuration."""

    shape: Shape
    overlaps: bool
    weights: list[torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        shape = self.shape
        copies = min(64, max(2, int(CACHE / (shape.n * shape.k * 2)) + 1))
        self.weights = [
            torch.randn(shape.n, shape.k, dtype=torch.bfloat16, device="cuda") * shape.k**-0.5
            for _ in range(copies)
        ]

    def blas(self, rows: int) -> float:
        """µs by torch."""
        o = operands(self.shape, rows, "cuda", fused=False, weight=self.weights[0])
        return timed([lambda w=w: product(o.x, w, o.bias, o.epilogue, o.residual) for w in self.weights])

    def kernel(self, rows: int, config: Config, *, fused: bool, overlaps: bool) -> float | str:
        """µs, or why it cannot be used."""
        o = operands(self.shape, rows, "cuda", fused=fused, weight=self.weights[0])
        all_of_them = [launch(config, replace(o, weight=w), overlaps=overlaps) for w in self.weights]
        want = expected(o)
        try:
            all_of_them[0][0].run()
            torch.cuda.synchronize()
        except Exception as error:
            return f"{type(error).__name__}: {error}"[:200]
        if wrong := disagreement(all_of_them[0][1], want):
            return wrong
        return timed([started.run for started, _ in all_of_them])


def expected(o: Operands) -> torch.Tensor:
    """The output by the reference."""
    args = o.x, o.weight, o.bias, o.epilogue, None if o.residual is None else o.residual.clone()
    if o.norm is None:
        return reference(*args)
    n = o.norm
    return norm_reference(*args, kind=n.kind, gain=n.gain, shift=n.shift, eps=n.eps)


def disagreement(got: torch.Tensor, want: torch.Tensor) -> str:
    """By how much ``got`` is wrong; "" when it is right."""
    gap = float((got.float() - want.float()).abs().max() / want.float().abs().max())
    return f"wrong by {gap:.2g} of the largest output" if not gap < 0.03 else ""


def timed(calls: list) -> float:
    """µs of one call, the least of three runs of a graph of all ``calls``."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    turns = max(1, 16 // len(calls))
    with torch.cuda.graph(graph):
        for _ in range(turns):
            for call in calls:
                call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    best = float("inf")
    graph.replay()
    for _ in range(3):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) * 1000 / (turns * len(calls)))
    return best


def measure(bench: Bench, rows: int, ready: list[Config], lines: list[str]) -> list[tuple[float, Config]]:
    """Configurations by time, torch's among them."""
    shape, found = bench.shape, [(bench.blas(rows), BLAS)]
    for config in ready:
        took = bench.kernel(rows, config, fused=rows == 1, overlaps=bench.overlaps)
        lines.append(json.dumps({"shape": shape.name, "rows": rows, "config": asdict(config), "us": took}))
        if isinstance(took, float):
            found.append((took, config))
    return sorted(found, key=lambda pair: pair[0])


def main() -> None:
    """Compile on every core for about half of the time, measure what is ready for the rest, write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=115)
    parser.add_argument("--only", default="", help="shapes whose name contains this")
    parser.add_argument("--no-overlap", action="store_true", help="without programmatic dependent launch")
    wanted = parser.parse_args()
    began = time.monotonic()
    major, minor = torch.cuda.get_device_capability()
    overlaps = major >= 9 and not wanted.no_overlap
    shapes = [shape for shape in SHAPES if wanted.only in shape.name]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count() or 4, mp_context=context) as pool:
        jobs: dict[tuple[str, Config], Future[None]] = {}
        for shape in shapes:
            for rows in (r for r in ROWS if r <= shape.most):
                for config in candidates(shape, rows):
                    key = shape.name, config
                    if key not in jobs:
                        jobs[key] = pool.submit(compile_one, shape, rows, config, rows == 1, overlaps)
        wait(jobs.values(), timeout=0.55 * wanted.seconds)
        print(
            f"{sum(j.done() for j in jobs.values())} of {len(jobs)} compiled in {time.monotonic() - began:.0f} s"
        )
        for job in jobs.values():
            job.cancel()
        table, lines = run(shapes, jobs, overlaps, began + wanted.seconds)
    wanted.out.mkdir(parents=True, exist_ok=True)
    (wanted.out / "linear_measured.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    text = as_text(f"{major}{minor}", table)
    (wanted.out / "linear_table.json").write_text(text, encoding="utf-8")


def as_text(arch: str, table: dict[str, dict[str, dict]]) -> str:
    """The table as it is committed: a line for each configuration."""
    weights = [
        f'  "{weight}": {{\n'
        + ",\n".join(f'   "{rows}": {json.dumps(c)}' for rows, c in found.items())
        + "\n  }"
        for weight, found in table.items()
    ]
    return f'{{\n "{arch}": {{\n' + ",\n".join(weights) + "\n }\n}\n"


def run(
    shapes: list[Shape], jobs: dict, overlaps: bool, deadline: float
) -> tuple[dict[str, dict[str, dict]], list[str]]:
    """The table, and a line for each measurement."""
    table: dict[str, dict[str, dict]] = {}
    lines: list[str] = []
    for shape in shapes:
        if time.monotonic() > deadline:
            print(f"no time for {shape.name}")
            continue
        bench = Bench(shape, overlaps)
        ranked = {}
        for rows in (r for r in ROWS if r <= shape.most):
            keys = [(shape.name, config) for config in candidates(shape, rows)]
            ready = [key[1] for key in keys if jobs[key].done() and not jobs[key].cancelled()]
            ranked[rows] = measure(bench, rows, ready, lines)
        weight = Product.of(shape.n, shape.k, 1, shape.epilogue).key
        for rows, found in ranked.items():
            table.setdefault(weight, {})[str(row_bucket(rows))] = _fields(found[0][1])
            report(shape, rows, found)
    return table, lines


def report(shape: Shape, rows: int, found: list[tuple[float, Config]]) -> None:
    """Print the fastest of a shape, beside torch and the fastest kernel of ours."""
    best = found[0][0]
    blas = next(us for us, c in found if c.kernel == "blas")
    rate = shape.n * shape.k * 2 / 1e6
    ours = next((f"{us:.1f} {_told(c)}" for us, c in found if c.kernel != "blas"), "none")
    print(
        f"{shape.name:24} {rows:4}: {best:7.1f} us {rate / best:5.2f} TB/s, torch {blas:7.1f}, ours {ours}",
        flush=True,
    )


def _told(c: Config) -> str:
    ways = f"{' swap' if c.swap else ''}{' tma' if c.tma else ''}"
    return f"{c.bm}x{c.bn}x{c.bk} w{c.warps} st{c.stages} sp{c.split}{ways}"


def _fields(config: Config) -> dict[str, object]:
    plain = asdict(Config(kernel=config.kernel))
    return {"kernel": config.kernel} | {name: v for name, v in asdict(config).items() if plain[name] != v}


if __name__ == "__main__":
    main()
