"""What attention adds to a decode step, after the product that makes its queries, in parts and in one launch.

``python packages/kestrel-kernels-cuda/tuning/decode_steps.py [--only NAME] [--tiles]`` prints per model, rows and
context: microseconds that norm, rope, write and attention add to a graph of products, each layer with keys and weights
of its own, so that nothing stays in cache. ``--tiles`` tries others than those in ``attention_configs``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from stopwatch import microseconds, need_gpu

from kestrel.spi import Limits
from kestrel.spi.batch import CrossView, PagedView
from kestrel_kernels_cuda import attention_configs, attention_cross, attention_paged
from kestrel_kernels_cuda.attention_step import decode_attention
from kestrel_kernels_cuda.kv_write import qk_norm_rope_kv_write, write_kv
from kestrel_kernels_cuda.linear import linear

PATCHED: tuple[Any, ...] = (attention_cross, attention_paged)
KEPT = dict(attention_configs.BLOCKS_PER_PROCESSOR)
DEVICE, BF16, PAGE, COLD = torch.device("cuda"), torch.bfloat16, 16, 200e6


@dataclass(frozen=True, kw_only=True)
class Model:
    """Heads, key/value heads, head dim, hidden size, rotated dimensions, whether there are norms and a gate."""

    heads: int
    kv_heads: int
    dim: int
    hidden: int
    rotated: int = 0
    is_normed: bool = False

    @property
    def outputs(self) -> int:
        """Of the projection: gates too."""
        return (self.heads * (2 if self.is_normed else 1) + 2 * self.kv_heads) * self.dim


MODELS = {
    "qwen": Model(heads=16, kv_heads=4, dim=256, hidden=2560, rotated=64, is_normed=True),
    "moondream": Model(heads=32, kv_heads=32, dim=64, hidden=2048, rotated=32),
    "whisper": Model(heads=20, kv_heads=20, dim=64, hidden=1280),
}


def numbers(*shape: int) -> torch.Tensor:
    """Random bfloat16 numbers on the device."""
    return torch.randn(shape, device=DEVICE, dtype=BF16) * 0.1


class Layers:
    """As many layers of a model as do not fit the cache, and ways to run one."""

    def __init__(self, model: Model, rows: int, length: int) -> None:
        self.model = model
        moved = rows * length * model.kv_heads * model.dim * 4 + model.outputs * model.hidden * 2
        self.count = min(24, 2 + int(COLD / moved))
        self.x = numbers(rows, model.hidden)
        self.weights = [numbers(model.outputs, model.hidden) for _ in range(self.count)]
        self.norm = numbers(model.dim) if model.is_normed else None
        self.angles = (None, None)
        if model.rotated:
            self.angles = tuple(torch.rand(rows, model.rotated, device=DEVICE) for _ in "cs")
        self.view = self._view(rows, length)
        entries = (self.count, rows + 1, model.kv_heads, length, model.dim)
        self.cross = CrossView(
            k_LEKSD=numbers(*entries), v_LEKSD=numbers(*entries),
            entries_B=torch.arange(rows, device=DEVICE) + 1, lens_B=self.view.computed_B,
            cu_seqlens=self.view.cu_seqlens, limits=self.view.limits,
        )  # fmt: skip

    def _view(self, rows: int, length: int) -> PagedView:
        pages = -(-(length + 1) // PAGE)
        table = (torch.randperm(rows * pages, device=DEVICE).view(rows, pages) + 1).to(torch.int32)
        pool = (self.count, rows * pages + 1, self.model.kv_heads, PAGE, self.model.dim)
        return PagedView(
            k_LPKSD=numbers(*pool), v_LPKSD=numbers(*pool), page_table_BN=table, page_size=PAGE,
            slots_T=table[:, length // PAGE].to(torch.int64) * PAGE + length % PAGE,
            computed_B=torch.full((rows,), length, dtype=torch.int32, device=DEVICE),
            cu_seqlens=torch.arange(rows + 1, dtype=torch.int32, device=DEVICE),
            limits=Limits(max_rows=rows, max_tokens=rows, max_query_len=1, max_context_len=length + 128),
        )  # fmt: skip

    def _projected(self, layer: int) -> tuple[Any, ...]:
        model = self.model
        packed = linear(self.x, self.weights[layer % self.count])
        queries = model.heads * (2 if model.is_normed else 1) * model.dim
        q, k, v = packed.split([queries, model.kv_heads * model.dim, model.kv_heads * model.dim], dim=1)
        k, v = (x.unflatten(1, (-1, model.dim)) for x in (k, v))
        if not model.is_normed:
            return q.unflatten(1, (-1, model.dim)), k, v, None
        q, gate = q.unflatten(1, (model.heads, 2, model.dim)).unbind(2)
        return q, k, v, gate

    def product(self, layer: int) -> None:
        """The projection alone."""
        self._projected(layer)

    def parts(self, layer: int) -> None:
        """Norm, rope and write, then attention."""
        q, k, v, gate = self._projected(layer)
        at = layer % self.count
        if self.model.rotated:
            q = qk_norm_rope_kv_write(
                q, k, v, self.view, at, *self.angles, self.norm, self.norm, add_one=True
            )
        else:
            write_kv(k, v, self.view, at)
        attention_paged.paged_attention(q, self.view, at, 0.1, None, gate)

    def fused(self, layer: int) -> None:
        """The same in one launch."""
        q, k, v, gate = self._projected(layer)
        decode_attention(
            q, k, v, self.view, layer % self.count, 0.1, *self.angles, self.norm, self.norm, 1e-6, None, gate,
            add_one=self.model.is_normed,
        )  # fmt: skip

    def crossed(self, layer: int) -> None:
        """Attention to an encoder's keys."""
        attention_cross.cross_attention(self._projected(layer)[0], self.cross, layer % self.count, 0.1)


def tiles(dim: int) -> Iterator[tuple[int, int, int]]:
    """Keys of a tile, warps and stages to try."""
    yield from ((64, 8, 1), (32, 4, 1), (32, 8, 1), (128, 8, 1), (64, 8, 3)) if dim > 64 else (
        (128, 8, 1), (128, 4, 1), (64, 4, 1), (64, 8, 1), (128, 4, 3),
    )  # fmt: skip


def adds(call: Callable[[int], object], layers: Layers, base: float) -> str:
    """What ``call`` takes above the product, and the bandwidth of its keys."""
    return f"{microseconds(call, 2 * layers.count) - base:7.2f} us"


def report(name: str, rows: int, length: int, tries: bool, is_cross: bool) -> None:
    """One line per way."""
    layers = Layers(MODELS[name], rows, length)
    base = microseconds(layers.product, 2 * layers.count)
    moved = rows * length * layers.model.kv_heads * layers.model.dim * 4
    title = f"{name}{' cross' * is_cross} {rows} x {length}"
    ways = {"cross": layers.crossed} if is_cross else {"parts": layers.parts, "fused": layers.fused}
    told = ", ".join(f"{way} adds {adds(call, layers, base)}" for way, call in ways.items())
    print(f"{title}: product {base:.2f} us, keys at 4.2 TB/s {moved / 4.2e6:.2f} us, {told}", flush=True)
    if not tries:
        return
    kept = attention_configs.decode_config
    for tile in tiles(layers.model.dim):
        for blocks in (1, 2):
            attention_configs.BLOCKS_PER_PROCESSOR.update(dict.fromkeys((64, 128, 256), blocks))

            def other(*args: object, tile: tuple[int, int, int] = tile) -> object:
                block_n, warps, stages = tile
                return replace(kept(*args), block_n=block_n, warps=warps, stages=stages)

            for module in PATCHED:
                module.decode_config = other
            call = layers.crossed if is_cross else layers.fused
            print(f"    {tile} {blocks} a processor: {adds(call, layers, base)}", flush=True)
    attention_configs.BLOCKS_PER_PROCESSOR.update(KEPT)
    for module in PATCHED:
        module.decode_config = kept


def main() -> None:
    """Each model at few rows and at many."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="models whose name contains this")
    parser.add_argument("--tiles", action="store_true", help="other tiles too, where rows are few")
    wanted = parser.parse_args()
    need_gpu()
    for name, length in (("qwen", 1060), ("moondream", 752), ("whisper", 60)):
        for rows in (1, 4, 16, 64) if wanted.only in name else ():
            report(name, rows, length, wanted.tiles and rows <= 4 and length > 99, False)
    for rows in (1, 4, 16, 64) if wanted.only in "whisper cross" else ():
        report("whisper", rows, 1500, wanted.tiles and rows <= 4, True)


if __name__ == "__main__":
    main()
