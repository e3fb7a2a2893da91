"""Measures the products of a layer one after another, as a model runs them, by torch and as the table has them.

``python tuning/linear_chain.py [--table FILE]``. What products cost by themselves hides what they cost each other: the
start of each, what it reads ahead meanwhile, the norm and the gate between. Prints µs of a layer's in_proj, out_proj,
norm, gate_up and down of Qwen3.5-4B, and of Whisper's and Moondream's layers, by rows.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from candidates import SHAPES, Shape
from linear import operands, timed
from stopwatch import need_gpu

from kestrel_kernels_cuda.linear_blas import product
from kestrel_kernels_cuda.linear_config import BLAS, Config, Product, choose
from kestrel_kernels_cuda.linear_launch import Norm, launch
from kestrel_kernels_cuda.norms import IMPLS as NORMS

LAYERS = {
    "qwen 4b": ("in_proj", "out_proj", "gate_up", "down"),
    "whisper turbo": ("qkv", "out_proj", "fc1", "fc2"),
    "moondream 2": ("qkv", "proj", "fc1", "fc2"),
}
ROWS = (1, 8, 16, 32, 64)
COPIES = 4


@dataclass(frozen=True, slots=True)
class Link:
    """One product of a layer: a weight for each copy of the layer."""

    shape: Shape
    weights: list[torch.Tensor]
    gain: torch.Tensor

    def calls(self, rows: int, config: Config) -> list[Callable[[], object]]:
        """A call for each copy, with the norm before it where it has one."""
        shape = self.shape
        fused = shape.norm is not None and config.kernel == "gemv"
        o = operands(shape, rows, "cuda", fused=False, weight=self.weights[0])
        shift = self.gain if shape.norm == "layer" else None
        if fused:
            o = replace(o, norm=Norm(kind=str(shape.norm), gain=self.gain, shift=shift, eps=1e-6))
        calls = []
        for weight in self.weights:
            if config == BLAS:
                second = partial(product, o.x, weight, o.bias, o.epilogue, o.residual)
            else:
                second = launch(config, replace(o, weight=weight), overlaps=True)[0].run
            calls.append(second if fused or shape.norm is None else _both(self._norm(o.x), second))
        return calls

    def _norm(self, x: torch.Tensor) -> Callable[[], object]:
        if self.shape.norm == "layer":
            return lambda: NORMS["layer_norm"].fn(x, self.gain, self.gain, 1e-6)
        return lambda: NORMS["rms_norm"].fn(x, self.gain, 1e-6, add_one=True)


def _both(first: Callable[[], object], second: Callable[[], object]) -> Callable[[], object]:
    return lambda: (first(), second())


def chained(links: list[Link], rows: int, pick: Callable[[Shape], Config]) -> float:
    """µs of a layer whose products are configured by ``pick``."""
    columns = [link.calls(rows, pick(link.shape)) for link in links]
    layers = list(zip(*columns, strict=True))
    return timed([lambda calls=calls: [call() for call in calls] for calls in layers], rounds=5)


def main() -> None:
    """Print a line for each layer and number of rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", type=Path, help="as linear_table.json; default: the committed one")
    wanted = parser.parse_args()
    need_gpu()
    measured = json.loads(wanted.table.read_text(encoding="utf-8"))["90"] if wanted.table else {}

    def chosen(shape: Shape, rows: int) -> Config:
        key = Product.of(shape.n, shape.k, rows, shape.epilogue)
        found = measured.get(key.key, {}).get(str(key.rows))
        return choose(key, 90) if found is None else Config(**found)

    for model, names in LAYERS.items():
        links = []
        for name in names:
            shape = next(s for s in SHAPES if s.name == f"{model} {name}")
            draw = torch.randn(
                COPIES * (8 if shape.n < 8192 else 1), shape.n, shape.k, dtype=torch.bfloat16, device="cuda"
            )
            links.append(
                Link(
                    shape,
                    list(draw * shape.k**-0.5),
                    torch.ones(shape.k, dtype=torch.bfloat16, device="cuda"),
                )
            )
        fewest = min(len(link.weights) for link in links)
        links = [replace(link, weights=link.weights[:fewest]) for link in links]
        floor = sum(link.shape.n * link.shape.k * 2 for link in links) / 4.28e6
        for rows in ROWS:
            told = [f"floor {floor:.1f}", f"table {chained(links, rows, lambda s, r=rows: chosen(s, r)):.1f}"]
            if rows > 1:
                told.append(f"torch {chained(links, rows, lambda s: BLAS):.1f}")
            print(f"{model:14} {rows:3} rows, us a layer: {', '.join(told)}", flush=True)


if __name__ == "__main__":
    main()
