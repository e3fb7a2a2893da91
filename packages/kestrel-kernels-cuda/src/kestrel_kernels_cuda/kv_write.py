"""qk_norm_rope_kv_write and write_kv: queries, keys and values in one launch, each program a few heads of one token.

Letters: T tokens, H query heads, K key/value heads, D head dim, R rotated dimensions, P pages, S page size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import torch
import triton
import triton.language as tl

from kestrel.spi import Impl, Limits, No, OpQuery, PagedView, Yes
from kestrel_kernels_cuda.compiling import CompileCase
from kestrel_kernels_cuda.launch import (
    Launch,
    compile_case_of,
    dtype_of,
    kv_dtype_of,
    power_of_two,
    refuse_pages,
)
from kestrel_kernels_cuda.overlap import overlap, overlapped, start_next, wait_for_previous
from kestrel_kernels_cuda.rotation import gains, prepared

__all__ = ["IMPLS", "compile_cases", "qk_norm_rope_kv_write", "write_kv"]

TILE = 1024  # numbers of one program


@triton.jit(
    do_not_specialize=["heads", "kv_heads", "q_groups", "kv_groups"],
    do_not_specialize_on_alignment=["slots"],  # they lie somewhere in a step's inputs
)
def kv_write_kernel(
    q, k, v, q_weight, k_weight, cos, sin, slots, out, k_out, k_pages, v_pages,
    heads, kv_heads, q_groups, kv_groups, eps,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_cos, stride_sin,
    stride_page, stride_head, stride_slot,
    DIM: tl.constexpr, PAGE: tl.constexpr, ROTATED: tl.constexpr, ADD_ONE: tl.constexpr,
    BLOCK: tl.constexpr, HEADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs (token, group): ``q_groups`` of query heads, ``kv_groups`` of keys, as many of values."""
    start_next(PDL)
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    lane = tl.arange(0, HEADS)[:, None]
    dim = tl.arange(0, BLOCK)[None, :]
    if group < q_groups:
        head = group * HEADS + lane
        q_gain, q_other = q_weight, q_weight
        if q_weight is not None:
            q_gain, q_other = gains(q_weight, head, heads, DIM, ROTATED, BLOCK, ADD_ONE)
        wait_for_previous(PDL)
        if q is not None:
            query = prepared(
                q, q_gain, q_other, cos, sin, token, head, heads, stride_qt, stride_qh,
                stride_cos, stride_sin, eps, DIM, ROTATED, BLOCK,
            )  # fmt: skip
            inside = (head < heads) & (dim < DIM)
            tl.store(out + (token * heads + head) * DIM + dim, query.to(out.dtype.element_ty), mask=inside)
    else:
        k_gain, k_other = k_weight, k_weight
        if k_weight is not None:
            k_gain, k_other = gains(k_weight, lane, HEADS, DIM, ROTATED, BLOCK, ADD_ONE)
        wait_for_previous(PDL)
        slot = tl.load(slots + token)
        place = (slot // PAGE) * stride_page + (slot % PAGE) * stride_slot
        if group < q_groups + kv_groups:
            head = (group - q_groups) * HEADS + lane
            key = prepared(
                k, k_gain, k_other, cos, sin, token, head, kv_heads, stride_kt, stride_kh,
                stride_cos, stride_sin, eps, DIM, ROTATED, BLOCK,
            )  # fmt: skip
            inside = (head < kv_heads) & (dim < DIM)
            # the keys' dtype first: what is stored is what a key of that dtype would be
            key = key.to(k.dtype.element_ty)
            if k_out is not None:
                tl.store(k_out + (token * kv_heads + head) * DIM + dim, key, mask=inside)
            tl.store(
                k_pages + place + head * stride_head + dim, key.to(k_pages.dtype.element_ty), mask=inside
            )
        else:
            head = (group - q_groups - kv_groups) * HEADS + lane
            inside = (head < kv_heads) & (dim < DIM)
            value = tl.load(v + token * stride_vt + head * stride_vh + dim, mask=inside, other=0.0)
            tl.store(
                v_pages + place + head * stride_head + dim, value.to(v_pages.dtype.element_ty), mask=inside
            )


def _config(dim: int) -> dict[str, int]:
    block = power_of_two(dim)
    return {"BLOCK": block, "HEADS": max(1, TILE // block)}


def _adjacent(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _pages(view: PagedView, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pages [P, K, S, D] of keys and of values."""
    k_pages, v_pages = view.k_LPKSD[layer], view.v_LPKSD[layer]
    assert k_pages.stride() == v_pages.stride(), "keys and values lie differently in their pages"
    assert k_pages.stride(-1) == 1, "a key's numbers are not adjacent"
    return k_pages, v_pages


def _launch(
    q_THD: torch.Tensor | None,
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    view: PagedView,
    layer: int,
    angles: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
    weights: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
    eps: float = 0.0,
    add_one: bool = False,
    gives_keys: bool = False,
) -> tuple[Launch, torch.Tensor | None, torch.Tensor | None]:
    """The launch, the queries it makes and the keys when it ``gives_keys``; without ``q_THD`` it writes keys and values
    alone."""
    k_pages, v_pages = _pages(view, layer)
    tokens, kv_heads, dim = k_TKD.shape
    k_TKD, v_TKD = _adjacent(k_TKD), _adjacent(v_TKD)
    cos, sin = angles
    turned = 0 if cos is None or sin is None else cos.shape[1]
    config = _config(dim)
    kv_groups = triton.cdiv(kv_heads, config["HEADS"])
    heads, q_groups, q_strides, out = 0, 0, (0, 0), None
    if q_THD is not None:
        q_THD = _adjacent(q_THD)
        heads, q_strides = q_THD.shape[1], q_THD.stride()[:2]
        q_groups = triton.cdiv(heads, config["HEADS"])
        out = q_THD.new_empty(q_THD.shape)
    k_out = k_TKD.new_empty(k_TKD.shape) if gives_keys else None
    launch = Launch(
        kv_write_kernel,
        (tokens, q_groups + 2 * kv_groups),
        (
            q_THD, k_TKD, v_TKD, *weights, cos, sin, view.slots_T, out, k_out, k_pages, v_pages,
            heads, kv_heads, q_groups, kv_groups, eps,
            *q_strides, *k_TKD.stride()[:2], *v_TKD.stride()[:2],
            0 if cos is None else cos.stride(0), 0 if sin is None else sin.stride(0), *k_pages.stride()[:3],
        ),
        {
            "DIM": dim, "PAGE": view.page_size, "ROTATED": turned, "ADD_ONE": add_one, "num_warps": 4,
            **config, **overlap(k_TKD.device),
        },
    )  # fmt: skip
    return launch, out, k_out


def qk_norm_rope_kv_write(
    q_THD: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    view: PagedView,
    layer: int,
    cos_TR: torch.Tensor | None = None,
    sin_TR: torch.Tensor | None = None,
    q_weight_D: torch.Tensor | None = None,
    k_weight_D: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    add_one: bool = False,
    gives_keys: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """As ``kestrel.ops.qk_norm_rope_kv_write``. What nothing changes is returned as it is."""
    q_changes = cos_TR is not None or q_weight_D is not None
    k_changes = cos_TR is not None or k_weight_D is not None
    launch, q_out, k_out = _launch(
        q_THD if q_changes else None, k_TKD, v_TKD, view, layer,
        (cos_TR, sin_TR), (q_weight_D, k_weight_D), eps, add_one, gives_keys and k_changes,
    )  # fmt: skip
    launch.run()
    q_out = q_THD if q_out is None else q_out
    return (q_out, k_TKD if k_out is None else k_out) if gives_keys else q_out


def write_kv(k_TKD: torch.Tensor, v_TKD: torch.Tensor, view: PagedView, layer: int) -> None:
    """As ``kestrel.ops.write_kv.write_kv``."""
    _launch(None, k_TKD, v_TKD, view, layer)[0].run()


def _meta_view(query: OpQuery) -> PagedView:
    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    pool = empty(
        1, 2, query.get("kv_heads"), query.get("page"), query.get("head_dim"), dtype=kv_dtype_of(query)
    )
    return PagedView(
        k_LPKSD=pool, v_LPKSD=pool, page_table_BN=empty(1, 1), slots_T=empty(2, dtype=torch.int64),
        computed_B=empty(1), cu_seqlens=empty(2), page_size=query.get("page"),
        limits=Limits(max_rows=1, max_tokens=2, max_query_len=2, max_context_len=2),
    )  # fmt: skip


def _meta_fused(query: OpQuery, *, gives_keys: bool = True) -> Launch:
    """A launch for one projection of q, k and v, as prefills make them."""
    heads, kv_heads, dim = (query.get("heads"), query.get("kv_heads"), query.get("head_dim"))
    packed = torch.empty((2, heads + 2 * kv_heads, dim), dtype=dtype_of(query), device="meta")
    q, k, v = packed.split_with_sizes([heads, kv_heads, kv_heads], dim=1)
    norm, turned = query.get("norm"), query.get("rot_dim")
    weight = torch.empty(dim, dtype=dtype_of(query), device="meta") if norm else None
    angle = torch.empty((2, turned), dtype=torch.float32, device="meta") if turned else None
    return _launch(
        q if norm or turned else None, k, v, _meta_view(query), 0, (angle, angle), (weight, weight), 1e-6,
        norm == "rms_plus_one", gives_keys and bool(norm or turned),
    )[0]  # fmt: skip


def _meta_write(query: OpQuery) -> Launch:
    k = torch.empty((2, query.get("kv_heads"), query.get("head_dim")), dtype=dtype_of(query), device="meta")
    return _launch(None, k, k, _meta_view(query), 0)[0]


def _warm(
    build: Callable[[OpQuery], Launch], query: OpQuery, row_counts: Sequence[int]
) -> Iterable[Callable[[], object]]:
    """One job: the kernel does not depend on the number of tokens."""
    return (build(query).compile,)


def _supports(query: OpQuery) -> Yes | No:
    return refuse_pages(query) or Yes()


IMPLS: Mapping[str, Impl] = {
    "qk_norm_rope_kv_write": Impl(
        supports=_supports, fn=qk_norm_rope_kv_write, warm=partial(_warm, _meta_fused)
    ),
    "write_kv": Impl(supports=_supports, fn=write_kv, warm=partial(_warm, _meta_write)),
}


def compile_cases() -> Iterator[CompileCase]:
    """Qwen's head of 256 with everything, the largest head, and a bare write."""

    def query(dim: int, turned: int, norm: str | None) -> OpQuery:
        return OpQuery.of(
            "", heads=16, kv_heads=4, head_dim=dim, page=16, rot_dim=turned, norm=norm, dtype="bfloat16"
        )

    qwen = _meta_fused(query(256, 64, "rms_plus_one"))
    yield compile_case_of("kv_write 256 fused", qwen)
    yield compile_case_of("kv_write 256 fused, overlapped", overlapped(qwen))
    yield compile_case_of("kv_write 512 fused", _meta_fused(query(512, 512, "rms")))
    yield compile_case_of("kv_write 64", _meta_write(query(64, 0, None)))
