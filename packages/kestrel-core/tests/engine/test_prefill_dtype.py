"""Launches of many rows in 8 bits: which devices and models can, and what a refusal says."""

import pytest
import torch

from kestrel.config import RuntimeConfig
from kestrel.engine.prefill_dtype import check_prefill_dtype, prefill_dtype_of
from kestrel.errors import InvalidRequestError
from kestrel.layers import Linear
from kestrel.layers.e4m3 import E4M3Linear, multiplies_in_8_bits
from kestrel.ops import resolve_ops

EIGHT = RuntimeConfig(prefill_dtype="fp8_e4m3")
CPU = torch.device("cpu")


def test_it_is_off_unless_asked_for():
    assert prefill_dtype_of(RuntimeConfig(), CPU) == "auto"
    off, on = resolve_ops(), resolve_ops(prefill_dtype=prefill_dtype_of(EIGHT, CPU))
    assert not multiplies_in_8_bits(off)
    assert multiplies_in_8_bits(on)


def test_a_device_without_such_floats_is_refused_with_its_capability(monkeypatch):
    with pytest.raises(
        InvalidRequestError, match=r"mps devices have no floats of 8 bits.*prefill_dtype 'auto'"
    ):
        prefill_dtype_of(EIGHT, torch.device("mps"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    with pytest.raises(InvalidRequestError, match=r"compute capability 8.6, less than 8.9.*CUDA device of"):
        prefill_dtype_of(EIGHT, torch.device("cuda", 0))
    with pytest.raises(InvalidRequestError, match=r"prefill_dtype .*fp8_e4m3"):
        RuntimeConfig(prefill_dtype="fp8")


def test_a_model_that_does_not_offer_it_is_refused_by_name():
    ops = resolve_ops(prefill_dtype="float8_e4m3fn")
    linear = Linear(ops, 16, 16)
    with pytest.raises(InvalidRequestError, match=r"'fp8_e4m3' was asked for, and acme/foo .*'auto'"):
        check_prefill_dtype(ops, RuntimeConfig(model="acme/foo", prefill_dtype="fp8_e4m3"))
    E4M3Linear(ops, linear, adds_bias=True)
    check_prefill_dtype(ops, EIGHT)
