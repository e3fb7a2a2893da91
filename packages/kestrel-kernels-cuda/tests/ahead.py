"""Run by ``test_warm``: what launches compile after warm-up, for sm_90 on a machine without a GPU. Prints JSON.

Nothing is launched: a driver that only names the architecture stands in for the GPU's, and ``Launch.run`` compiles.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime import driver

from kestrel.device import Staging
from kestrel.ops.gated_delta_step import MixerWeights
from kestrel.ops.resampling import CropPlan, crop_tables
from kestrel.sampling.rows import SampleRows
from kestrel.spi import CrossView, Limits, OpQuery, PagedView
from kestrel.spi.batch import RecurrentView
from kestrel_kernels_cuda.backend import CudaBackend
from kestrel_kernels_cuda.devices import Device, as_if
from kestrel_kernels_cuda.launch import Launch

BF16 = torch.bfloat16
ROWS = 3
VOCAB = 5000

Call = tuple[OpQuery, Callable[[Callable[..., object]], object]]
"""A query as a layer makes it, and a call of its provider with tensors as models make them."""


class Named:
    """The driver of an sm_90 that is not there."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def empty(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def odd(*shape: int) -> torch.Tensor:
    """int64 numbers at an address that is no multiple of 16."""
    count = torch.Size(shape).numel()
    return torch.zeros(count + 1, dtype=torch.int64)[1:].view(shape)


def view() -> PagedView:
    pool = empty(2, 3, 2, 16, 64)
    return PagedView(
        k_LPKSD=pool, v_LPKSD=pool, page_table_BN=empty(1, 1, dtype=torch.int32), slots_T=odd(ROWS),
        computed_B=empty(1, dtype=torch.int32), cu_seqlens=empty(2, dtype=torch.int32), page_size=16,
        limits=Limits(max_rows=1, max_tokens=ROWS, max_query_len=ROWS, max_context_len=ROWS),
    )  # fmt: skip


def cross_view(pool: torch.Tensor) -> CrossView:
    """Two entries of ``pool``; where they are named lies at any address."""
    return CrossView(
        k_LEKSD=pool, v_LEKSD=pool, entries_B=odd(2), lens_B=empty(2, dtype=torch.int32),
        cu_seqlens=empty(3, dtype=torch.int32),
        limits=Limits(max_rows=2, max_tokens=ROWS, max_query_len=ROWS, max_context_len=ROWS),
    )  # fmt: skip


def sampling_calls() -> Iterator[Call]:
    """The sampling ops over a sampler's own tables, whose lists lie at any word of a record, by numbers of rows."""
    tables = SampleRows(VOCAB, 9, Staging(torch.device("cpu")), has_room=True).tables
    facts = {"vocab": VOCAB, "dtype": "bfloat16"}
    masked = {"biases": True, "statics": True, "automata": True}
    for n in (1, 2, 3, 16):
        logits, rows = empty(n, VOCAB), empty(n, dtype=torch.int64)
        best, first = empty(2 * n, dtype=torch.float32).split(n)
        ids = empty(2 * n, dtype=torch.int64)[:n]
        drawn, row = (logits, best, ids, rows, tables), (ids, first, best, rows, tables)
        yield OpQuery.of("sample_argmax", **facts), partial(call, logits)
        for options in ({}, {"prefers": True}):
            yield (
                OpQuery.of("sample_process", **facts),
                partial(call, logits, rows, tables, **masked, **options),
            )
        for options in ({}, {"ranks": True, "min_p": True}):
            yield OpQuery.of("sample_draw", **facts), partial(call, *drawn, **options)
        for options in ({}, {"advances": True}, {"advances": True, "automata": True}):
            yield OpQuery.of("sample_commit", **facts), partial(call, *row, stops=True, **options)
        for count in (0, 20):
            yield OpQuery.of("sample_logprobs", count=20, **facts), partial(call, logits, ids, count)


def call(*arguments: object, **options: object) -> object:
    """The last argument with the others."""
    *given, fn = arguments
    return fn(*given, **options)


def product_calls() -> Iterator[Call]:
    """A product of a few rows with a weight that the table knows."""
    x, weight = empty(16, 2560), empty(12352, 2560)
    facts = {"k": 2560, "epilogue": None, "bias": False, "rows": 16, "dtype": "bfloat16"}
    yield OpQuery.of("linear", n=12352, **facts), lambda fn: fn(x, weight)
    facts |= {"k": 9216, "epilogue": "accumulate"}
    down, into = (empty(16, 9216), empty(2560, 9216)), empty(16, 2560)
    yield OpQuery.of("linear", n=2560, **facts), lambda fn: fn(*down, None, "accumulate", into)


def norm_calls() -> Iterator[Call]:
    """Norms of rows."""
    x, weight = empty(ROWS, 96), empty(96)
    norm = {"dim": 96, "dtype": "bfloat16"}
    yield OpQuery.of("rms_norm", kind="rms", **norm), lambda fn: fn(x, weight, 1e-6, add_one=False)
    yield OpQuery.of("layer_norm", kind="layer", **norm), lambda fn: fn(x, weight, weight, 1e-5)
    yield (
        OpQuery.of("layer_norm", kind="layer", offset=True, **norm),
        lambda fn: fn(x, weight, weight, 1e-5, weight.float()),
    )
    yield (
        OpQuery.of("add_norm", kind="layer", **norm),
        lambda fn: fn(x, x, weight, weight, 1e-6, kind="layer"),
    )
    for delta in (None, x):
        yield (
            OpQuery.of("e4m3_norm", kind="layer", offset=True, delta=delta is not None, **norm),
            partial(call, x, 1e-5, delta, weight.float(), kind="layer"),
        )
    for activation in (None, "gelu_tanh"):
        facts = {"k": 96, "activation": activation, "dtype": "bfloat16"}
        yield OpQuery.of("e4m3_cast", **facts), partial(call, x, 0.5, activation)


def pair_calls() -> Iterator[Call]:
    """The products of a block whose attention and MLP run side by side."""
    row, square, weight = empty(1, 96), empty(96, 96), empty(96)
    pair = {"k": 96, "n": 96, "rows": 1, "dtype": "bfloat16"}
    yield (
        OpQuery.of("linear_pair", other_n=96, other_epilogue="gelu_tanh", **pair),
        lambda fn: fn(row, square, weight, square, weight, "gelu_tanh", weight, weight, 1e-5),
    )
    yield (
        OpQuery.of("linear_sum", other_k=96, **pair),
        lambda fn: fn(row, square, weight, row, square, weight, row),
    )


def head_calls() -> Iterator[Call]:
    """What happens to queries, keys and values, and attention to them."""
    heads, weight = empty(ROWS, 8, 64), empty(64)
    angle = empty(ROWS, 32, dtype=torch.float32)
    yield OpQuery.of("rope", head_dim=64, rot_dim=32, dtype="bfloat16"), lambda fn: fn(heads, angle, angle)
    freq, rows = empty(32, dtype=torch.float32), empty(32, dtype=torch.int64)
    yield (
        OpQuery.of("rope_angles", rot_dim=32, rows=3, dtype="float32"),
        lambda fn: fn(odd(3, ROWS), freq, rows),
    )
    packed = empty(ROWS, 8 * 64)
    q, k, v = (part.unflatten(-1, (-1, 64)) for part in packed.split([256, 128, 128], dim=-1))
    pages = {"head_dim": 64, "kv_heads": 2, "page": 16, "dtype": "bfloat16"}
    yield OpQuery.of("write_kv", **pages), lambda fn: fn(k, v, view(), 1)
    encoded, entries = empty(37, 2, 20, 64), empty(2, 3, 20, 37, 64)
    yield (
        OpQuery.of("write_cross", kv_heads=20, head_dim=64, max_len=37, dtype="bfloat16"),
        lambda fn: fn(*encoded.unbind(1), [5, 32], cross_view(entries), 1),
    )
    yield (
        OpQuery.of("qk_norm_rope_kv_write", heads=4, rot_dim=32, norm="rms", **pages),
        lambda fn: fn(q, k, v, view(), 1, angle, angle, weight, weight, 1e-6, gives_keys=True),
    )
    yield from attention_calls(q, k, v)


def other_calls() -> Iterator[Call]:
    """Gates, experts, pages and pictures."""
    x, heads = empty(ROWS, 96), empty(ROWS, 8, 64)
    gate = empty(ROWS, 8, 2, 64).select(2, 1)
    facts = {"dtype": "bfloat16"}
    yield (
        OpQuery.of("output_gate", per_token=False, residual=False, dim=64, **facts),
        lambda fn: fn(heads, gate),
    )
    yield (
        OpQuery.of("output_gate", per_token=True, residual=True, dim=96, **facts),
        lambda fn: fn(x, empty(ROWS, 1), x),
    )
    yield OpQuery.of("moe_route", experts=16, top_k=2, **facts), lambda fn: fn(empty(ROWS, 16), 2)
    chosen, shares = empty(ROWS, 2, dtype=torch.int64), empty(ROWS, 2)
    yield (
        OpQuery.of(
            "grouped_experts", hidden=96, experts=4, top_k=2, width=32, activation="silu_mul", **facts
        ),
        lambda fn: fn(x, shares, chosen, empty(4, 64, 96), empty(4, 96, 32)),
    )
    yield (
        OpQuery.of("copy_page", head_dim=64, kv_heads=2, **facts),
        lambda fn: fn(view().k_LPKSD, view().v_LPKSD, 1, 2, 5),
    )
    plan = CropPlan(source=(8, 8), resized=(4, 4))
    found = crop_tables([plan], "lanczos")
    arrays = [torch.from_numpy(a.copy()) for a in (found.crops_MF, found.starts_S, found.weights_KS)]
    yield (
        OpQuery.of("resize_crops", height=4, width=4),
        lambda fn: fn(empty(192, dtype=torch.uint8), *arrays, (4, 4)),
    )


def attention_calls(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Iterator[Call]:
    """Attention of one query per row, over few keys and over many."""
    angle, weight = empty(ROWS, 32, dtype=torch.float32), empty(64)
    facts = {"heads": 4, "head_dim": 64, "kv_heads": 2, "page": 16, "window": None, "softcap": False}
    for tokens in (40, 4000):
        many, here = empty(tokens, 8, 64), prefill_view(tokens)
        arguments = (many[:, :4], here, 1, 0.125, None, None, empty(tokens, 2, 64), many[:, 6:])
        yield (
            OpQuery.of("paged_attention", mode="prefill", fresh=True, gated=False, dtype="bfloat16", **facts),
            partial(call, *arguments),
        )
    for longest in (1, 900):
        here = step_view(longest)
        yield (
            OpQuery.of("paged_attention", mode="decode", gated=False, dtype="bfloat16", **facts),
            lambda fn, here=here: fn(q, here, 1, 0.125),
        )
        yield (
            OpQuery.of("decode_attention", gated=False, rot_dim=32, norm="rms", dtype="bfloat16", **facts),
            lambda fn, here=here: fn(q, k, v, here, 1, 0.125, angle, angle, weight, weight),
        )
        yield (
            OpQuery.of("decode_attention", gated=False, rot_dim=0, norm=None, dtype="bfloat16", **facts),
            lambda fn, here=here: fn(q, k, v, here, 0, 0.125),
        )
        kept = replace(
            here, **{f"{x}_LPKSD": empty(2, 3, 2, 16, 64, dtype=torch.float8_e4m3fn) for x in "kv"}
        )
        yield (
            OpQuery.of(
                "decode_attention", gated=False, rot_dim=0, norm=None, dtype="bfloat16",
                kv_dtype="float8_e4m3fn", **facts,
            ),
            partial(call, q, k, v, kept, 0, 0.125),
        )  # fmt: skip


def vision_calls() -> Iterator[Call]:
    """Attention inside images and sounds, by the heads of their towers, and with heads apart from one another."""
    for items, heads, dim in ((3, 16, 72), (1, 20, 64), (2, 4, 128)):
        q, k, v = empty(items, 37, 3, heads, dim).unbind(2)
        yield (
            OpQuery.of("vision_attention", heads=heads, head_dim=dim, dtype="bfloat16"),
            partial(call, q, k, v, 0.1),
        )


def prefill_view(tokens: int) -> PagedView:
    """A launch of one sequence."""
    limits = Limits(max_rows=1, max_tokens=tokens, max_query_len=tokens, max_context_len=tokens)
    return replace(
        step_view(1), slots_T=odd(tokens), computed_B=empty(2, dtype=torch.int32)[1:],
        cu_seqlens=empty(2, dtype=torch.int32), limits=limits,
    )  # fmt: skip


def step_view(longest: int) -> PagedView:
    """A decode launch whose rows may have ``longest`` keys; lengths lie at any address."""
    pool = empty(2, 3, 2, 16, 64)
    return PagedView(
        k_LPKSD=pool, v_LPKSD=pool, page_table_BN=empty(ROWS, 64, dtype=torch.int32), slots_T=odd(ROWS),
        computed_B=empty(ROWS + 1, dtype=torch.int32)[1:], cu_seqlens=empty(ROWS + 1, dtype=torch.int32),
        page_size=16, limits=Limits(max_rows=ROWS, max_tokens=ROWS, max_query_len=1, max_context_len=longest),
    )  # fmt: skip


def recurrent_calls() -> Iterator[Call]:
    """The ops of a gated DeltaNet mixer, whose inputs are parts of one projection, with checkpoints and without."""
    key_heads, heads, dim, taps = 8, 16, 64, 4
    sizes = {"key_heads": key_heads, "heads": heads, "key_dim": dim, "value_dim": dim}
    keys, values = key_heads * dim, heads * dim
    weights = MixerWeights(
        conv_CW=empty(2 * keys + values, taps), a_log_H=empty(heads, dtype=torch.float32),
        dt_bias_H=empty(heads), norm_E=empty(dim, dtype=torch.float32),
    )  # fmt: skip
    for rows, tokens, stores in ((3, 3, 0), (3, 3, 2), (64, 64, 0), (2, 70, 0), (2, 70, 2), (2, 4100, 2)):
        is_step = rows == tokens
        seen = RecurrentView(
            parts={
                "conv": empty(2, 65, 2 * keys + values, taps - 1),
                "state": empty(2, 65, heads, dim, dim, dtype=torch.float32),
            },
            slots_B=odd(rows), cu_seqlens=torch.linspace(0, tokens, rows + 1).to(torch.int32),
            stores=odd(stores, 3),
            limits=Limits(
                max_rows=rows, max_tokens=tokens, max_query_len=1 if is_step else tokens, max_context_len=tokens
            ),
        )  # fmt: skip
        parts = [2 * keys + values, values, heads, heads]
        qkv, z, b, a = empty(tokens, sum(parts)).split(parts, dim=1)
        z_THE = z.unflatten(1, (heads, dim))
        facts = {"dtype": "bfloat16"}
        if is_step:
            yield (
                OpQuery.of("gated_delta_step", taps=taps, **sizes, **facts),
                partial(call, qkv, z_THE, a, b, weights, key_heads, seen, 1),
            )
            continue
        yield (
            OpQuery.of("causal_conv", mode="prefill", taps=taps, activation="silu", **facts),
            partial(call, qkv, weights.conv_CW, None, seen, 1),
        )
        yield (
            OpQuery.of("delta_gates", heads=heads, **facts),
            partial(call, a, b, weights.a_log_H, weights.dt_bias_H),
        )
        mixed = empty(tokens, 2 * keys + values).split([keys, keys, values], dim=1)
        q, k, v = (part.unflatten(1, (-1, dim)) for part in mixed)
        gates = empty(tokens, heads, dtype=torch.float32)
        yield (
            OpQuery.of("gated_delta", mode="prefill", **sizes, **facts),
            partial(call, q, k, v, gates, gates, seen, 1),
        )
        yield OpQuery.of("gated_norm", dim=dim, **facts), partial(call, v, z_THE, weights.norm_E)


def main() -> None:
    names: list[str] = []
    driver.set_active(Named())
    triton.knobs.runtime.jit_post_compile_hook = lambda **about: names.append(about["fn"].name)
    CompiledKernel._init_handles = lambda self: None  # there is no device to load it on
    Launch.run = Launch.compile  # type: ignore[method-assign]
    impls, late = CudaBackend().impls(), {}
    warmed: set[OpQuery] = set()
    for query, make_call in (
        *norm_calls(),
        *product_calls(),
        *pair_calls(),
        *head_calls(),
        *other_calls(),
        *vision_calls(),
        *recurrent_calls(),
        *sampling_calls(),
    ):
        for job in (
            ()
            if query in warmed
            else impls[query.op].warm(query, (1, 16, 512, 4096) if query.op == "paged_attention" else (1, 16))
        ):
            job()
        assert names or query in warmed, f"warm-up of {query} compiles nothing"
        warmed.add(query)
        names.clear()
        make_call(impls[query.op].fn)
        if names:
            late[str(query)] = list(names)
        names.clear()
    print(json.dumps(late))


if __name__ == "__main__":
    with as_if(Device(90)):
        main()
