"""Pages of 8 bits: which states they are for, what they save, and who refuses them."""

from dataclasses import replace

import pytest
import torch

from kestrel.config import RuntimeConfig
from kestrel.engine.kv_dtype import check_recurrent_dtype, kv_dtype_of, set_kv_dtype
from kestrel.errors import InvalidRequestError
from kestrel.layers import PagedAttention
from kestrel.ops import resolve_ops
from kestrel.ops.paged_attention import paged_attention
from kestrel.ops.qk_norm_rope_kv_write import qk_norm_rope_kv_write
from kestrel.ops.view_cases import ViewShape, make_view
from kestrel.ops.write_kv import copy_page, write_kv
from kestrel.spi import Built, CrossKV, PagedKV, Recurrent, RowExtent, StatePart, WindowKV
from kestrel.state import fixed_pages, pool_bytes
from kestrel.testing.toys import FakeTokenDriver

FP8, CPU = torch.float8_e4m3fn, torch.device("cpu")
EIGHT = RuntimeConfig(kv_cache_dtype="fp8_e4m3")
PAGES = {"layers": 1, "kv_heads": 2, "head_dim": 4}


def built(*states):
    driver = FakeTokenDriver(16)
    driver.spec = replace(driver.spec, states=states)
    return Built(main=driver)


def test_pages_take_a_quarter_of_float32_and_other_state_stays_as_it_is():
    cross = CrossKV(name="cross", max_len=3, **PAGES)
    delta = Recurrent(name="delta", layers=1, parts=(StatePart(name="state", shape=(2,)),))
    own = PagedKV(name="own", dtype="float32", **PAGES)
    model = built(PagedKV(name="full", **PAGES), WindowKV(name="near", window=8, **PAGES), cross, delta, own)
    set_kv_dtype(model, "auto", RuntimeConfig())
    before = model.main.spec
    set_kv_dtype(model, kv_dtype_of(EIGHT, CPU), EIGHT)
    assert [getattr(state, "dtype", None) for state in model.main.spec.states] == [
        "float8_e4m3fn", "float8_e4m3fn", "auto", None, "float32",
    ]  # fmt: skip
    sizes = fixed_pages(before, 7, max_rows=2)
    taken = [pool_bytes(spec, sizes, dtype=torch.float32, page_size=4) for spec in (before, model.main.spec)]
    assert taken[0] - taken[1] == 2 * 3 * (7 + 1) * 2 * 2 * 4 * 4  # of keys and values, in two states


def test_a_model_whose_state_does_not_follow_recurrent_dtype_refuses_it():
    def delta(dtype):
        return Recurrent(name="delta", layers=1, parts=(StatePart(name="state", shape=(2,), dtype=dtype),))

    half = RuntimeConfig(recurrent_dtype="bfloat16")
    check_recurrent_dtype(built(PagedKV(name="full", **PAGES), delta("bfloat16")), half)
    check_recurrent_dtype(built(delta("float32")), RuntimeConfig())
    for states in ((), (PagedKV(name="full", dtype="bfloat16", **PAGES),), (delta("float32"),)):
        with pytest.raises(
            InvalidRequestError, match=r"'bfloat16' was asked for, and .* keeps no state.*Leave"
        ):
            check_recurrent_dtype(built(*states), half)


async def test_a_model_without_weights_of_8_bits_refuses_to_keep_them(toys):
    with pytest.raises(InvalidRequestError, match=r"'keep' was asked for, and .* has no weights.*Leave"):
        await toys.create(toys.config(fp8_weights="keep"))
    async with toys.engine(fp8_weights="auto") as engine:
        assert (await engine.query(question="?", settings={"max_tokens": 1})).tokens


def test_a_model_without_pages_and_a_device_without_such_floats_refuse(monkeypatch):
    delta = Recurrent(name="delta", layers=1, parts=(StatePart(name="state", shape=(2,)),))
    with pytest.raises(InvalidRequestError, match=r"'fp8_e4m3' was asked for, and .* keeps no keys.*'auto'"):
        set_kv_dtype(built(delta), "float8_e4m3fn", EIGHT)
    with pytest.raises(InvalidRequestError, match="mps devices have no floats of 8 bits"):
        kv_dtype_of(EIGHT, torch.device("mps"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    with pytest.raises(InvalidRequestError, match=r"compute capability 8.6, less than 8.9"):
        kv_dtype_of(EIGHT, torch.device("cuda", 0))
    with pytest.raises(InvalidRequestError, match="fp8_e4m3"):
        RuntimeConfig(kv_cache_dtype="fp8")


def test_layers_say_what_pages_hold_and_only_then():
    for kept in ("auto", "float8_e4m3fn"):
        table = resolve_ops(kv_dtype=kept)
        PagedAttention(table, 4, 2, 16, "kv", 0)
        found = {row.query.get("kv_dtype") for row in table.rows()}
        assert found == ({None} if kept == "auto" else {kept})


def eight_bits(shape):
    view = make_view(shape, 5, CPU, torch.float32)
    return replace(view, k_LPKSD=view.k_LPKSD.to(FP8), v_LPKSD=view.v_LPKSD.to(FP8))


def test_what_is_too_large_for_eight_bits_is_cut_and_pages_are_copied_as_they_are():
    view = eight_bits(ViewShape(rows=(RowExtent(3, 0),)))
    k = torch.tensor([1e6, -1e6, 0.3]).view(3, 1, 1).expand(3, 2, 16)
    write_kv(k, k, view, 0)
    page = int(view.slots_T[0]) // view.page_size
    assert view.k_LPKSD.float()[0, page, 0, :3, 0].tolist() == [448.0, -448.0, 0.3125]
    copy_page(view.k_LPKSD, view.v_LPKSD, page, 0, 2)
    assert view.v_LPKSD.float()[0, 0, 0, :2, 0].tolist() == [448.0, -448.0]


@pytest.mark.parametrize("captured", [False, True])
def test_a_prefill_attends_to_its_own_keys_in_full(captured):
    shape = ViewShape(rows=(RowExtent(9, 0, ((2, 6),)), RowExtent(4, 0)), captured=captured)
    whole, kept = make_view(shape, 5, CPU, torch.float32), eight_bits(shape)
    q, k, v = (torch.randn(13, heads, 16) for heads in (4, 2, 2))
    outs = []
    for view in (whole, kept):
        query, key = qk_norm_rope_kv_write(q, k, v, view, 0, gives_keys=True)
        outs.append(paged_attention(query, view, 0, 0.25, None, None, key, v))
    torch.testing.assert_close(*outs)
