"""Pools sized by what the largest launches were seen to take, on a device whose numbers are made up."""

from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from engine_toys import assert_threads_end, lanes

from kestrel.config import RuntimeConfig
from kestrel.engine import building, memory
from kestrel.engine.memory import GPU_SHARE, PROGRAM_BYTES, Demand, settle_memory
from kestrel.errors import CapacityError
from kestrel.lanes import trial

GIB = 2**30
GPU = torch.device("cuda", 0)


@dataclass
class Device:
    """``total`` bytes, of which ``free`` are left; tensors peak at ``peak`` above ``allocated``."""

    total: int
    free: int
    allocated: int = 0
    peak: int = 0


@pytest.fixture
def device(monkeypatch):
    """80 GiB of which 60 are free, launches that take 2."""
    device = Device(80 * GIB, 60 * GIB, allocated=8 * GIB, peak=10 * GIB)
    monkeypatch.setattr(memory, "total_memory", lambda _: device.total)
    monkeypatch.setattr(memory, "free_memory", lambda _: device.free)
    monkeypatch.setattr(trial, "allocated_memory", lambda _: device.allocated)
    monkeypatch.setattr(trial, "peak_memory", lambda _: device.peak)
    monkeypatch.setattr(building, "counts_peaks", lambda _: True)
    return device


def settled(launches=2 * GIB, captures=False, sharers=1, kv_bytes=GIB, **settings):
    config = RuntimeConfig(model="toy", **settings)
    blueprint = SimpleNamespace(config=config, card=SimpleNamespace(model_id="toy"))
    demand = Demand(
        dtype=torch.bfloat16,
        weight_bytes=8 * GIB,
        kv_bytes=kv_bytes,
        kv_pages=config.kv_cache_pages,
        setting="memory_utilization",
        sharers=sharers,
    )
    return settle_memory(demand, blueprint, GPU, launch_bytes=launches, captures=captures)


def test_state_gets_what_weights_others_and_launches_leave(device):
    assert settled(memory_utilization=0.5).kv_bytes == 40 * GIB - 20 * GIB - 2 * GIB
    assert settled().kv_bytes == int(80 * GIB * GPU_SHARE) - 22 * GIB


def test_captured_programs_keep_activations_of_their_own(device):
    assert settled().kv_bytes - settled(captures=True).kv_bytes == 2 * GIB + PROGRAM_BYTES


def test_models_to_come_get_their_share(device):
    assert settled(sharers=3).kv_bytes == settled().kv_bytes // 3


def test_no_room_for_state_is_refused_with_every_number(device):
    with pytest.raises(CapacityError) as caught:
        settled(memory_utilization=0.25, launches=3 * GIB, captures=True)
    message = str(caught.value)
    for part in (
        "Of 20.00 GiB that 'toy' may use of cuda:0's 80.00 GiB",
        "its weights take 8.00 GiB, others 12.00 GiB",
        "its largest launches (2048 tokens, 64 rows) 3.00 GiB and captured programs 3.25 GiB: 6.25 GiB too much",
        "Raise memory_utilization (0.25), lower max_batched_tokens",
    ):
        assert part in message


def test_an_explicit_size_is_taken_as_it_is_while_it_fits(device):
    assert settled(kv_cache_bytes=57 * GIB, kv_bytes=57 * GIB).kv_bytes == 57 * GIB
    with pytest.raises(
        CapacityError, match=r"kv_cache_bytes is 59.00 GiB.*58.00 GiB are left. Lower kv_cache"
    ):
        settled(kv_cache_bytes=59 * GIB, kv_bytes=59 * GIB)


async def test_a_models_pools_are_sized_by_its_measured_launches(toys, device, monkeypatch):
    seen = []
    real = building.settle_memory

    def settle(demand, *args, **numbers):
        seen.append(numbers)
        return replace(real(demand, *args, **numbers), kv_bytes=200_000)

    monkeypatch.setattr(building, "settle_memory", settle)
    async with toys.engine(driver="hybrid", kv_cache_bytes=None, max_batched_tokens=64) as engine:
        (lane,) = lanes(engine)
        assert 64 <= lane.limits.max_len <= 1024
        assert (await engine.query(question="?")).output
    (numbers,) = seen
    assert numbers["captures"]
    assert 2 * GIB - 10**6 < numbers["launch_bytes"] < 2 * GIB, "the state of the trial is not the launches'"


async def test_pools_too_small_for_one_sequence_say_where_the_memory_went(toys, device):
    device.free = 10 * GIB + 40_000
    with pytest.raises(CapacityError, match=r"one sequence of .* Of 72.00 GiB that 'toy' may use"):
        await toys.create(
            toys.config(driver="hybrid", kv_cache_bytes=None, max_model_len=1024, decode_path="native")
        )
    assert_threads_end()


async def test_launches_that_fail_leave_the_estimate(toys, device, monkeypatch, caplog):
    def broken(*args, **kwargs):
        raise RuntimeError("no kernel")

    monkeypatch.setattr(building, "launch_memory", broken)
    async with toys.engine(driver="hybrid") as engine:
        assert (await engine.query(question="?")).output
    assert "could not be measured" in caplog.text
