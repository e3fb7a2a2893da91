"""Microseconds, bandwidth and TFLOP/s of the attention kernels with several tiles, at published sizes, on one GPU.

``python packages/kestrel-kernels-cuda/tuning/attention.py [--only NAME] [--all]`` prints per shape the tiles in use
(marked *) and the best found; what differs from the tables in ``attention_configs`` is worth a look there. Every
time is of a CUDA graph of launches over keys that do not stay in cache, the median of replays.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
from stopwatch import need_gpu

from kestrel.spi import Limits
from kestrel_kernels_cuda.attention_configs import (
    PrefillConfig,
    Split,
    arch_of,
    decode_config,
    joins_in_place,
    multiprocessors,
    prefill_config,
    split_of,
)
from kestrel_kernels_cuda.attention_decode import decode_launches
from kestrel_kernels_cuda.attention_parts import Keys
from kestrel_kernels_cuda.attention_prefill import prefill_launch
from kestrel_kernels_cuda.launch import Launch, jobs_of

DEVICE, BF16, PAGE = torch.device("cuda"), torch.bfloat16, 16
COLD = 150e6  # bytes of keys that launches of a graph go through before they come back to the first
HEADS = {"qwen": (16, 4, 256), "moondream": (32, 32, 64), "whisper": (20, 20, 64)}


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """``calls``: what one graph runs, once per set of keys. ``launches``: to compile first."""

    label: str
    calls: Sequence[Callable[[], object]]
    launches: Sequence[Launch] = ()
    in_use: bool = False


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One line of work: bytes moved and FLOP of one call, and the ways to do it."""

    name: str
    moved: float
    flops: float
    candidates: Sequence[Candidate]


def numbers(*shape: int) -> torch.Tensor:
    """Random bfloat16 numbers on the device."""
    return torch.randn(shape, device=DEVICE, dtype=BF16)


def pages(batch: int, length: int, kv_heads: int, dim: int, copies: int) -> list[Keys]:
    """``copies`` layers of keys of ``batch`` rows of ``length``, in shuffled pages; lengths count all of them."""
    count = -(-length // PAGE)
    table = (torch.randperm(batch * count, device=DEVICE).view(batch, count) + 1).to(torch.int32)
    lens = torch.full((batch,), length, dtype=torch.int32, device=DEVICE)
    shape = (batch * count + 1, kv_heads, PAGE, dim)
    return [
        Keys(k_PKSD=numbers(*shape), v_PKSD=numbers(*shape), table_BN=table, lens_B=lens, new=0, page=PAGE)
        for _ in range(copies)
    ]


def entries(batch: int, length: int, kv_heads: int, dim: int, copies: int) -> list[Keys]:
    """The same, each row in one entry."""
    table = torch.arange(batch, device=DEVICE).unsqueeze(1)
    lens = torch.full((batch,), length, dtype=torch.int32, device=DEVICE)
    shape = (batch, kv_heads, length, dim)
    return [
        Keys(k_PKSD=numbers(*shape), v_PKSD=numbers(*shape), table_BN=table, lens_B=lens, new=0, page=0)
        for _ in range(copies)
    ]


def of_launches(label: str, made: list[tuple[torch.Tensor, list[Launch]]], in_use: bool) -> Candidate:
    """Launches that were made once per set of keys."""
    calls = [lambda launches=launches: [x.run() for x in launches] for _, launches in made]
    return Candidate(label=label, calls=calls, launches=made[0][1], in_use=in_use)


def decode(name: str, batch: int, length: int, kind: str = "pages") -> Shape:
    """One query per row over ``length`` keys, by tiles, splits and ways to join them."""
    heads, kv_heads, dim = HEADS[name]
    moved = batch * length * kv_heads * dim * 4
    copies = min(32, 1 + int(COLD / moved))
    keys = (pages if kind == "pages" else entries)(batch, length, kv_heads, dim, copies)
    q = numbers(batch, heads, dim)
    gate = numbers(batch, heads, 2, dim)[:, :, 1] if name == "qwen" else None
    limits = Limits(max_rows=batch, max_tokens=batch, max_query_len=1, max_context_len=length)
    base = decode_config(
        arch_of(DEVICE), dim, heads // kv_heads, 2, limits, batch * kv_heads, multiprocessors(DEVICE)
    )
    tiles = [(32, 4, 3), (64, 4, 3), (64, 8, 3), (32, 2, 3), (64, 4, 2)]
    if dim <= 64:
        tiles = [(64, 4, 3), (128, 4, 3), (64, 4, 4), (128, 8, 2), (64, 2, 3)]
    used = split_of(limits, batch, kv_heads, length, base, multiprocessors(DEVICE))
    zeros = torch.zeros((batch, kv_heads), dtype=torch.int32, device=DEVICE)
    found = []
    for config in {base, *(replace(base, block_n=n, warps=w, stages=s) for n, w, s in tiles)}:
        for split in {used, *splits(batch * kv_heads, length, config.block_n)}:
            in_place = joins_in_place(limits, split)
            for arrivals in (None, zeros) if split.splits > 1 else (None,):
                made = [decode_launches(q, k, 0.1, None, gate, config, split, arrivals) for k in keys]
                label = f"{config.block_n}x{config.warps}w{config.stages}s split {split.splits}"
                is_used = config == base and split == used and in_place == (arrivals is not None)
                found.append(of_launches(label + " in place" * (arrivals is not None), made, is_used))
    return Shape(
        name=f"{kind} decode {name} {batch} x {length}", moved=moved, flops=batch * length * heads * dim * 4,
        candidates=found,
    )  # fmt: skip


def splits(groups: int, length: int, block_n: int) -> Iterator[Split]:
    """One, two, four and eight blocks a multiprocessor."""
    for blocks in (1, 2, 4, 8):
        count = max(1, min(blocks * multiprocessors(DEVICE) // groups, -(-length // block_n)))
        yield Split(count, 2048 // block_n, count)


def prefill(
    name: str,
    batch: int,
    new: int,
    cached: int = 0,
    ranged: int = 0,
    kind: str = "pages",
    causal: bool = True,
) -> Shape:
    """``new`` queries per row behind ``cached`` keys, the first ``ranged`` bidirectional, by tiles."""
    heads, kv_heads, dim = HEADS[name]
    length = cached + new
    keys = (pages if kind == "pages" else entries)(batch, length, kv_heads, dim, 2)
    if causal:
        keys = [replace(k, lens_B=torch.full_like(k.lens_B, cached)) for k in keys]
    q = numbers(batch * new, heads, dim)
    cu = torch.arange(batch + 1, device=DEVICE, dtype=torch.int32) * new
    ends = (torch.arange(batch * new, device=DEVICE) % new < ranged).to(torch.int32) * ranged
    gate = numbers(batch * new, heads, 2, dim)[:, :, 1] if name == "qwen" else None
    limits = Limits(max_rows=batch, max_tokens=batch * new, max_query_len=new, max_context_len=length)
    base = prefill_config(arch_of(DEVICE), dim, heads // kv_heads, 2, limits)
    if base.packed:
        tiles = [(16, 64, 4, 3), (16, 128, 4, 2), (64, 64, 4, 3), (32, 64, 4, 3)]
    elif dim <= 64:
        tiles = [
            (128, 64, 4, 3),
            (128, 128, 4, 2),
            (128, 128, 8, 2),
            (128, 64, 8, 3),
            (64, 64, 4, 3),
            (64, 128, 4, 2),
        ]
    else:
        tiles = [(128, 64, 8, 2), (128, 32, 8, 3), (128, 32, 8, 4), (64, 64, 4, 2), (64, 32, 4, 3)]
    configs = {base, *(PrefillConfig(base.dim, *tile, base.packed) for tile in tiles)}
    packed = numbers(batch * new, heads + 2 * kv_heads, dim)
    own = (numbers(batch * new, kv_heads, dim), packed[:, -kv_heads:])
    found = []
    for c, given in itertools.product(configs, (None, own) if causal and not base.packed else (None,)):
        c = replace(c, is_described=base.is_described)
        made = [
            prefill_launch(q, k, cu, ends if causal else None, causal, 0.1, None, gate, c, given)
            for k in keys
        ]
        label = f"{c.block_m}x{c.block_n}x{c.warps}w{c.stages}s{' own rows' * (given is not None)}"
        found.append(of_launches(label, made, c == base and (given is not None) == base.is_described))
    pairs = new * cached + new * (new + 1) / 2 + ranged * (ranged - 1) / 2 if causal else new * length
    return Shape(
        name=f"{kind} prefill {name} {batch} x {new} after {cached}", flops=batch * pairs * heads * dim * 4,
        moved=batch * (length * kv_heads + new * heads) * dim * 4, candidates=found,
    )  # fmt: skip


SHAPES: Sequence[Callable[[], Shape]] = (
    *(lambda b=b: decode("qwen", b, 1100) for b in (1, 16, 64, 256)),
    *(lambda b=b: decode("moondream", b, 740) for b in (1, 16, 64)),
    *(lambda b=b: decode("whisper", b, 120) for b in (1, 16, 64)),
    *(lambda b=b: decode("whisper", b, 1500, "entries") for b in (1, 4, 16, 64)),
    *(lambda b=b: prefill("qwen", b, 1024) for b in (1, 16)),
    *(lambda b=b: prefill("moondream", b, 742, ranged=730) for b in (1, 16)),
    lambda: prefill("moondream", 16, 12, 736),
    lambda: prefill("whisper", 16, 4, 1496, kind="entries", causal=False),
)


def microseconds(calls: Sequence[Callable[[], object]], replays: int = 7) -> float:
    """Of one call, the median over replays of a graph of all."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(max(1, 16 // len(calls))):
            for call in calls:
                call()
    times = []
    for _ in range(replays + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times[1:]) / (max(1, 16 // len(calls)) * len(calls))


def report(shape: Shape, show_all: bool) -> None:
    """Lines of ``shape``: what is in use, and the three fastest or all."""
    rows = []
    for candidate in shape.candidates:
        try:
            rows.append((microseconds(candidate.calls), candidate))
        except Exception as error:
            print(f"  {shape.name}: {candidate.label}: {type(error).__name__}: {str(error)[:120]}")
    rows.sort(key=lambda row: row[0])
    print(shape.name)
    for rank, (us, candidate) in enumerate(rows):
        if show_all or rank < 3 or candidate.in_use:
            rates = f"{shape.moved / us / 1e6:6.2f} TB/s {shape.flops / us / 1e6:7.1f} TFLOP/s"
            print(f" {'*' if candidate.in_use else ' '} {us:9.2f} us {rates}  {candidate.label}")


def compile_all(shapes: Sequence[Shape]) -> None:
    """Everything that ``shapes`` launch, on all cores; what does not compile is left to ``report``."""
    launches = [x for shape in shapes for candidate in shape.candidates for x in candidate.launches]
    with ThreadPoolExecutor(16) as pool:
        for done in [pool.submit(job) for job in jobs_of(launches)]:
            done.exception()


def main() -> None:
    """Compile what the shapes asked for launch, then measure each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="shapes whose name contains this")
    parser.add_argument("--all", action="store_true", help="every candidate, not the three fastest")
    wanted = parser.parse_args()
    need_gpu()
    began = time.monotonic()
    shapes = [shape for make in SHAPES for shape in (make(),) if wanted.only in shape.name]
    compile_all(shapes)
    compiled = time.monotonic() - began
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, compiled in {compiled:.0f} s")
    for shape in shapes:
        report(shape, wanted.all)
    print(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
