"""Microseconds and TFLOP/s of attention inside images and sounds, by kernels and tiles, at published sizes, on one GPU.

``python packages/kestrel-kernels-cuda/tuning/vision.py [--only NAME] [--ways NAME]`` prints for each shape every way
whose name contains NAME, with its largest difference from float32 first.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
import torch.nn.functional as F
from stopwatch import microseconds, need_gpu

from kestrel_kernels_cuda import attention_vision
from kestrel_kernels_cuda.attention_configs import arch_of
from kestrel_kernels_cuda.attention_hopper import HopperConfig, hopper_launch
from kestrel_kernels_cuda.launch import Launch

DEVICE = torch.device("cuda")
SHAPES = (  # items, positions, heads, head dim
    (9, 729, 16, 72), (36, 729, 16, 72), (1, 1024, 16, 72), (1, 4096, 16, 72), (1, 1500, 20, 64), (8, 1500, 20, 64),
)  # fmt: skip
TILES = [(2, 128, 2, 0), (2, 128, 2, 1), (3, 64, 4, 0), (3, 64, 4, 1), (3, 128, 2, 0), (3, 128, 2, 1)]
Inputs = tuple[torch.Tensor, ...]
Way = Callable[[Inputs, float], tuple[torch.Tensor, Launch]]


def ways(dim: int) -> Iterator[tuple[str, Way]]:
    """Names and launches."""
    for tile in TILES:
        if tile[:3] != (3, 128, 2) or dim == 64:  # more registers than there are
            groups, block_n, stages, turns = tile
            config = HopperConfig(groups=groups, block_n=block_n, stages=stages, takes_turns=bool(turns))
            yield f"hopper {tile}", lambda x, scale, c=config: hopper_launch(*x, scale, c)
    used = attention_vision.config_of(arch_of(DEVICE), dim, 2)
    yield f"triton {used.tile}", lambda x, scale: attention_vision.vision_launch(*x, scale, used)


def report(shape: tuple[int, int, int, int], wanted: str) -> None:
    """A line for each way."""
    items, length, heads, dim = shape
    sets = [torch.randn((items, length, 3, heads, dim), device=DEVICE).bfloat16().unbind(2) for _ in range(3)]
    scale, flops = dim**-0.5, 4 * items * heads * length**2 * dim
    q, k, v = (x[:1].transpose(1, 2).float() for x in sets[0])
    exact = F.scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2)
    print(shape, flush=True)

    def show(name: str, out: torch.Tensor, calls: Callable[[int], object]) -> None:
        off = float((out[:1].float() - exact).abs().max())
        us = microseconds(calls, 12)
        print(f"  {us:9.2f} us {flops / us / 1e6:7.1f} TFLOP/s  off by {off:.1e}  {name}", flush=True)

    for name, way in ways(dim):
        if wanted in name:
            made = [way(inputs, scale) for inputs in sets]
            made[0][1].run()
            show(name, made[0][0], lambda i, made=made: made[i % 3][1].run())
    for backend in attention_vision.BACKENDS:
        name = backend.name.lower()
        if wanted in name:
            call = partial(attention_vision.library_attention, scale=scale, backends=(backend,))
            show(name, call(*sets[0]), lambda i, call=call: call(*sets[i % 3]))


def compile_all(dims: set[int], wanted: str) -> None:
    """Everything that will be launched, on all cores."""
    made = []
    for dim in dims:
        inputs = torch.empty((1, 64, 3, 16, dim), device=DEVICE, dtype=torch.bfloat16).unbind(2)
        made += [way(inputs, 1.0)[1] for name, way in ways(dim) if wanted in name]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(Launch.compile, made))


def main() -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="shapes that contain this, as '729, 16'")
    parser.add_argument("--ways", default="", help="ways whose name contains this")
    parser.add_argument(
        "--turns", type=int, choices=(0, 1), help="ways of the Gluon kernel: with turns or without"
    )
    wanted = parser.parse_args()
    need_gpu()
    if wanted.turns is not None:
        TILES[:] = [tile for tile in TILES if tile[3] == wanted.turns]
    torch.backends.cuda.matmul.allow_tf32 = False
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    shapes = [shape for shape in SHAPES if wanted.only in str(shape)]
    compile_all({dim for *_, dim in shapes}, wanted.ways)
    for shape in shapes:
        report(shape, wanted.ways)


if __name__ == "__main__":
    main()
