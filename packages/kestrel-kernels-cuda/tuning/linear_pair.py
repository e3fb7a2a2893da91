"""Microseconds of a layer of Moondream 2's decode step, by configuration of ``linear_pair`` and ``linear_sum``.

``python packages/kestrel-kernels-cuda/tuning/linear_pair.py [--seconds 40]``: one row, 742 positions, 24 layers with
weights of their own in one CUDA graph, attention between the products as in the model. The first line has the four
products one by one; "floor" is the weights' bytes over what a plain copy reaches.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from small_ops import empty
from stopwatch import microseconds, need_gpu

from kestrel.spi import Limits, PagedView
from kestrel_kernels_cuda import linear_pair
from kestrel_kernels_cuda.backend import CudaBackend
from kestrel_kernels_cuda.linear_pair import Config

LAYERS, DIM, FF, HEADS, HEAD, ROTATED, PAGE, CONTEXT = 24, 2048, 8192, 32, 64, 32, 16, 742
COPY = 4.28e12  # bytes a second, read and written
PAIRS = [
    Config(bn=bn, bk=2048, warps=warps, programs=programs, depth=depth)
    for bn, warps, programs, depth in (
        (8, 8, 256, 2), (8, 8, 264, 2), (8, 8, 264, 1), (8, 4, 264, 1), (8, 4, 396, 1), (4, 4, 512, 2), (4, 4, 528, 1),
        (4, 8, 396, 2), (4, 8, 264, 2), (2, 4, 660, 2), (4, 2, 528, 1), (8, 8, 132, 1),
    )
]  # fmt: skip
SUMS = [
    Config(bn=bn, bk=bk, warps=warps, depth=depth)
    for bn, bk, warps, depth in (
        (8, 2048, 8, 2), (8, 2048, 8, 1), (8, 2048, 4, 1), (8, 1024, 4, 2), (8, 1024, 8, 4), (4, 2048, 4, 2),
        (4, 2048, 8, 3), (4, 1024, 4, 4), (4, 1024, 4, 2), (2, 2048, 8, 5), (2, 2048, 4, 5), (4, 2048, 8, 5),
    )
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A block's weights."""

    gain: torch.Tensor
    shift: torch.Tensor
    qkv: tuple[torch.Tensor, torch.Tensor]
    fc1: tuple[torch.Tensor, torch.Tensor]
    proj: tuple[torch.Tensor, torch.Tensor]
    fc2: tuple[torch.Tensor, torch.Tensor]


def made() -> Layer:
    """Random weights."""

    def linear(n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * k**-0.5, empty(n)

    return Layer(
        gain=empty(DIM), shift=empty(DIM), qkv=linear(3 * DIM, DIM), fc1=linear(FF, DIM), proj=linear(DIM, DIM),
        fc2=linear(DIM, FF),
    )  # fmt: skip


def view() -> PagedView:
    """The pages of one sequence."""
    count = CONTEXT // PAGE + 1
    pool = [empty(LAYERS, count + 1, HEADS, PAGE, HEAD) for _ in range(2)]
    return PagedView(
        k_LPKSD=pool[0], v_LPKSD=pool[1], page_size=PAGE,
        page_table_BN=torch.arange(1, count + 1, dtype=torch.int32, device="cuda")[None],
        slots_T=torch.tensor([PAGE + CONTEXT], device="cuda"),
        computed_B=torch.tensor([CONTEXT], dtype=torch.int32, device="cuda"),
        cu_seqlens=torch.tensor([0, 1], dtype=torch.int32, device="cuda"),
        limits=Limits(max_rows=1, max_tokens=1, max_query_len=1, max_context_len=2048),
    )  # fmt: skip


class Step:
    """The layers of a step, with the products in pairs or one by one."""

    def __init__(self) -> None:
        self.impls = CudaBackend().impls()
        self.layers = [made() for _ in range(LAYERS)]
        self.view, self.x = view(), empty(1, DIM)
        self.angles = [torch.rand(1, ROTATED // 2, device="cuda") for _ in range(2)]

    def attend(self, qkv: torch.Tensor, layer: int) -> torch.Tensor:
        """Attention of one layer."""
        q, k, v = qkv.view(1, 3 * HEADS, HEAD).split(HEADS, dim=1)
        attend = self.impls["decode_attention"].fn
        out = attend(
            q, k, v, self.view, layer, HEAD**-0.5, *self.angles, None, None, 1e-6, None, None, add_one=False
        )
        return out.flatten(1)

    def paired(self, _: int) -> None:
        """Two launches for the products of a layer."""
        x = self.x
        for i, w in enumerate(self.layers):
            qkv, inner = linear_pair.linear_pair(x, *w.qkv, *w.fc1, "gelu_tanh", w.gain, w.shift, 1e-5)
            x = linear_pair.linear_sum(self.attend(qkv, i), *w.proj, inner, *w.fc2, x)

    def single(self, _: int) -> None:
        """Four launches."""
        linear, normed = self.impls["linear"].fn, self.impls["norm_linear"].fn
        x = self.x
        for i, w in enumerate(self.layers):
            norm = {"kind": "layer", "gain": w.gain, "shift": w.shift, "eps": 1e-5}
            more = linear(normed(x, *w.fc1, "gelu_tanh", None, **norm), *w.fc2, "residual", x)
            attended = self.attend(normed(x, *w.qkv, None, None, **norm), i)
            x = linear(attended, *w.proj, "residual", more)


def per_layer(call: Callable[[int], None]) -> float:
    """Microseconds of a layer."""
    return microseconds(call, 4) / LAYERS


def main() -> None:
    """Prints a line per configuration."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=40)
    end = time.monotonic() + parser.parse_args().seconds
    need_gpu()
    step = Step()
    size = sum(
        w.numel() * 2
        for layer in step.layers
        for w in (layer.qkv[0], layer.fc1[0], layer.proj[0], layer.fc2[0])
    )
    floor = size / LAYERS / COPY * 1e6
    print(f"four products {per_layer(step.single):6.1f} us a layer, floor {floor:.1f}", flush=True)
    best: dict[str, tuple[float, Config]] = {}
    for name, configs in (("SUM", SUMS), ("PAIR", PAIRS)):
        for config in configs:
            if time.monotonic() > end:
                break
            setattr(linear_pair, name, config)
            try:
                took = per_layer(step.paired)
            except Exception as error:
                print(f"{name} {config}: {type(error).__name__}", flush=True)
                continue
            print(f"{name} {took:6.1f} us {config}", flush=True)
            best[name] = min(best.get(name, (took, config)), (took, config), key=lambda found: found[0])
        setattr(linear_pair, name, best[name][1])
    print(*best.items(), sep="\n")


if __name__ == "__main__":
    main()
