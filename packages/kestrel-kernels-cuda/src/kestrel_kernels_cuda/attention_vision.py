"""vision_attention: dense attention inside each item, by a kernel of ours or by cuDNN, as a table says.

Letters: N items, S positions of each, H heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
from torch.nn.attention import SDPBackend, sdpa_kernel
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from kestrel.spi import Impl, No, OpQuery, Yes
from kestrel_kernels_cuda.attention_configs import arch_of, family_of, multiprocessors, overlaps
from kestrel_kernels_cuda.attention_hopper import (
    MEASURED,
    PAIRS,
    hopper_config,
    hopper_launch,
    is_served,
    trios_of,
)
from kestrel_kernels_cuda.attention_parts import overlap, scale_factors
from kestrel_kernels_cuda.attention_vision_kernels import vision_kernel
from kestrel_kernels_cuda.attention_warm import META, cases_of
from kestrel_kernels_cuda.compiling import CompileCase
from kestrel_kernels_cuda.launch import Launch, dtype_of, jobs_of, power_of_two, refuse_dtype

__all__ = ["IMPLS", "VisionConfig", "compile_cases", "config_of", "vision_attention", "vision_launch"]

WIDEST = 256

LIBRARY: frozenset[tuple[int, int]] = frozenset()
"""(architecture, head dim) where cuDNN was measured to be faster than the kernel here."""

BACKENDS = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION)

Tile = tuple[int, int, int, int]  # queries, keys, warps, stages

_TILES: dict[str, dict[tuple[int, int], Tile]] = {  # by the padded parts of the head dim
    "sm_90": {
        (64, 0): (128, 64, 8, 3), (64, 16): (64, 64, 4, 3), (64, 32): (64, 64, 4, 3), (128, 0): (128, 64, 8, 3),
        (256, 0): (64, 64, 8, 2),
    },
    "sm_80": {
        (64, 0): (128, 64, 8, 3), (64, 16): (128, 64, 8, 3), (64, 32): (128, 64, 8, 3), (128, 0): (64, 64, 8, 2),
        (256, 0): (64, 32, 8, 2),
    },
    "small": {
        (64, 0): (128, 64, 8, 2), (64, 16): (128, 64, 8, 2), (64, 32): (128, 64, 8, 2), (128, 0): (128, 32, 8, 2),
        (256, 0): (64, 32, 8, 2),
    },
}  # fmt: skip
DESCRIBED = frozenset({72})
"""Head dims whose keys sm_90 reads through descriptors, where that was measured to be faster."""

_WIDE_TILES: dict[int, Tile] = {64: (32, 32, 8, 1), 128: (32, 32, 8, 1), 256: (16, 32, 8, 1)}  # float32


def parts_of(dim: int) -> tuple[int, int]:
    """Head dim ``dim`` as two padded powers of two; the second is 0 where one part is no wider."""
    whole = max(16, power_of_two(dim))
    first = whole // 2
    second = max(16, power_of_two(dim - first)) if dim > first else 0
    return (first, second) if whole > 16 and second and first + second < whole else (whole, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """How to launch: the tile, whether keys are read through descriptors (tensor memory access of sm_90), and whether
    the kernel starts while the one before it finishes."""

    tile: Tile
    is_described: bool = False
    overlaps: bool = False


def config_of(arch: int, dim: int, itemsize: int) -> VisionConfig:
    """The configuration for head dim ``dim``."""
    first, second = parts_of(dim)
    if itemsize == 4:
        return VisionConfig(tile=_WIDE_TILES[max(64, power_of_two(dim))], overlaps=overlaps(arch))
    family = family_of(arch)
    whole = max(64, power_of_two(dim)), 0
    tile = _TILES[family].get((max(64, first), second), _TILES[family][whole])
    return VisionConfig(
        tile=tile, is_described=family == "sm_90" and dim in DESCRIBED, overlaps=overlaps(arch)
    )


def _is_flat(x_NSHD: torch.Tensor) -> bool:
    """Rows of all items at one distance, a multiple of 16 bytes, with heads side by side: what a descriptor needs."""
    items, length, _, dim = x_NSHD.shape
    stride_n, stride_s, stride_h, _ = x_NSHD.stride()
    is_dense = stride_h == dim and (items == 1 or stride_n == length * stride_s)
    is_aligned = not (stride_s % 8 or x_NSHD.data_ptr() % 16)
    return is_dense and is_aligned and x_NSHD.element_size() == 2 and x_NSHD.numel() > 0


def _described(x_NSHD: torch.Tensor, rows: int, width: int) -> TensorDescriptor:
    """Blocks of ``rows`` by ``width`` of ``x`` as a matrix [N · S, H · D]."""
    items, length, heads, dim = x_NSHD.shape
    return TensorDescriptor(x_NSHD, [items * length, heads * dim], [x_NSHD.stride(1), 1], [rows, width])


def vision_launch(
    q_NSHD: torch.Tensor,
    k_NSHD: torch.Tensor,
    v_NSHD: torch.Tensor,
    scale: float,
    config: VisionConfig,
) -> tuple[torch.Tensor, Launch]:
    """Outputs [N, S, H, D], and what computes them."""
    items, length, heads, dim = q_NSHD.shape
    block_m, block_n, warps, stages = config.tile
    first, second = parts_of(dim)
    out = torch.empty((items, length, heads, dim), dtype=q_NSHD.dtype, device=q_NSHD.device)
    strides = [x.stride() for x in (q_NSHD, k_NSHD, v_NSHD)]
    assert all(s[3] == 1 for s in strides), f"q, k and v need dense heads, not strides {strides}"
    described: list[TensorDescriptor | None] = [None] * 4
    if config.is_described and first == 64 and all(_is_flat(x) for x in (k_NSHD, v_NSHD)):
        widths = (first, second) if second else (first,)
        for i, x in enumerate((k_NSHD, v_NSHD)):
            described[2 * i : 2 * i + len(widths)] = [_described(x, block_n, width) for width in widths]
    post = scale_factors(scale, None)[1]
    distances = [number for stride in strides for number in stride[:2]]
    args = (q_NSHD, k_NSHD, v_NSHD, out, *described, post, length, *distances)
    meta = {
        "Q_HEAD": strides[0][2], "K_HEAD": strides[1][2], "V_HEAD": strides[2][2],
        "HEADS": heads, "D": dim, "D1": first, "D2": second, "BLOCK_M": block_m, "BLOCK_N": block_n,
        **overlap(config.overlaps, vision_kernel), "num_warps": warps, "num_stages": stages,
    }  # fmt: skip
    return out, Launch(vision_kernel, (triton.cdiv(length, block_m), heads, items), args, meta)


def vision_attention(
    q_NSHD: torch.Tensor, k_NSHD: torch.Tensor, v_NSHD: torch.Tensor, scale: float
) -> torch.Tensor:
    """As ``kestrel.ops.vision_attention``: outputs [N, S, H, D]."""
    arch, dim, size = arch_of(q_NSHD.device), q_NSHD.shape[3], q_NSHD.element_size()
    if (arch, dim) in LIBRARY and size == 2 and q_NSHD.is_cuda and q_NSHD.numel():
        return library_attention(q_NSHD, k_NSHD, v_NSHD, scale)
    out, launch = launch_of(arch, q_NSHD, k_NSHD, v_NSHD, scale)
    launch.run()
    return out


def launch_of(
    arch: int, q_NSHD: torch.Tensor, k_NSHD: torch.Tensor, v_NSHD: torch.Tensor, scale: float
) -> tuple[torch.Tensor, Launch]:
    """Outputs [N, S, H, D], and what computes them on ``arch``."""
    dim = q_NSHD.shape[3]
    is_compiled = isinstance(vision_kernel, JITFunction)
    if is_compiled and dim in MEASURED and is_served(arch, q_NSHD, k_NSHD, v_NSHD):
        config = hopper_config(*q_NSHD.shape, multiprocessors(q_NSHD.device))
        return hopper_launch(q_NSHD, k_NSHD, v_NSHD, scale, config)
    return vision_launch(q_NSHD, k_NSHD, v_NSHD, scale, config_of(arch, dim, q_NSHD.element_size()))


def library_attention(
    q_NSHD: torch.Tensor,
    k_NSHD: torch.Tensor,
    v_NSHD: torch.Tensor,
    scale: float,
    backends: Sequence[SDPBackend] = BACKENDS,
) -> torch.Tensor:
    """The same by the first of torch's ``backends`` that takes it."""
    q, k, v = (x.transpose(1, 2) for x in (q_NSHD, k_NSHD, v_NSHD))
    with sdpa_kernel(list(backends), set_priority=True):
        return F.scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2)


def _supports(query: OpQuery) -> Yes | No:
    if query.get("head_dim") > WIDEST:
        return No(f"serves head dims up to {WIDEST}, not {query.get('head_dim')}")
    return refuse_dtype(query) or Yes()


def _planned(query: OpQuery, arch: int) -> list[Launch]:
    """What launches of ``query`` may run, by numbers of items and positions."""
    heads, dim, dtype = query.get("heads"), query.get("head_dim"), dtype_of(query)
    q, k, v = torch.empty((1, 64, 3, heads, dim), dtype=dtype, device=META).unbind(2)
    launch = launch_of(arch, q, k, v, 1.0)[1]
    if launch.kernel is vision_kernel:
        return [launch]
    return [hopper_launch(q, k, v, 1.0, config)[1] for config in (PAIRS, trios_of(dim)[0])]


def _warm(query: OpQuery, row_counts: Sequence[int]) -> Iterable[Callable[[], object]]:
    return jobs_of(_planned(query, arch_of(META)))


def compile_cases() -> Iterator[CompileCase]:
    """Towers of models, and the widest head."""
    for heads, dim, dtype in (
        (16, 72, "bfloat16"), (20, 64, "bfloat16"), (16, 80, "bfloat16"), (16, 88, "bfloat16"), (4, 128, "bfloat16"),
        (4, 256, "bfloat16"), (16, 72, "float32"),
    ):  # fmt: skip
        query = OpQuery.of("vision_attention", heads=heads, head_dim=dim, dtype=dtype)
        for arch in (80, 90) if dim == 72 else (90,):
            yield from cases_of(f"vision_attention {dim} {dtype}", _planned(query, arch), (arch,))


IMPLS = {"vision_attention": Impl(supports=_supports, fn=vision_attention, warm=_warm)}
