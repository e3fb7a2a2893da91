"""Run by ``test_small_devices``: what launches of the largest shapes need on devices with little shared memory.

Prints one JSON line per kernel, configuration and architecture, and one per op that refuses. Nothing is launched.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache

from kestrel.spi import No, OpQuery
from kestrel_kernels_cuda.backend import CudaBackend
from kestrel_kernels_cuda.compiling import Compiled, compile_case
from kestrel_kernels_cuda.devices import Device, as_if
from kestrel_kernels_cuda.launch import Launch, compile_case_of

BF16 = {"dtype": "bfloat16"}
STEP, PROMPT = (1, 64), (64, 2048, 8192)


@dataclass(frozen=True, slots=True)
class Wide:
    """A query of large shapes, numbers of rows that launches have, and the architectures that are looked at. sm_86
    and sm_89 have the same limits and tensor cores."""

    query: OpQuery
    rows: tuple[int, ...]
    archs: tuple[int, ...] = (89,)


def attention() -> Iterator[Wide]:
    """Every head dim that has tiles of its own; the widest in 32 bits; the vision towers of models."""
    for dtype, dims in (("bfloat16", (64, 128, 256, 512)), ("float32", (512,))):
        for dim in dims:
            archs = (89, 120) if dim >= 256 and dtype == "bfloat16" else (89,)
            facts = {"heads": 16, "head_dim": dim, "kv_heads": 4, "page": 16, "window": None, "dtype": dtype}
            for mode, rows in (("decode", STEP), ("prefill", PROMPT)):
                query = OpQuery.of("paged_attention", mode=mode, gated=True, softcap=False, **facts)
                yield Wide(query, rows, archs)
    eight = {
        "heads": 16,
        "head_dim": 256,
        "kv_heads": 4,
        "page": 16,
        "window": None,
        "kv_dtype": "float8_e4m3fn",
    }
    for mode, rows in (("decode", STEP), ("prefill", PROMPT)):
        query = OpQuery.of("paged_attention", mode=mode, gated=True, softcap=False, **eight, **BF16)
        yield Wide(query, rows, (86, 89))
    cross = {"heads": 20, "head_dim": 64, "kv_heads": 20, "max_len": 1500, **BF16}
    for mode, rows in (("decode", STEP), ("prefill", PROMPT)):
        yield Wide(OpQuery.of("cross_attention", mode=mode, **cross), rows)
    for dim in (72, 256):
        query = OpQuery.of("vision_attention", heads=16, head_dim=dim, **BF16)
        yield Wide(query, PROMPT, (89, 120) if dim == 256 else (89,))
    step = {"heads": 16, "head_dim": 256, "kv_heads": 4, "page": 16, "window": None, "softcap": False, **BF16}
    yield Wide(OpQuery.of("decode_attention", gated=True, rot_dim=64, norm="rms_plus_one", **step), STEP)


def products() -> Iterator[Wide]:
    """A dense block of 4 thousand million weights and its experts, in 16 and 8 bits."""
    for rows in (1, 16, 64):
        for k, n, epilogue in ((2560, 18432, "silu_mul"), (9216, 2560, "residual")):
            facts = {"k": k, "n": n, "epilogue": epilogue, "rows": rows, **BF16}
            yield Wide(OpQuery.of("linear", bias=False, **facts), (rows,))
            yield Wide(OpQuery.of("fp8_linear", **facts), (rows,), (86, 89, 120) if rows > 1 else (86, 89))
            yield Wide(OpQuery.of("norm_linear", bias=False, kind="rms_plus_one", **facts), (rows,))
    many = {"k": 2560, "n": 18432, "epilogue": "silu_mul", "rows": 0, **BF16}
    yield Wide(OpQuery.of("fp8_linear", **many), (2048,))
    wide = {"k": 2560, "n": 2560, "epilogue": None, "rows": 16, "dtype": "float32", "bias": False}
    yield Wide(OpQuery.of("linear", **wide), (16,))
    facts = {"hidden": 2048, "experts": 256, "top_k": 8, "width": 512, "activation": "silu_mul", **BF16}
    yield Wide(OpQuery.of("grouped_experts", **facts), (1, 64, 1024, 16384), (89, 120))
    yield Wide(OpQuery.of("fp8_grouped_experts", **facts), (1, 16384), (86, 89))
    yield Wide(
        OpQuery.of("e4m3_norm", dim=2048, kind="layer", delta=True, offset=True, **BF16), (768,), (86, 89)
    )
    yield Wide(OpQuery.of("e4m3_cast", k=8192, activation="gelu_tanh", **BF16), (768,), (86, 89))
    pair = {"k": 2048, "rows": 1, **BF16}
    yield Wide(OpQuery.of("linear_pair", n=6144, other_n=8192, other_epilogue="gelu_tanh", **pair), (1,))
    yield Wide(OpQuery.of("linear_sum", n=2048, other_k=8192, **pair), (1,))


def mixers() -> Iterator[Wide]:
    """Gated DeltaNet of the published heads, and of heads that are too wide for a step."""
    for values in (128, 256):
        sizes = {"key_heads": 16, "heads": 32, "key_dim": 128, "value_dim": values, **BF16}
        yield Wide(OpQuery.of("gated_delta", mode="prefill", **sizes), PROMPT, (89, 120))
        yield Wide(OpQuery.of("gated_delta_step", taps=4, **sizes), STEP)
    yield Wide(OpQuery.of("causal_conv", mode="prefill", taps=4, activation="silu", **BF16), PROMPT)
    yield Wide(OpQuery.of("gated_norm", dim=128, **BF16), PROMPT)
    yield Wide(OpQuery.of("delta_gates", heads=32, **BF16), PROMPT)


def rest() -> Iterator[Wide]:
    """Everything else, at the sizes of large models."""
    pages = {"head_dim": 256, "kv_heads": 4, "page": 16, **BF16}
    for op in ("rms_norm", "layer_norm", "add_norm"):
        yield Wide(OpQuery.of(op, kind="layer" if op == "layer_norm" else "rms", dim=5120, **BF16), STEP)
    yield Wide(OpQuery.of("rope", head_dim=256, rot_dim=64, **BF16), STEP)
    yield Wide(OpQuery.of("rope_angles", rot_dim=64, rows=3, dtype="float32"), STEP)
    yield Wide(OpQuery.of("write_kv", **pages), STEP)
    yield Wide(OpQuery.of("copy_page", **pages), STEP)
    yield Wide(OpQuery.of("qk_norm_rope_kv_write", heads=16, rot_dim=64, norm="rms", **pages), STEP)
    for dim, per_token in ((256, False), (5120, True)):
        query = OpQuery.of("output_gate", per_token=per_token, residual=per_token, dim=dim, **BF16)
        yield Wide(query, STEP)
    yield Wide(OpQuery.of("moe_route", experts=256, top_k=8, **BF16), STEP)
    yield Wide(OpQuery.of("resize_crops", height=378, width=378), (1,))
    for op in ("row_inputs", "row_results"):
        yield Wide(OpQuery.of(op, dtype="int64"), STEP)
    facts = {"vocab": 248320, **BF16}
    for op in ("argmax", "process", "draw", "commit"):
        yield Wide(OpQuery.of(f"sample_{op}", **facts), STEP)
    yield Wide(OpQuery.of("sample_logprobs", count=20, **facts), STEP)


def everything() -> list[Wide]:
    """All queries."""
    return [*attention(), *products(), *mixers(), *rest()]


@cache
def launches(arch: int) -> tuple[list[tuple[str, Launch]], dict[str, str]]:
    """What warm-up compiles on ``arch``, one launch per kernel and sizes of its blocks; and who refuses, and why."""
    found: dict[tuple[object, ...], tuple[str, Launch]] = {}
    refused: dict[str, str] = {}
    impls = CudaBackend().impls()
    planned: list[Launch] = []
    Launch.compile = lambda self: planned.append(self)  # type: ignore[method-assign]
    for wide in (wide for wide in everything() if arch in wide.archs):
        impl = impls[wide.query.op]
        with as_if(Device(arch)):
            answer = impl.supports(wide.query)
            if isinstance(answer, No):
                refused[str(wide.query)] = answer.reason
                continue
            for job in impl.warm(wide.query, wide.rows):
                job()
        for launch in planned:
            sizes = {k: v for k, v in launch.meta.items() if isinstance(v, int) and not isinstance(v, bool)}
            kinds = [str(a.dtype) for a in launch.args if hasattr(a, "dtype")][:3]
            found.setdefault(
                (launch.kernel.__name__, str(kinds), str(sorted(sizes.items()))), (str(wide.query), launch)
            )
        planned.clear()
    return list(found.values()), refused


def compiled(job: tuple[int, int]) -> Compiled:
    arch, number = job
    name, launch = launches(arch)[0][number]
    return compile_case(compile_case_of(f"{launch.kernel.__name__} of {name}", launch, (arch,)), arch)


def main() -> None:
    jobs = []
    for arch in sorted({arch for wide in everything() for arch in wide.archs}):
        found, refused = launches(arch)
        jobs += [(arch, number) for number in range(len(found))]
        for query, reason in refused.items():
            print(json.dumps({"arch": arch, "query": query, "refused": reason}), flush=True)
    with ProcessPoolExecutor(2) as pool:
        for each in pool.map(compiled, jobs):
            print(json.dumps(asdict(each)), flush=True)


if __name__ == "__main__":
    main()
