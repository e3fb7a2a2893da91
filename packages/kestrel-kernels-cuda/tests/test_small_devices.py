"""Devices with 99 KB of shared memory (sm_86, sm_89, sm_120) get launches that fit, or hear why there are none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed here")

from triton.runtime import OutOfResources

from kestrel.errors import ModelFaultError
from kestrel.spi import No, OpQuery, Yes
from kestrel_kernels_cuda import gated_delta
from kestrel_kernels_cuda.backend import CudaBackend
from kestrel_kernels_cuda.devices import Device, arch_of, as_if, shared_limit
from kestrel_kernels_cuda.launch import Launch

CPU = torch.device("cpu")
FP8 = (
    OpQuery.of("fp8_linear", k=2560, n=2560, epilogue=None, rows=1, dtype="bfloat16"),
    OpQuery.of(
        "fp8_grouped_experts",
        hidden=2048, experts=4, top_k=2, width=512, activation="silu_mul", dtype="bfloat16",
    ),
    OpQuery.of("e4m3_norm", dim=1152, kind="layer", delta=True, offset=True, dtype="bfloat16"),
    OpQuery.of("e4m3_cast", k=4304, activation="gelu_tanh", dtype="bfloat16"),
    OpQuery.of("e4m3_linear", k=1152, n=3456, dtype="bfloat16"),
)  # fmt: skip


@pytest.mark.timeout(600)
def test_launches_of_the_largest_shapes_fit_small_devices_and_spill_nothing(
    compiled_apart: Callable[..., list[Any]],
) -> None:
    lines = compiled_apart(Path(__file__).with_name("widest.py"))
    found = [line for line in lines if "refused" not in line]
    assert {line["arch"] for line in found} == {89, 120}
    errors = [f"{f['name']} for sm_{f['arch']}: {f['error']}" for f in found if f["error"]]
    assert not errors, "\n".join(errors)
    big = [f for f in found if f["shared"] > shared_limit(f["arch"])]
    assert not big, big
    spilled = [f for f in found if f["stack"] or f["local"]]
    assert not spilled, spilled
    refused = {line["query"].split("(")[0] for line in lines if line.get("arch") == 86}
    assert refused == {"fp8_linear", "fp8_grouped_experts", "paged_attention", "e4m3_norm", "e4m3_cast"}


@pytest.mark.parametrize("query", FP8, ids=lambda query: query.op)
def test_weights_of_8_bit_floats_are_refused_where_they_cannot_be_read(query: OpQuery) -> None:
    supports = CudaBackend().impls()[query.op].supports
    with as_if(Device(86)):
        answer = supports(query)
    assert isinstance(answer, No)
    assert answer.reason == "sm_86 does not read e4m3 floats; sm_89 and newer do"
    with as_if(Device(89)):
        assert isinstance(supports(query), Yes)


def test_what_lies_ahead_in_float32_is_less_where_shared_memory_is_small() -> None:
    for arch in (80, 86, 120):
        for dtype, stages in ((torch.float32, 1), (torch.bfloat16, 2)):
            _, scan, _ = gated_delta.configs_for(arch, (128, 128), 64, dtype)
            assert scan is not None
            assert scan["STAGES"] == stages


def test_a_stand_in_ends_with_its_block() -> None:
    before = arch_of(CPU)
    with as_if(Device(120)):
        assert arch_of(CPU) == 120
    assert arch_of(CPU) == before


class Greedy:
    """A kernel that asks for more than the device has."""

    __name__ = "greedy_kernel"

    def __getitem__(self, grid: tuple[int, ...]) -> Greedy:
        return self

    def __call__(self, *args: object, **meta: object) -> None:
        raise OutOfResources(156_420, 101_376, "shared memory")


def test_a_launch_that_asks_for_too_much_says_what_of_and_what_to_do() -> None:
    with pytest.raises(ModelFaultError, match="needs 156420 of shared memory") as e:
        Launch(Greedy(), (1,), (), {"BLOCK": 64}).run()
    assert "greedy_kernel with {'BLOCK': 64}" in str(e.value)
    assert "this device has 101376" in str(e.value)
    assert "reference" in str(e.value)
