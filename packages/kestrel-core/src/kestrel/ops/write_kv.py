"""write_kv: this launch's keys and values go to their pages. copy_page: a page's filled part goes to another page.

Letters: T tokens, K key/value heads, D head dim, L layers, P pages, S page size.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from kestrel.ops.op import Case, Inputs, Op, Tolerance
from kestrel.ops.pages import bytes_of, once_per_launch, rows_of_slots
from kestrel.ops.random import normal
from kestrel.ops.view_cases import VIEW_SHAPES, ViewShape, make_view
from kestrel.spi.batch import PagedView

__all__ = ["COPY_PAGE", "WRITE_KV", "copy_page", "stored", "write_kv"]


def write_kv(k_TKD: torch.Tensor, v_TKD: torch.Tensor, view: PagedView, layer: int) -> None:
    """Write each token's key and value to ``view.slots_T`` of ``layer``. Tokens of dead rows go to scratch page 0.

    Two tokens never share a slot, scratch excepted: what scratch holds afterwards is undefined.
    """
    rows = once_per_launch(view, layer, "write", _stage)
    for pool_LPKSD, new_TKD in ((view.k_LPKSD, k_TKD), (view.v_LPKSD, v_TKD)):
        dim = new_TKD.shape[-1]
        new = stored(new_TKD.reshape(-1, dim), pool_LPKSD.dtype)
        bytes_of(pool_LPKSD[layer].view(-1, dim)).index_copy_(0, rows, bytes_of(new))


def stored(new: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``new`` in ``dtype``; what 8 bits cannot hold becomes the largest number that they can (torch: NaN)."""
    if dtype.itemsize == 1:
        most = torch.finfo(dtype).max
        new = new.clamp(-most, most)
    return new.to(dtype)


def _stage(view: PagedView) -> torch.Tensor:
    return rows_of_slots(view.slots_T, view.k_LPKSD.shape[2], view.page_size).view(-1)


def copy_page(k_LPKSD: torch.Tensor, v_LPKSD: torch.Tensor, src: int, dst: int, filled: int) -> None:
    """Copy the first ``filled`` positions of page ``src`` to page ``dst`` in every layer; the rest of ``dst`` stays."""
    for pool in (k_LPKSD, v_LPKSD):
        pool[:, dst, :, :filled] = pool[:, src, :, :filled]


def _make_write(shape: ViewShape, seed: int, device: torch.device, dtype: torch.dtype) -> Inputs:
    view = make_view(shape, seed, device, dtype)
    size = (shape.tokens, shape.kv_heads, shape.head_dim)
    k, v = normal(seed + 1, size, device, dtype), normal(seed + 2, size, device, dtype)
    return Inputs(args=(k, v, view, 1), written=(view.k_LPKSD[:, 1:], view.v_LPKSD[:, 1:]))


def _write_cases() -> Sequence[Case]:
    return [
        Case(op="write_kv", name=name, make=partial(_make_write, shape), facts=shape.facts())
        for name, shape in VIEW_SHAPES.items()
    ]


def _make_copy(
    size: tuple[int, ...], filled: int, seed: int, device: torch.device, dtype: torch.dtype
) -> Inputs:
    k, v = normal(seed, size, device, dtype), normal(seed + 1, size, device, dtype)
    return Inputs(args=(k, v, 1, size[1] - 1, filled), written=(k, v))


def _copy_cases() -> Sequence[Case]:
    sizes = {"smallest": ((1, 3, 1, 1, 2), 1), "odd": ((3, 5, 3, 7, 10), 4), "none": ((2, 4, 2, 16, 64), 0)}
    return [
        Case(
            op="copy_page",
            name=name,
            make=partial(_make_copy, size, filled),
            facts={"head_dim": size[-1], "kv_heads": size[2]},
        )
        for name, (size, filled) in {**sizes, "whole": ((2, 4, 4, 16, 256), 16)}.items()
    ]


EXACT = dict.fromkeys(("float32", "bfloat16", "float16"), Tolerance(0.0, 0.0))  # copies
WRITE_KV = Op(
    name="write_kv",
    reference=write_kv,
    cases=_write_cases,
    tolerances=EXACT,
    facts={
        "head_dim": "D",
        "kv_heads": "K",
        "page": "S",
        "dtype": "of the keys",
        "kv_dtype": "of pages, None where it is the same",
    },
)
COPY_PAGE = Op(
    name="copy_page",
    reference=copy_page,
    cases=_copy_cases,
    tolerances=EXACT,
    facts={"head_dim": "D", "kv_heads": "K", "dtype": "of the pools"},
)
