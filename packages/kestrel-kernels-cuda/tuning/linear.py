"""Measures products in candidate configurations on this GPU and writes the best as ``linear_table.json``.

``python tuning/linear.py --out DIRECTORY [--seconds 115] [--only qwen] [--rows 16,64]``. What is measured replaces the
entries of the committed table; the rest of it stays. Kernels are compiled by a pool of processes first. Weights take
turns among copies that together exceed the second-level cache; launches are timed inside a CUDA graph, as they run in
service. Each configuration's result is checked against torch before it is timed. ``candidates.py`` says what is
tried, ``linear_chain.py`` measures products one after another as in a model.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, field, replace
from importlib.resources import files
from pathlib import Path

import torch
from candidates import SHAPES, Shape, candidates
from stopwatch import need_gpu

from kestrel.ops.linear import linear as reference
from kestrel.ops.norm_linear import norm_linear as norm_reference
from kestrel_kernels_cuda.linear_blas import product
from kestrel_kernels_cuda.linear_config import BLAS, Config, Product
from kestrel_kernels_cuda.linear_launch import Norm, Operands, launch

ROWS = (1, 8, 16, 32, 64, 128, 256)
CACHE = 200e6  # bytes of weights to go through before one comes again

Found = list[tuple[float, Config]]


def operands(
    shape: Shape, rows: int, device: str, *, fused: bool, weight: torch.Tensor | None = None
) -> Operands:
    """Random tensors, or ones of the meta device to compile with."""

    def draw(*size: int, scale: float = 1.0) -> torch.Tensor:
        if device == "meta":
            return torch.empty(size, dtype=torch.bfloat16, device="meta")
        return torch.randn(size, dtype=torch.bfloat16, device=device) * scale

    k = shape.k
    norm = None
    if fused and shape.norm:
        norm = Norm(kind=shape.norm, gain=draw(k), shift=draw(k) if shape.norm == "layer" else None, eps=1e-6)
    return Operands(
        x=draw(rows, k),
        weight=draw(shape.n, k, scale=k**-0.5) if weight is None else weight,
        bias=draw(shape.n) if shape.bias else None,
        residual=draw(rows, shape.n) if shape.epilogue in ("residual", "accumulate") else None,
        epilogue=shape.epilogue,
        norm=norm,
    )


def compile_one(shape: Shape, rows: int, config: Config, overlaps: bool) -> None:
    """In a worker: leaves the kernel in Triton's cache."""
    launch(config, operands(shape, rows, "meta", fused=rows == 1), overlaps=overlaps)[0].compile()


class Compilers:
    """A pool that compiles each kernel once; ``ready`` says which configurations were done in time."""

    def __init__(self, pool: ProcessPoolExecutor, overlaps: bool) -> None:
        self._pool, self._overlaps = pool, overlaps
        self._jobs: dict[tuple[str, Config], Future[None]] = {}

    def submit(self, shape: Shape, rows: int, configs: Iterable[Config]) -> None:
        """Start compiling what is not being compiled yet."""
        for config in configs:
            key = shape.name, config
            if key not in self._jobs:
                self._jobs[key] = self._pool.submit(compile_one, shape, rows, config, self._overlaps)

    def wait(self, seconds: float) -> str:
        """How many were done within so many seconds; the others are given up."""
        began = time.monotonic()
        wait(self._jobs.values(), timeout=seconds)
        done = sum(job.done() for job in self._jobs.values())
        for job in self._jobs.values():
            job.cancel()
        return f"{done} of {len(self._jobs)} compiled in {time.monotonic() - began:.0f} s"

    def ready(self, shape: Shape, config: Config) -> bool:
        """Whether ``config`` was compiled."""
        job = self._jobs.get((shape.name, config))
        return job is not None and job.done() and not job.cancelled()


@dataclass(slots=True)
class Bench:
    """One shape on the GPU: its weights, and what was measured, in µs, by rows and configuration."""

    shape: Shape
    overlaps: bool
    weights: list[torch.Tensor] = field(init=False)
    lines: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        shape = self.shape
        copies = min(48, max(2, int(CACHE / (shape.n * shape.k * 2)) + 1))
        self.weights = [
            torch.randn(shape.n, shape.k, dtype=torch.bfloat16, device="cuda") * shape.k**-0.5
            for _ in range(copies)
        ]

    def blas(self, rows: int) -> float:
        """µs by torch."""
        o = operands(self.shape, rows, "cuda", fused=False, weight=self.weights[0])
        return timed([lambda w=w: product(o.x, w, o.bias, o.epilogue, o.residual) for w in self.weights])

    def kernel(self, rows: int, config: Config) -> float | str:
        """µs, or why it cannot be used."""
        o = operands(self.shape, rows, "cuda", fused=rows == 1, weight=self.weights[0])
        launches = [launch(config, replace(o, weight=w), overlaps=self.overlaps) for w in self.weights]
        want = expected(o)
        try:
            launches[0][0].run()
            torch.cuda.synchronize()
        except Exception as error:
            return f"{type(error).__name__}: {error}"[:200]
        if wrong := disagreement(launches[0][1], want):
            return wrong
        return timed([started.run for started, _ in launches])

    def measure(self, rows: int, configs: Iterable[Config]) -> Found:
        """torch and the configurations by time."""
        found: Found = [(self.blas(rows), BLAS)]
        for config in configs:
            took = self.kernel(rows, config)
            line = {"shape": self.shape.name, "rows": rows, "config": fields(config), "us": took}
            self.lines.append(json.dumps(line))
            if isinstance(took, float):
                found.append((took, config))
        return sorted(found, key=lambda pair: pair[0])


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


def timed(calls: list[Callable[[], object]], rounds: int = 3) -> float:
    """µs of one call, the least of some runs of a graph of all ``calls``."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    turns = max(1, 12 // len(calls))
    with torch.cuda.graph(graph):
        for _ in range(turns):
            for call in calls:
                call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    best = float("inf")
    graph.replay()
    for _ in range(rounds):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) * 1000 / (turns * len(calls)))
    return best


def main() -> None:
    """Compile for about half of the time, measure what is ready for the rest, write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=115)
    parser.add_argument("--only", default="", help="shapes whose name contains one of these: qwen,head")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--no-overlap", action="store_true", help="without programmatic dependent launch")
    wanted = parser.parse_args()
    need_gpu()
    deadline = time.monotonic() + wanted.seconds
    major, minor = torch.cuda.get_device_capability()
    overlaps = major >= 9 and not wanted.no_overlap
    shapes = [shape for shape in SHAPES if any(part in shape.name for part in wanted.only.split(","))]
    rows_of = [int(rows) for rows in wanted.rows.split(",")]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count() or 4, mp_context=context) as pool:
        compilers = Compilers(pool, overlaps)
        for shape in shapes:
            for rows in rows_of:
                compilers.submit(shape, rows, candidates(shape, rows))
        print(compilers.wait(0.55 * wanted.seconds), flush=True)
        chosen, lines = run(shapes, rows_of, compilers, overlaps, deadline)
    wanted.out.mkdir(parents=True, exist_ok=True)
    (wanted.out / "linear_measured.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    text = as_text(merged(f"{major}{minor}", chosen))
    (wanted.out / "linear_table.json").write_text(text, encoding="utf-8")


def run(
    shapes: list[Shape], rows_of: list[int], compilers: Compilers, overlaps: bool, deadline: float
) -> tuple[dict[tuple[Product, int], Config], list[str]]:
    """The choice for each weight and number of rows, and a line for each measurement."""
    chosen: dict[tuple[Product, int], Config] = {}
    lines: list[str] = []
    for shape in shapes:
        if time.monotonic() > deadline:
            print(f"no time for {shape.name}")
            continue
        bench = Bench(shape, overlaps)
        for rows in rows_of:
            found = bench.measure(rows, [c for c in candidates(shape, rows) if compilers.ready(shape, c)])
            report(shape, rows, found)
            chosen[Product.of(shape.n, shape.k, rows, shape.epilogue), rows] = found[0][1]
        lines += bench.lines
    return chosen, lines


def report(shape: Shape, rows: int, found: Found) -> None:
    """Print the fastest three, and torch."""
    size = shape.n * shape.k * 2 / 1e6
    blas = next(us for us, config in found if config == BLAS)
    best = "; ".join(f"{us:.1f} {_told(config)}" for us, config in found[:3])
    print(
        f"{shape.name:24} {rows:4}: {size / found[0][0]:5.2f} TB/s, torch {blas:6.1f} us, best {best}",
        flush=True,
    )


def _told(c: Config) -> str:
    if c == BLAS:
        return "torch"
    ways = f"{' swap' if c.swap else ''}{' tma' if c.tma else ''}"
    return f"{c.kernel} {c.bm}x{c.bn}x{c.bk} w{c.warps} st{c.stages} sp{c.split}{ways}"


def fields(config: Config) -> dict[str, object]:
    """A configuration as the table has it."""
    plain = asdict(Config(kernel=config.kernel))
    return {"kernel": config.kernel} | {name: v for name, v in asdict(config).items() if plain[name] != v}


Table = dict[str, dict[str, dict[str, dict[str, object]]]]


def merged(arch: str, chosen: dict[tuple[Product, int], Config]) -> Table:
    """The committed table with what was measured."""
    text = files("kestrel_kernels_cuda").joinpath("linear_table.json").read_text(encoding="utf-8")
    table: Table = json.loads(text)
    for (weight, _), config in chosen.items():
        table.setdefault(arch, {}).setdefault(weight.key, {})[str(weight.rows)] = fields(config)
    return table


def as_text(table: Table) -> str:
    """The table as it is committed: a line for each configuration."""
    archs = []
    for arch, weights in table.items():
        blocks = [
            f'  "{weight}": {{\n'
            + ",\n".join(f'   "{rows}": {json.dumps(found[rows])}' for rows in sorted(found, key=int))
            + "\n  }"
            for weight, found in weights.items()
        ]
        archs.append(f' "{arch}": {{\n' + ",\n".join(blocks) + "\n }")
    return "{\n" + ",\n".join(archs) + "\n}\n"


if __name__ == "__main__":
    main()
