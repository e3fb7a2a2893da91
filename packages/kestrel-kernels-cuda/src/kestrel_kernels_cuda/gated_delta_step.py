"""gated_delta_step: a gated DeltaNet mixer between its projections, one token per sequence.

One launch of ``gated_delta_heads``' kernel.

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
from kestrel_kernels_cuda.launch import Launch, compile_case_of, dtype_of, power_of_two, refuse_dtype
from kestrel_kernels_cuda.linear_scratch import counters
from kestrel_kernels_cuda.overlap import overlap, overlapped
from kestrel_kernels_cuda.recurrent_plan import meta_view

__all__ = ["IMPLS", "compile_cases", "gated_delta_step", "step_launch"]

LARGEST = 16384  # numbers of a head's state that a program holds in registers

REGISTERS = (
    168  # of a thread: three programs of the published head share a multiprocessor (measured on an H200)
)


def _config(key_dim: int, value_dim: int, itemsize: int) -> dict[str, int]:
    """One for every number of rows, so that a row's results do not depend on the others."""
    block_e = min(64, power_of_two(value_dim))
    warps = min(4, max(1, power_of_two(key_dim) * block_e // 1024))
    return {"BLOCK_E": block_e, "num_warps": warps, "PREFETCH": True} | (
        {"maxnreg": REGISTERS} if itemsize == 2 else {}
    )


def step_launch(
    qkv_TC: torch.Tensor,
    z_THE: torch.Tensor,
    a_TH: torch.Tensor,
    b_TH: torch.Tensor,
    weights: MixerWeights,
    key_heads: int,
    view: RecurrentView,
    layer: int,
    config: Mapping[str, int] | None = None,
) -> tuple[Launch, torch.Tensor]:
    """The launch and its output [T, H, E]. ``config``: instead of the committed one."""
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
    readers = once_per_launch(
        view, layer, f"gated_delta_step {key_heads}", lambda view: counters(device, tokens * key_heads)
    )
    config = config or _config(key_dim, value_dim, qkv_TC.element_size())
    meta: dict[str, Any] = {
        "KEY_HEADS": key_heads, "HEADS": heads, "D": key_dim, "E": value_dim, "BLOCK_D": power_of_two(key_dim),
        "TILES": power_of_two(value_dim) // config["BLOCK_E"], "TAPS": taps,
        "THREADS": 32 * config["num_warps"], **overlap(device), **config,
    }  # fmt: skip
    launch = Launch(
        heads_kernel,
        (heads, tokens),
        (
            qkv_TC, a_TH, b_TH, weights.conv_CW, weights.a_log_H, weights.dt_bias_H, z_THE, weights.norm_E, conv,
            state, view.slots_B, readers, out_THE, qkv_TC.stride(0), a_TH.stride(0), b_TH.stride(0),
            z_THE.stride(0), int(layer > 0), key_dim**-0.5, weights.eps,
        ),
        meta,
    )  # fmt: skip
    return launch, out_THE


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
    launch, out_THE = step_launch(qkv_TC, z_THE, a_TH, b_TH, weights, key_heads, view, layer)
    launch.run()
    if view.stores.shape[0]:
        _store(view, layer)
    return out_THE


def _store(view: RecurrentView, layer: int) -> None:
    """Copy rows' states to their checkpoints: only prompts have any, and few bring but one new token."""
    rows, targets = view.stores[:, 0], view.stores[:, 2]
    for name in ("conv", "state"):
        pool = view.parts[name][layer]
        pool.index_copy_(0, targets, pool.index_select(0, view.slots_B.index_select(0, rows)))


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


def _bare_launch(
    key_heads: int, heads: int, key_dim: int, value_dim: int, taps: int, dtype: torch.dtype
) -> Launch:
    """A launch without memory; it does not depend on rows."""
    keys, values, rows = key_heads * key_dim, heads * value_dim, 2

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
    view = meta_view(parts, rows, rows)
    return step_launch(qkv, z_THE, a, b, weights, key_heads, view, 0)[0]


def _warm(query: OpQuery, row_counts: Sequence[int]) -> Iterable[Callable[[], object]]:
    names = ("key_heads", "heads", "key_dim", "value_dim", "taps")
    key_heads, heads, key_dim, value_dim, taps = (query.get(name) for name in names)
    return (_bare_launch(key_heads, heads, key_dim, value_dim, taps, dtype_of(query)).compile,)


IMPLS: Mapping[str, Impl] = {"gated_delta_step": Impl(supports=supports, fn=gated_delta_step, warm=_warm)}


def compile_cases() -> Iterator[CompileCase]:
    """The published head, and float32 without groups."""
    for name, key_heads, dtype in (("bf16", 16, torch.bfloat16), ("float32", 32, torch.float32)):
        launch = _bare_launch(key_heads, 32, 128, 128, 4, dtype)
        yield compile_case_of(f"gated_delta_step {name}", launch)
        yield compile_case_of(f"gated_delta_step {name}, overlapped", overlapped(launch))
