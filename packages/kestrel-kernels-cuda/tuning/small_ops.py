"""Microseconds and bandwidth of the kernels between the big products, at published sizes, on one GPU.

``python packages/kestrel-kernels-cuda/tuning/small_ops.py [--only NAME] [--reference]`` prints one line per kernel and
number of rows: a CUDA graph of launches, timed by events, against what a plain copy reaches on the same machine.
Qwen3.5-4B: hidden 2560, 16 query and 4 key heads of 256 with 64 rotated dimensions. 35B-A3B: hidden 2048, 256 experts
of width 512, 8 of a token. Moondream 2: an 800 × 600 photo as 9 crops of 378.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch
from stopwatch import microseconds, need_gpu

from kestrel.ops import OPS
from kestrel.ops.resampling import CropPlan, crop_tables
from kestrel.spi import Limits, OpQuery, PagedView
from kestrel_kernels_cuda.backend import CudaBackend

ROWS = (1, 16, 64, 256, 1024, 16384)
DIM, HEADS, KV_HEADS, HEAD, ROTATED, PAGE = 2560, 16, 4, 256, 64, 16
EXPERTS, TOP_K, MOE_DIM, WIDTH = 256, 8, 2048, 512
CALLS = 32  # launches of one graph; inputs that must not stay in cache change from one to the next
BF16 = torch.bfloat16


@dataclass(frozen=True, kw_only=True)
class Work:
    """One line: ``call(fn, i)`` launches ``fn``, an implementation of ``query``, for the i-th time."""

    query: OpQuery
    rows: int
    call: Callable[[Callable[..., object], int], object]
    moved: float  # bytes read and written by one call
    flops: float = 0.0


def empty(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """Numbers around zero on the GPU."""
    return torch.randn(shape, device="cuda", dtype=torch.float32).to(dtype)


def norms(rows: int) -> Iterator[Work]:
    """rms_norm and add_norm of the hidden width."""
    x, delta, weight = empty(rows, DIM), empty(rows, DIM), empty(DIM)
    size = x.numel() * 2
    facts = {"dim": DIM, "kind": "rms_plus_one", "dtype": "bfloat16"}
    yield Work(
        query=OpQuery.of("rms_norm", **facts), rows=rows, moved=2 * size,
        call=lambda fn, i: fn(x, weight, 1e-6, add_one=True),
    )  # fmt: skip
    yield Work(
        query=OpQuery.of("add_norm", **facts), rows=rows, moved=4 * size,
        call=lambda fn, i: fn(x, delta, weight, None, 1e-6, kind="rms_plus_one"),
    )  # fmt: skip


def angles(rows: int) -> Iterator[Work]:
    """The angles of a forward with three rows of positions."""
    positions = torch.arange(rows, device="cuda").repeat(3, 1)
    freq = torch.rand(ROTATED, device="cuda")
    chosen = torch.arange(ROTATED, device="cuda") % 3
    yield Work(
        query=OpQuery.of("rope_angles", rot_dim=ROTATED, rows=3, dtype="float32"), rows=rows,
        moved=rows * (24 + 8 * ROTATED), call=lambda fn, i: fn(positions, freq, chosen),
    )  # fmt: skip


def attention_inputs(rows: int) -> Iterator[Work]:
    """Norm, rope and write of queries, keys and values, and the gate of the output."""
    q = empty(rows, HEADS, 2 * HEAD)  # each head's query and gate, as the projection makes them
    packed = empty(rows, 2 * KV_HEADS, HEAD)
    k, v = packed.split(KV_HEADS, dim=1)
    pages = rows // PAGE + 2
    pool = [empty(1, pages, KV_HEADS, PAGE, HEAD) for _ in "kv"]
    view = PagedView(
        k_LPKSD=pool[0], v_LPKSD=pool[1],
        page_table_BN=torch.zeros(1, pages, dtype=torch.int32, device="cuda"),
        slots_T=torch.randperm(rows, device="cuda") + PAGE,
        computed_B=torch.zeros(1, dtype=torch.int32, device="cuda"),
        cu_seqlens=torch.tensor([0, rows], dtype=torch.int32, device="cuda"), page_size=PAGE,
        limits=Limits(max_rows=1, max_tokens=rows, max_query_len=rows, max_context_len=rows),
    )  # fmt: skip
    cos, sin = (torch.rand(rows, ROTATED, device="cuda") for _ in range(2))
    weight = empty(HEAD)
    yield Work(
        query=OpQuery.of(
            "qk_norm_rope_kv_write", heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD, page=PAGE,
            rot_dim=ROTATED, norm="rms_plus_one", dtype="bfloat16",
        ),
        rows=rows, moved=2 * rows * (HEADS + 2 * KV_HEADS) * HEAD * 2,
        call=lambda fn, i: fn(q[..., :HEAD], k, v, view, 0, cos, sin, weight, weight, 1e-6, add_one=True),
    )  # fmt: skip
    x = empty(rows, HEADS, HEAD)
    yield Work(
        query=OpQuery.of("output_gate", per_token=False, residual=False, dim=HEAD, dtype="bfloat16"),
        rows=rows, moved=3 * x.numel() * 2, call=lambda fn, i: fn(x, q[..., HEAD:]),
    )  # fmt: skip


def experts(rows: int, gate_up: torch.Tensor, down: torch.Tensor) -> Iterator[Work]:
    """Routing and the experts, with other experts in each launch."""
    logits = empty(rows, EXPERTS)
    yield Work(
        query=OpQuery.of("moe_route", experts=EXPERTS, top_k=TOP_K, dtype="bfloat16"), rows=rows,
        moved=logits.numel() * 2 + rows * TOP_K * 10, call=lambda fn, i: fn(logits, TOP_K),
    )  # fmt: skip
    x, weights = empty(rows, MOE_DIM), empty(rows, TOP_K).abs()
    chosen = [torch.rand(rows, EXPERTS, device="cuda").topk(TOP_K).indices for _ in range(CALLS)]
    read = sum(int(c.unique().numel()) for c in chosen) / CALLS * 3 * MOE_DIM * WIDTH * 2
    yield Work(
        query=OpQuery.of(
            "grouped_experts", hidden=MOE_DIM, experts=EXPERTS, top_k=TOP_K, width=WIDTH,
            activation="silu_mul", dtype="bfloat16",
        ),
        rows=rows, moved=read + 2 * x.numel() * 2, flops=6.0 * rows * TOP_K * MOE_DIM * WIDTH,
        call=lambda fn, i: fn(x, weights, chosen[i], gate_up, down, "silu_mul"),
    )  # fmt: skip
    eight = [weight.to(torch.float8_e4m3fn) for weight in (gate_up, down)]
    scales = [torch.ones(EXPERTS, w.shape[1] // 128, w.shape[2] // 128, device="cuda") for w in eight]
    yield Work(
        query=OpQuery.of(
            "fp8_grouped_experts", hidden=MOE_DIM, experts=EXPERTS, top_k=TOP_K, width=WIDTH,
            activation="silu_mul", dtype="bfloat16",
        ),
        rows=rows, moved=read / 2 + 2 * x.numel() * 2, flops=6.0 * rows * TOP_K * MOE_DIM * WIDTH,
        call=lambda fn, i: fn(x, weights, chosen[i], eight[0], scales[0], eight[1], scales[1], "silu_mul"),
    )  # fmt: skip


def photo() -> Iterator[Work]:
    """An 800 × 600 photo as Moondream cuts it: the whole at 378, and 2 × 4 windows of an enlarged copy."""
    whole, margins, window = (644, 1176), 112, 266
    assert whole == (2 * window + margins, 4 * window + margins)
    plans = [CropPlan(source=(600, 800), resized=(378, 378))]
    for i in range(8):
        top, left = i // 4 * window, i % 4 * window
        plans.append(CropPlan(source=(600, 800), resized=whole, top=top, left=left))
    tables = crop_tables(plans, "lanczos")
    arrays = [
        torch.from_numpy(a.copy()).cuda() for a in (tables.crops_MF, tables.starts_S, tables.weights_KS)
    ]
    pixels = torch.randint(0, 256, (600 * 800 * 3,), dtype=torch.uint8, device="cuda")
    yield Work(
        query=OpQuery.of("resize_crops", height=378, width=378), rows=9,
        moved=pixels.numel() + 9 * 378 * 378 * 3, call=lambda fn, i: fn(pixels, *arrays, (378, 378)),
    )  # fmt: skip


def works() -> Iterator[Work]:
    """Every line, in the order of printing."""
    gate_up, down = empty(EXPERTS, 2 * WIDTH, MOE_DIM) * 0.02, empty(EXPERTS, MOE_DIM, WIDTH) * 0.02
    for rows in ROWS:
        yield from norms(rows)
        yield from angles(rows)
        yield from attention_inputs(rows)
        yield from experts(rows, gate_up, down)
    yield from photo()


def main() -> None:
    """Compile on every core, then measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="ops whose name contains this")
    parser.add_argument("--reference", action="store_true", help="measure the references too")
    wanted = parser.parse_args()
    need_gpu()
    impls, began = CudaBackend().impls(), time.perf_counter()
    todo = [work for work in works() if wanted.only in work.query.op]
    jobs = [job for query in {w.query for w in todo} for job in impls[query.op].warm(query, ROWS)]
    with ThreadPoolExecutor(12) as pool:
        list(pool.map(lambda job: job(), jobs))
    print(f"{len(jobs)} jobs compiled in {time.perf_counter() - began:.1f} s")
    big, other = empty(2**29), empty(2**29)
    ceiling = 2 * 2**30 / microseconds(lambda i: torch.neg(big, out=other), CALLS) / 1e3
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; copy {ceiling:.0f} GB/s")
    for work in todo:
        taken = microseconds(partial(work.call, impls[work.query.op].fn), CALLS)
        speed = work.moved / taken / 1e3
        line = (
            f"{work.query.op:24}{work.rows:7} rows {taken:9.2f} us {speed:7.0f} GB/s {speed / ceiling:5.0%}"
        )
        if work.flops:
            line += f" {work.flops / taken / 1e6:7.1f} TFLOP/s"
        if wanted.reference:
            line += f"   reference {microseconds(partial(work.call, OPS[work.query.op].reference), CALLS):9.2f} us"
        print(line, flush=True)


if __name__ == "__main__":
    main()
