"""vision_attention: dense attention inside each item, by a kernel of ours or by cuDNN, as a table says.

A head dim that is no power of two is cut into two parts that are (72 = 64 + 8, padded to 64 + 16), so that little is
multiplied by zeros. Letters: N items, S positions of each, H heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch.nn.attention import SDPBackend, sdpa_kernel
from triton.tools.tensor_descriptor import TensorDescriptor

from kestrel.spi import Impl, No, OpQuery, Yes
from kestrel_kernels_cuda.attention_configs import arch_of
from kestrel_kernels_cuda.attention_parts import scale_factors, softmax_step
from kestrel_kernels_cuda.attention_warm import META, cases_of, jobs_of
from kestrel_kernels_cuda.compiling import CompileCase
from kestrel_kernels_cuda.launch import Launch, dtype_of, power_of_two, refuse_dtype

__all__ = ["IMPLS", "compile_cases", "vision_attention", "vision_launch"]

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
DESCRIBED: frozenset[int] = frozenset()
"""Head dims whose keys sm_90 reads through descriptors, where that was measured to be faster."""

_WIDE_TILES: dict[int, Tile] = {64: (32, 32, 8, 1), 128: (32, 32, 8, 1), 256: (16, 32, 8, 1)}  # float32


def parts_of(dim: int) -> tuple[int, int]:
    """Head dim ``dim`` as two padded powers of two; the second is 0 where one part is no wider."""
    whole = max(16, power_of_two(dim))
    first = whole // 2
    second = max(16, power_of_two(dim - first)) if dim > first else 0
    return (first, second) if whole > 16 and second and first + second < whole else (whole, 0)


@triton.jit
def part(base, rows, live, FIRST: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, IS_FULL: tl.constexpr):
    """Numbers FIRST to FIRST + WIDTH of each head at offsets ``rows``; zeros beyond D and where not ``live``."""
    at_d = FIRST + tl.arange(0, WIDTH)
    at = base + rows[:, None] + at_d[None, :]
    if FIRST + WIDTH > D:
        inside = (at_d < D)[None, :]
        return tl.load(at, mask=inside if IS_FULL else inside & live[:, None], other=0.0)
    if IS_FULL:
        return tl.load(at)
    return tl.load(at, mask=live[:, None], other=0.0)


@triton.jit
def vision_tiles(
    q1, q2, acc1, acc2, top, total, k, v, stride_k, stride_v, low, high, length, post,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, BLOCK_N: tl.constexpr, IS_FULL: tl.constexpr,
):  # fmt: skip
    """Keys ``low`` to ``high`` added to a tile of queries."""
    at_n = tl.arange(0, BLOCK_N)
    for at in range(low, high, BLOCK_N):
        position = at + at_n
        live = position < length
        k_rows, v_rows = position.to(tl.int64) * stride_k, position.to(tl.int64) * stride_v
        scores = tl.dot(q1, tl.trans(part(k, k_rows, live, 0, D1, D, IS_FULL)), input_precision="ieee")
        if D2:
            k2 = tl.trans(part(k, k_rows, live, D1, D2, D, IS_FULL))
            scores = tl.dot(q2, k2, scores, input_precision="ieee")
        if not IS_FULL:
            scores = tl.where(live[None, :], scores, float("-inf"))
        weights, shrink, top, total = softmax_step(scores, top, total, post, False)
        weights = weights.to(q1.dtype)
        v1 = part(v, v_rows, live, 0, D1, D, IS_FULL)
        acc1 = tl.dot(weights, v1, acc1 * shrink[:, None], input_precision="ieee")
        if D2:
            v2 = part(v, v_rows, live, D1, D2, D, IS_FULL)
            acc2 = tl.dot(weights, v2, acc2 * shrink[:, None], input_precision="ieee")
    return acc1, acc2, top, total


@triton.jit
def described_tiles(
    q1, q2, acc1, acc2, top, total, k1, k2, v1, v2, row, column, high, post, D2: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """Keys 0 to ``high`` added to a tile of queries, read through descriptors from ``row`` and ``column`` on. The
    second part ends in numbers of the next head: they meet zeros of the queries, and outputs that are not written."""
    for at in range(0, high, BLOCK_N):
        scores = tl.dot(q1, tl.trans(k1.load([row + at, column])), input_precision="ieee")
        if D2:
            scores = tl.dot(q2, tl.trans(k2.load([row + at, column + 64])), scores, input_precision="ieee")
        weights, shrink, top, total = softmax_step(scores, top, total, post, False)
        weights = weights.to(q1.dtype)
        acc1 = tl.dot(weights, v1.load([row + at, column]), acc1 * shrink[:, None], input_precision="ieee")
        if D2:
            tail = v2.load([row + at, column + 64])
            acc2 = tl.dot(weights, tail, acc2 * shrink[:, None], input_precision="ieee")
    return acc1, acc2, top, total


@triton.jit(do_not_specialize=["length"])
def vision_kernel(
    q, k, v, out, k1, k2, v1, v2, post, length,
    stride_qn, stride_qs, stride_kn, stride_ks, stride_vn, stride_vs,
    Q_HEAD: tl.constexpr, K_HEAD: tl.constexpr, V_HEAD: tl.constexpr, HEADS: tl.constexpr,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One tile of queries of one head of one item. Strides between heads are constants, as Triton has to see that 72
    numbers are a multiple of 16 bytes."""
    head, item = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    query = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    live = query < length
    wide = query.to(tl.int64)
    q += item * stride_qn + head * Q_HEAD
    k += item * stride_kn + head * K_HEAD
    v += item * stride_vn + head * V_HEAD
    q1 = part(q, wide * stride_qs, live, 0, D1, D, False)
    q2 = q1
    acc1 = tl.zeros([BLOCK_M, D1], tl.float32)
    acc2 = acc1
    if D2:
        q2 = part(q, wide * stride_qs, live, D1, D2, D, False)
        acc2 = tl.zeros([BLOCK_M, D2], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    clear = length // BLOCK_N * BLOCK_N
    if k1 is not None:
        row, column = tl.program_id(2) * length, tl.program_id(1) * D
        acc1, acc2, top, total = described_tiles(
            q1, q2, acc1, acc2, top, total, k1, k2, v1, v2, row, column, clear, post, D2, BLOCK_N
        )
    else:
        acc1, acc2, top, total = vision_tiles(
            q1, q2, acc1, acc2, top, total, k, v, stride_ks, stride_vs, 0, clear, length, post,
            D, D1, D2, BLOCK_N, True,
        )  # fmt: skip
    acc1, acc2, top, total = vision_tiles(
        q1, q2, acc1, acc2, top, total, k, v, stride_ks, stride_vs, clear, length, length, post,
        D, D1, D2, BLOCK_N, False,
    )  # fmt: skip
    scale = 1.0 / total
    rows = out + ((item * length + wide) * HEADS + head)[:, None] * D
    at_d = tl.arange(0, D1)
    kind = out.dtype.element_ty
    tl.store(rows + at_d[None, :], (acc1 * scale[:, None]).to(kind), mask=live[:, None] & (at_d < D)[None, :])
    if D2:
        at_d = D1 + tl.arange(0, D2)
        mask = live[:, None] & (at_d < D)[None, :]
        tl.store(rows + at_d[None, :], (acc2 * scale[:, None]).to(kind), mask=mask)


def tile_of(arch: int, dim: int, itemsize: int) -> Tile:
    """The tile for head dim ``dim``."""
    first, second = parts_of(dim)
    first = max(64, first)
    if itemsize == 4:
        return _WIDE_TILES[max(first, power_of_two(dim))]
    tiles = _TILES["sm_90" if 90 <= arch < 120 else "sm_80" if arch == 80 else "small"]
    return tiles.get((first, second), tiles[max(64, power_of_two(dim)), 0])


def described_on(arch: int, dim: int) -> bool:
    """Whether keys are read through descriptors (tensor memory access of sm_90)."""
    return 90 <= arch < 120 and dim in DESCRIBED


def _is_flat(x_NSHD: torch.Tensor) -> bool:
    """Rows of all items at one distance, a multiple of 16 bytes, with heads side by side: what a descriptor needs."""
    items, length, _, dim = x_NSHD.shape
    stride_n, stride_s, stride_h, _ = x_NSHD.stride()
    is_dense = stride_h == dim and (items == 1 or stride_n == length * stride_s)
    return is_dense and x_NSHD.element_size() == 2 and not (stride_s % 8 or x_NSHD.data_ptr() % 16)


def _described(x_NSHD: torch.Tensor, rows: int, width: int) -> TensorDescriptor:
    """Blocks of ``rows`` by ``width`` of ``x`` as a matrix [N · S, H · D]."""
    items, length, heads, dim = x_NSHD.shape
    return TensorDescriptor(x_NSHD, [items * length, heads * dim], [x_NSHD.stride(1), 1], [rows, width])


def vision_launch(
    q_NSHD: torch.Tensor,
    k_NSHD: torch.Tensor,
    v_NSHD: torch.Tensor,
    scale: float,
    tile: Tile,
    is_described: bool = False,
) -> tuple[torch.Tensor, Launch]:
    """Outputs [N, S, H, D], and what computes them."""
    items, length, heads, dim = q_NSHD.shape
    block_m, block_n, warps, stages = tile
    first, second = parts_of(dim)
    out = torch.empty((items, length, heads, dim), dtype=q_NSHD.dtype, device=q_NSHD.device)
    strides = [x.stride() for x in (q_NSHD, k_NSHD, v_NSHD)]
    assert all(s[3] == 1 for s in strides), f"q, k and v need dense heads, not strides {strides}"
    described: list[TensorDescriptor | None] = [None] * 4
    if is_described and first == 64 and all(_is_flat(x) for x in (k_NSHD, v_NSHD)):
        widths = (first, second) if second else (first,)
        for i, x in enumerate((k_NSHD, v_NSHD)):
            described[2 * i : 2 * i + len(widths)] = [_described(x, block_n, width) for width in widths]
    post = scale_factors(scale, None)[1]
    distances = [number for stride in strides for number in stride[:2]]
    args = (q_NSHD, k_NSHD, v_NSHD, out, *described, post, length, *distances)
    meta = {
        "Q_HEAD": strides[0][2], "K_HEAD": strides[1][2], "V_HEAD": strides[2][2],
        "HEADS": heads, "D": dim, "D1": first, "D2": second, "BLOCK_M": block_m, "BLOCK_N": block_n,
        "num_warps": warps, "num_stages": stages,
    }  # fmt: skip
    return out, Launch(vision_kernel, (triton.cdiv(length, block_m), heads, items), args, meta)


def vision_attention(
    q_NSHD: torch.Tensor, k_NSHD: torch.Tensor, v_NSHD: torch.Tensor, scale: float
) -> torch.Tensor:
    """As ``kestrel.ops.vision_attention``: outputs [N, S, H, D]."""
    arch, dim, size = arch_of(q_NSHD.device), q_NSHD.shape[3], q_NSHD.element_size()
    if (arch, dim) in LIBRARY and size == 2 and q_NSHD.is_cuda and q_NSHD.numel():
        return library_attention(q_NSHD, k_NSHD, v_NSHD, scale)
    out, launch = vision_launch(
        q_NSHD, k_NSHD, v_NSHD, scale, tile_of(arch, dim, size), described_on(arch, dim)
    )
    launch.run()
    return out


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


def _planned(query: OpQuery, arch: int) -> Launch:
    heads, dim, dtype = query.get("heads"), query.get("head_dim"), dtype_of(query)
    q, k, v = torch.empty((1, 64, 3, heads, dim), dtype=dtype, device=META).unbind(2)
    return vision_launch(q, k, v, 1.0, tile_of(arch, dim, q.element_size()), described_on(arch, dim))[1]


def _warm(query: OpQuery, row_counts: Sequence[int]) -> Iterable[Callable[[], object]]:
    return jobs_of([_planned(query, arch_of(META))])


def compile_cases() -> Iterator[CompileCase]:
    """Towers of models, and the widest head."""
    for heads, dim, dtype in (
        (16, 72, "bfloat16"), (20, 64, "bfloat16"), (16, 80, "bfloat16"), (16, 88, "bfloat16"), (4, 128, "bfloat16"),
        (4, 256, "bfloat16"), (16, 72, "float32"),
    ):  # fmt: skip
        query = OpQuery.of("vision_attention", heads=heads, head_dim=dim, dtype=dtype)
        for arch in (80, 90) if dim == 72 else (90,):
            yield from cases_of(f"vision_attention {dim} {dtype}", [_planned(query, arch)], (arch,))


IMPLS = {"vision_attention": Impl(supports=_supports, fn=vision_attention, warm=_warm)}
