"""The recurrent kernels over candidate configurations, at the sizes of Qwen3.5-4B, on one GPU.

``python packages/kestrel-kernels-cuda/tuning/recurrent.py [--only step|conv|solve|scan]`` prints a line per launch and
configuration, best first: a CUDA graph of launches timed by events. 32 value heads and 16 key heads of 128 x 128, four
taps, 24 layers.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch
from stopwatch import microseconds, need_gpu

from kestrel.ops.gated_delta_step import MixerWeights
from kestrel.spi.batch import Limits, RecurrentView
from kestrel_kernels_cuda.causal_conv import conv_launch
from kestrel_kernels_cuda.gated_delta import delta_launches
from kestrel_kernels_cuda.gated_delta_step import step_launch
from kestrel_kernels_cuda.launch import Launch

KEY_HEADS, HEADS, D, TAPS, LAYERS = 16, 32, 128, 4, 24
CHANNELS = 2 * KEY_HEADS * D + HEADS * D
STATE = HEADS * D * D * 4  # bytes of one row and layer
BATCHES = (1, 4, 16, 64, 256)
PROMPTS = ((1024,), (1024,) * 8, (64,) * 16, (8192,), (40, 3000, 17, 900))
CALLS = 32  # launches of one graph
STEP: tuple[Mapping[str, int], ...] = tuple(
    {"BLOCK_E": block, "num_warps": warps, "maxnreg": most, "PREFETCH": bool(prefetch)}
    for block, warps, most, prefetch in (
        (64, 4, 168, 0), (64, 4, 168, 1), (64, 4, 128, 1), (64, 8, 128, 0), (64, 8, 128, 1), (128, 8, 128, 1),
        (32, 4, 128, 0), (32, 4, 128, 1), (32, 2, 168, 1), (32, 4, 96, 1),
    )
)  # fmt: skip
CONV: tuple[Mapping[str, int], ...] = tuple(
    {"TOKENS": tokens, "BLOCK": block, "num_warps": warps}
    for tokens, block, warps in (
        (16, 256, 4), (16, 1024, 4), (32, 1024, 4), (8, 1024, 4), (16, 512, 2), (32, 512, 2), (16, 256, 1), (8, 256, 1),
    )
)  # fmt: skip
SOLVE: tuple[Mapping[str, int], ...] = tuple(
    {"num_stages": 1, **config}
    for config in (
        {"PIECE": 128, "num_warps": 4},
        {"PIECE": 128, "num_warps": 4, "maxnreg": 168},
        {"PIECE": 128, "num_warps": 4, "maxnreg": 128},
        {"PIECE": 64, "num_warps": 4},
        {"PIECE": 128, "num_warps": 8},
    )
)
SCAN: tuple[Mapping[str, int], ...] = tuple(
    {"BLOCK_E": block, "num_warps": warps, "STAGES": stages}
    for block, warps, stages in ((64, 4, 1), (64, 4, 2), (64, 4, 3), (128, 8, 1), (128, 8, 2))
)


@dataclass(frozen=True, kw_only=True)
class Work:
    """One op or kernel: ``build(config, i)`` makes the launches of its i-th call; a call moves ``moved`` bytes."""

    kernel: str
    what: str
    configs: tuple[Mapping[str, int], ...]
    build: Callable[[Mapping[str, int] | None, int], tuple[Launch, ...]]
    moved: float
    flops: float = 0.0


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Numbers around zero on the GPU."""
    return torch.randn(shape, device="cuda", dtype=torch.float32).to(dtype)


def view_of(lens: tuple[int, ...], layers: int, stores: int = 0) -> RecurrentView:
    """Sequences of ``lens`` over fresh pools."""
    rows, tokens = len(lens), sum(lens)
    return RecurrentView(
        parts={
            "conv": normal(layers, rows + 1, CHANNELS, TAPS - 1),
            "state": torch.randn(layers, rows + 1, HEADS, D, D, device="cuda"),
        },
        slots_B=torch.arange(1, rows + 1, device="cuda"),
        cu_seqlens=torch.tensor(
            [0, *torch.tensor(lens).cumsum(0).tolist()], dtype=torch.int32, device="cuda"
        ),
        stores=torch.zeros(stores, 3, dtype=torch.int64, device="cuda"),
        limits=Limits(max_rows=rows, max_tokens=tokens, max_query_len=max(lens), max_context_len=max(lens)),
    )


def steps(batch: int) -> Work:
    """The whole step of ``batch`` rows, another layer in each launch, none of them the first."""
    layers = 1 + max(2, min(CALLS, 1024 // batch))
    view = view_of((1,) * batch, layers)
    sizes = [CHANNELS, HEADS * D, HEADS, HEADS]
    qkv, z, b, a = normal(batch, sum(sizes)).split(sizes, dim=1)
    z_THE = z.unflatten(1, (HEADS, D))
    weights = MixerWeights(
        conv_CW=normal(CHANNELS, TAPS),
        a_log_H=torch.rand(HEADS, device="cuda"),
        dt_bias_H=normal(HEADS),
        norm_E=torch.rand(D, device="cuda"),
    )

    def build(config: Mapping[str, int] | None, i: int) -> tuple[Launch, ...]:
        return step_launch(qkv, z_THE, a, b, weights, KEY_HEADS, view, 1 + i % (layers - 1), config)[:1]

    conv = CHANNELS * (2 * (TAPS - 1) + 1) * 2
    moved = batch * (2 * STATE + conv + 2 * HEADS * D * 2) + CHANNELS * TAPS * 2
    return Work(kernel="step", what=f"{batch} rows", configs=STEP, build=build, moved=moved)


def prefills(lens: tuple[int, ...]) -> Iterator[Work]:
    """The convolution and both kernels of the rule over sequences of ``lens``."""
    tokens, view = sum(lens), view_of(lens, 2)
    what = f"{len(lens)} x {lens[0]}" if len(set(lens)) == 1 else "+".join(map(str, lens))
    x, weight = normal(tokens, CHANNELS), normal(CHANNELS, TAPS)
    yield Work(
        kernel="conv", what=what, configs=CONV, moved=2 * x.numel() * 2,
        build=lambda config, i: conv_launch(x, weight, None, view, i % 2, config=config)[:1],
    )  # fmt: skip
    keys = KEY_HEADS * D
    q, k, v = x.split([keys, keys, HEADS * D], dim=1)
    q, k, v = q.unflatten(1, (KEY_HEADS, D)), k.unflatten(1, (KEY_HEADS, D)), v.unflatten(1, (HEADS, D))
    gate, beta = -torch.rand(tokens, HEADS, device="cuda"), torch.rand(tokens, HEADS, device="cuda")

    def build(which: int, config: Mapping[str, int] | None, i: int) -> tuple[Launch, ...]:
        configs = (config, None, None) if which == 0 else (None, config, None)
        return delta_launches(q, k, v, gate, beta, view, i % 2, configs=configs)[which : which + 1]

    chunks = sum(-(-n // 64) for n in lens) * HEADS
    between = tokens * HEADS * 2 * 64 * 2
    yield Work(
        kernel="solve", what=what, configs=SOLVE, build=partial(build, 0),
        moved=tokens * 2 * keys * 2 + between, flops=chunks * 2 * 64 * 64 * (2 * D + 10 * 64),
    )  # fmt: skip
    yield Work(
        kernel="scan", what=what, configs=SCAN, build=partial(build, 1),
        moved=x.numel() * 2 + between + tokens * HEADS * D * 2 + len(lens) * 2 * STATE,
        flops=chunks * 2 * 64 * (4 * D * D + 3 * 64 * D),
    )  # fmt: skip


def compiled(work: Work) -> list[Mapping[str, int] | None]:
    """The configurations that compile, the committed one (None) first."""

    def attempt(config: Mapping[str, int] | None) -> bool:
        try:
            for launch in work.build(config, 1):
                launch.compile()
        except Exception as error:
            print(f"{work.kernel} {config} does not compile: {str(error)[:120]}")
            return False
        return True

    configs: list[Mapping[str, int] | None] = [None, *work.configs]
    with ThreadPoolExecutor(16) as pool:
        return [c for c, good in zip(configs, pool.map(attempt, configs), strict=True) if good]


def report(work: Work, ceiling: float) -> None:
    """Lines of one work, best first."""
    took: list[tuple[float, str]] = []
    for config in compiled(work):
        label = "committed" if config is None else " ".join(f"{k}={v}" for k, v in config.items())
        try:
            calls = [work.build(config, i) for i in range(CALLS)]
            took.append(
                (microseconds(lambda i, calls=calls: [launch.run() for launch in calls[i]], CALLS), label)
            )
        except Exception as error:
            print(f"{work.kernel} {work.what} {label}: {str(error)[:120]}")
    for taken, label in sorted(took):
        speed = work.moved / taken / 1e3
        line = f"{work.kernel:6}{work.what:>18} {taken:9.2f} us {speed:6.0f} GB/s {speed / ceiling:5.0%}"
        if work.flops:
            line += f" {work.flops / taken / 1e6:6.1f} TFLOP/s {taken * LAYERS / 1e3:7.2f} ms a model"
        print(f"{line}  {label}", flush=True)


def main() -> None:
    """Compile on every core, then measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="step, conv, solve or scan")
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES)
    wanted = parser.parse_args()
    need_gpu()
    big, other = (torch.empty(2**30, dtype=torch.uint8, device="cuda") for _ in range(2))
    ceiling = 2 * 2**30 / microseconds(lambda i: other.copy_(big), CALLS) / 1e3
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; copy {ceiling:.0f} GB/s")
    began = time.perf_counter()
    for batch in wanted.batches:
        if wanted.only in "step":
            report(steps(batch), ceiling)
    for lens in PROMPTS:
        for work in prefills(lens):
            if wanted.only in work.kernel:
                report(work, ceiling)
    print(f"{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
