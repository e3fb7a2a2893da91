"""Which blocks make grouped_experts fastest, at Qwen3.5-35B-A3B's sizes (hidden 2048, 256 experts of width 512, 8 of a
token), on one GPU: the entries of ``kestrel_kernels_cuda.experts.TABLE``.

``python packages/kestrel-kernels-cuda/tuning/experts.py [--rows 1024,16384]`` prints microseconds of all launches
together for each candidate, best first.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch
from stopwatch import microseconds, need_gpu

from kestrel_kernels_cuda import experts
from kestrel_kernels_cuda.experts import Tiling, Tilings

EXPERTS, TOP_K, DIM, WIDTH = (experts.QWEN.get(fact) for fact in ("experts", "top_k", "hidden", "width"))
CALLS = 4


def candidates(rows: int) -> Iterator[Tilings]:
    """The entry that ``rows`` fall into, and others that change one product."""
    base = experts.tilings_of(rows * TOP_K, EXPERTS, torch.bfloat16)
    base = replace(base, pairs_each=float("inf"))
    yield base
    if base.up.m < 64:
        shapes = [(n, k, 4, s) for n in (32, 64) for k in (128, 256) for s in (3, 5)]
    else:
        shapes = [(n, 64, w, s) for n in (64, 128, 256) for w in (4, 8) for s in (3, 4)]
    for n, k, warps, stages in shapes:
        m = base.up.m
        for columns, name in ((2 * n, "up"), (n, "down")):
            shared = (m + columns) * k * 2 * stages
            sums = m * columns / (warps * 32)  # float32 registers of a thread
            if shared > 220_000 or sums > 160 or sums < 4:
                continue
            tiling = Tiling(m=m, n=n, k=k, group=base.up.group, num_warps=warps, num_stages=stages)
            yield replace(base, up=tiling) if name == "up" else replace(base, down=tiling)


def main() -> None:
    """Compile every candidate on every core, then measure each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="64,1024,16384")
    rows_of = [int(rows) for rows in parser.parse_args().rows.split(",")]
    need_gpu()

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.float32).to(torch.bfloat16)

    gate_up, down = numbers(EXPERTS, 2 * WIDTH, DIM) * 0.02, numbers(EXPERTS, DIM, WIDTH) * 0.02
    table = experts.TABLE
    for rows in rows_of:
        experts.TABLE = table
        entries = list(candidates(rows))
        jobs = []
        for entry in entries:
            experts.TABLE = (entry,)
            jobs += list(experts.IMPLS["grouped_experts"].warm(experts.QWEN, (rows,)))
        with ThreadPoolExecutor(14) as pool:
            list(pool.map(lambda job: job(), jobs))
        x, weights = numbers(rows, DIM), numbers(rows, TOP_K).abs()
        chosen = [torch.rand(rows, EXPERTS, device="cuda").topk(TOP_K).indices for _ in range(CALLS)]
        found = []
        for entry in entries:
            experts.TABLE = (entry,)
            taken = microseconds(
                lambda i, c=chosen, x=x, w=weights: experts.grouped_experts(x, w, c[i], gate_up, down), CALLS
            )
            found.append((taken, entry))
        print(f"{rows} rows, as it is: {found[0][0]:.1f} us")
        for taken, entry in sorted(found, key=lambda pair: pair[0])[:12]:
            print(f"  {taken:9.1f} us  up {entry.up}  down {entry.down}", flush=True)


if __name__ == "__main__":
    main()
