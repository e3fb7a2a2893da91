"""gated_delta_step: a gated DeltaNet mixer between its projections, one token per sequence.

One launch, see ``gated_delta_heads``; here is how its programs are dealt out.

Letters: B rows, K key heads, H value heads, D key dim, E value dim, C = 2KD + HE channels, W taps, M stores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from kestrel.ops.gated_delta_step import MixerWeights
from kestrel.ops.pages import once_per_launch
from kestrel.spi import Impl, No, OpQuery, Yes
from kestrel.spi.batch import RecurrentView
from kestrel_kernels_cuda.compiling import CompileCase
from kestrel_kernels_cuda.gated_delta_heads import heads_kernel
from kestrel_kernels_cuda.gated_delta_rows import mix_kernel, rule_kernel
from kestrel_kernels_cuda.launch import Launch, compile_case_of, dtype_of, power_of_two, refuse_dtype
from kestrel_kernels_cuda.linear_launch import overlaps_on
from kestrel_kernels_cuda.linear_scratch import counters
from kestrel_kernels_cuda.overlap import overlapped
from kestrel_kernels_cuda.recurrent_plan import meta_view

__all__ = ["IMPLS", "compile_cases", "gated_delta_step", "step_launches"]

LARGEST = 16384  # numbers of a head's state that a program holds in registers

FEW = 132  # programs that leave multiprocessors of the largest device idle
MOST_HEADS = 4  # that one program has


def _config(
    key_dim: int, value_dim: int, group: int, programs: int, is_deterministic: bool
) -> dict[str, int | bool]:
    """For a few programs (rows times heads) each has one head, whole, read by many threads. Of many, each has the heads
    of a key head, whose channels it convolves once, in tiles, so that a multiprocessor holds several of them. Sums of
    the two differ in their order."""
    block_d, block_e = power_of_two(key_dim), power_of_two(value_dim)
    if programs <= FEW and not is_deterministic:
        warps = min(8, max(1, block_d * block_e // 1024))
        return {"PARTS": group, "BLOCK_E": block_e, "AHEAD": False, "num_warps": warps}
    block_e = min(32, block_e)
    parts = next(n for n in range(1, group + 1) if group % n == 0 and group // n <= MOST_HEADS)
    warps = min(4, max(1, block_d * block_e // 1024))
    return {"PARTS": parts, "BLOCK_E": block_e, "AHEAD": False, "num_warps": warps}


def step_launches(
    qkv_TC: torch.Tensor,
    z_THE: torch.Tensor,
    a_TH: torch.Tensor,
    b_TH: torch.Tensor,
    weights: MixerWeights,
    key_heads: int,
    view: RecurrentView,
    layer: int,
    config: Mapping[str, int] | None = None,
) -> tuple[tuple[Launch, ...], torch.Tensor]:
    """The launches, in order, and their output [T, H, E]. ``config``: instead of the committed one."""
    tokens, heads, value_dim = z_THE.shape
    channels, taps = weights.conv_CW.shape
    key_dim = (channels - heads * value_dim) // (2 * key_heads)
    conv, state = view.parts["conv"][layer], view.parts["state"][layer]
    assert conv.is_contiguous(), "a layer's slots lie side by side"
    assert state.is_contiguous(), "a layer's slots lie side by side"
    device = qkv_TC.device
    qkv_TC, a_TH, b_TH = (x if x.stride(-1) == 1 else x.contiguous() for x in (qkv_TC, a_TH, b_TH))
    if z_THE.stride()[1:] != (value_dim, 1):
        z_THE = z_THE.contiguous()
    out_THE = torch.empty(tokens, heads, value_dim, dtype=qkv_TC.dtype, device=device)
    group = heads // key_heads
    limits = view.limits
    config = dict(config or _config(key_dim, value_dim, group, tokens * heads, limits.is_deterministic))
    launches, block_e = config.pop("LAUNCHES", 1), config["BLOCK_E"]
    shared: dict[str, Any] = {"KEY_HEADS": key_heads, "HEADS": heads, "D": key_dim, "E": value_dim}
    shared |= {"BLOCK_D": power_of_two(key_dim), "PDL": overlaps_on(device)}
    if shared["PDL"]:
        shared["launch_pdl"] = True
    tiles = {"TILES": power_of_two(value_dim) // block_e}
    sources = (qkv_TC, a_TH, b_TH, weights.conv_CW, weights.a_log_H, weights.dt_bias_H)
    strides, stores = (qkv_TC.stride(0), a_TH.stride(0), b_TH.stride(0)), view.stores
    if launches == 1:
        readers = once_per_launch(
            view, layer, f"gated_delta_step {key_heads}", lambda view: counters(device, tokens * key_heads)
        )
        step = Launch(
            heads_kernel,
            (key_heads * config["PARTS"], tokens),
            (
                *sources, z_THE, weights.norm_E, conv, state, view.slots_B, stores, readers, out_THE,
                *strides, z_THE.stride(0), stores.shape[0], int(layer > 0), key_dim**-0.5, weights.eps,
            ),
            {**shared, **tiles, "TAPS": taps, "HAS_STORES": stores.shape[0] > 0, "THREADS": 32 * config["num_warps"], **config},
        )  # fmt: skip
        return (step,), out_THE
    window = {"TAPS": taps, "WIDE": power_of_two(taps)}
    config = {name: value for name, value in config.items() if name in ("BLOCK_E", "num_warps")}
    mixed = torch.empty(tokens, channels, dtype=torch.float32, device=device)
    gates = torch.empty(tokens, 2 * heads + key_heads, dtype=torch.float32, device=device)
    mix = Launch(
        mix_kernel,
        (key_heads + heads, tokens),
        (*sources, conv, view.slots_B, stores, mixed, gates, *strides, stores.shape[0], key_dim**-0.5),
        {**shared, **window, "BLOCK_E": power_of_two(value_dim), "num_warps": 4},
    )
    rule = Launch(
        rule_kernel,
        (heads, tokens),
        (
            mixed, gates, z_THE, weights.norm_E, state, view.slots_B, stores, out_THE,
            z_THE.stride(0), stores.shape[0], weights.eps,
        ),
        {**shared, **tiles, **config},
    )  # fmt: skip
    return (mix, rule), out_THE


def gated_delta_step(
    qkv_TC: torch.Tensor,
    z_THE: torch.Tensor,
    a_TH: torch.Tensor,
    b_TH: torch.Tensor,
    weights: MixerWeights,
    key_heads: int,
    view: RecurrentView,
    layer: int,
) -> torch.Tensor:
    """As ``kestrel.ops.gated_delta_step``."""
    launches, out_THE = step_launches(qkv_TC, z_THE, a_TH, b_TH, weights, key_heads, view, layer)
    for launch in launches:
        launch.run()
    return out_THE


def supports(query: OpQuery) -> Yes | No:
    """Yes to heads whose state fits in the registers of one block."""
    if refused := refuse_dtype(query):
        return refused
    sizes = {name: query.get(name, 0) for name in ("key_heads", "heads", "key_dim", "value_dim")}
    if sizes["heads"] % max(1, sizes["key_heads"]):
        return No(
            f"deals whole groups of value heads to key heads, not {sizes['heads']} to {sizes['key_heads']}"
        )
    if power_of_two(sizes["key_dim"]) * power_of_two(sizes["value_dim"]) > LARGEST:
        return No(
            f"holds {LARGEST} numbers of a head's state in registers, not "
            f"{sizes['key_dim']} x {sizes['value_dim']}"
        )
    if query.get("taps", 4) < 2:
        return No("needs a convolution of at least 2 taps")
    return Yes()


def _bare_launches(
    key_heads: int,
    heads: int,
    key_dim: int,
    value_dim: int,
    taps: int,
    dtype: torch.dtype,
    rows: int,
    stores: int = 0,
) -> tuple[Launch, ...]:
    """Launches of ``rows`` without memory."""
    keys, values = key_heads * key_dim, heads * value_dim

    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    parts = {
        "conv": empty(1, 2, 2 * keys + values, taps - 1),
        "state": empty(1, 2, heads, key_dim, value_dim, dtype=torch.float32),
    }
    weights = MixerWeights(
        conv_CW=empty(2 * keys + values, taps),
        a_log_H=empty(heads, dtype=torch.float32),
        dt_bias_H=empty(heads),
        norm_E=empty(value_dim, dtype=torch.float32),
    )
    # The projections are parts of one tensor [qkv | z | b | a]: its width decides how rows are aligned.
    sizes = [2 * keys + values, values, heads, heads]
    qkv, z, b, a = empty(rows, sum(sizes)).split_with_sizes(sizes, dim=1)
    z_THE = z.unflatten(1, (heads, value_dim))
    view = meta_view(parts, rows, rows, stores)
    return step_launches(qkv, z_THE, a, b, weights, key_heads, view, 0)[0]


def _warm(query: OpQuery, row_counts: Sequence[int]) -> Iterable[Callable[[], object]]:
    """A job for launches of many programs, and one for those of few where there are such."""
    key_heads, heads, *sizes = (
        query.get(name) for name in ("key_heads", "heads", "key_dim", "value_dim", "taps")
    )
    for rows in {1 if rows * heads <= FEW else FEW for rows in (*row_counts, FEW)}:
        for stores in (0, 2):
            for launch in _bare_launches(key_heads, heads, *sizes, dtype_of(query), rows, stores):
                yield launch.compile


IMPLS: Mapping[str, Impl] = {"gated_delta_step": Impl(supports=supports, fn=gated_delta_step, warm=_warm)}


def compile_cases() -> Iterator[CompileCase]:
    """The published head: few rows and many, and float32 without groups."""
    for name, key_heads, dtype, rows, stores in (
        ("bf16, few", 16, torch.bfloat16, 1, 0),
        ("bf16, few", 16, torch.bfloat16, 1, 2),
        ("bf16, many", 16, torch.bfloat16, 64, 0),
        ("bf16, many", 16, torch.bfloat16, 64, 2),
        ("float32", 32, torch.float32, 64, 2),
    ):
        (launch,) = _bare_launches(key_heads, 32, 128, 128, 4, dtype, rows, stores)
        yield compile_case_of(f"gated_delta_step {name}, {stores} checkpoints", launch)
        yield compile_case_of(
            f"gated_delta_step {name}, {stores} checkpoints, overlapped", overlapped(launch)
        )
