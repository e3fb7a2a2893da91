"""Writes to pools of another dtype, and what a write leaves alone."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed here")

from kestrel.ops import OPS
from kestrel.spi import Limits, PagedView
from kestrel_kernels_cuda.kv_write import qk_norm_rope_kv_write, write_kv
from kestrel_kernels_cuda.pages import copy_page


def view_of(place: torch.device, dtype: torch.dtype, slots: list[int], dim: int = 16) -> PagedView:
    pool = [torch.randn(2, 5, 3, 4, dim).to(place, dtype) for _ in "kv"]
    return PagedView(
        k_LPKSD=pool[0], v_LPKSD=pool[1], page_table_BN=torch.zeros(1, 1, dtype=torch.int32, device=place),
        slots_T=torch.tensor(slots, device=place),
        computed_B=torch.zeros(1, dtype=torch.int32, device=place),
        cu_seqlens=torch.tensor([0, len(slots)], dtype=torch.int32, device=place),
        limits=Limits(max_rows=1, max_tokens=4, max_query_len=4, max_context_len=4), page_size=4,
    )  # fmt: skip


EIGHT_BITS = pytest.param(
    torch.float8_e4m3fn, marks=pytest.mark.gpu
)  # Triton 3.6 interprets their rounding wrongly


@pytest.mark.parametrize("dtype", [torch.float16, EIGHT_BITS])
def test_a_pool_may_hold_another_dtype_and_other_slots_stay(place: torch.device, dtype: torch.dtype) -> None:
    if dtype.itemsize == 1 and torch.cuda.get_device_capability(place) < (8, 9):
        pytest.skip("floats of eight bits need sm_89")
    view = view_of(place, dtype, [6, 19, 9])
    k, v = (torch.randn(3, 3, 16).to(place) for _ in "kv")
    before = view.k_LPKSD.float()
    write_kv(k, v, view, 1)
    for token, slot in enumerate((6, 19, 9)):
        at = (1, slot // 4, slice(None), slot % 4)
        assert torch.equal(view.v_LPKSD.float()[at], v[token].to(dtype).float())
        before[at] = k[token].to(dtype).float()
    assert torch.equal(view.k_LPKSD.float(), before)


def test_a_projection_with_gates_between_the_queries_is_read_as_it_is(place: torch.device) -> None:
    q, k, v = torch.randn(3, 5, 32), torch.randn(3, 6, 16), torch.randn(3, 3, 16)
    q, k, v = q.to(place)[..., :16], k.to(place)[:, 3:], v.to(place)
    weight, angle = torch.randn(16).to(place), torch.rand(3, 8).to(place)
    views = [view_of(place, torch.float32, [4, 5, 13]) for _ in range(2)]
    args = [(q, k, v, view, 0, angle, angle, weight, weight) for view in views]
    got = qk_norm_rope_kv_write(*args[0], add_one=True)
    want = OPS["qk_norm_rope_kv_write"].reference(*args[1], add_one=True)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    for slot in (4, 5, 13):
        here = [view.k_LPKSD[0, slot // 4, :, slot % 4] for view in views]
        torch.testing.assert_close(*here, atol=1e-5, rtol=1e-5)


def test_pages_of_one_byte_numbers_are_copied(place: torch.device) -> None:
    k, v = (torch.randint(0, 256, (2, 4, 3, 8, 16), dtype=torch.uint8).to(place) for _ in "kv")
    want = k.clone()
    want[:, 3, :, :5] = k[:, 1, :, :5]
    copy_page(k.view(torch.float8_e4m3fn), v.view(torch.float8_e4m3fn), 1, 3, 5)
    assert torch.equal(k, want)
