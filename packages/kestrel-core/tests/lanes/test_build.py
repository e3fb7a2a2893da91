"""Lanes from settings: context, depth and pools."""

import pytest
import torch

from kestrel.config import RuntimeConfig
from kestrel.errors import CapacityError
from kestrel.lanes import build_token_lane
from kestrel.testing.toys import FakeTokenDriver, ToyHybrid

CPU = torch.device("cpu")
POSITION_BYTES = 8  # of the fake: a key and a value of one float32 number


def build(driver, kv_bytes=1 << 20, **config):
    sizes = {"max_batch_size": 4, "max_batched_tokens": 64, "page_size": 4} | config
    return build_token_lane(
        driver,
        RuntimeConfig(**sizes),
        device=CPU,
        dtype=torch.float32,
        kv_bytes=kv_bytes,
        sink=lambda events: None,
    )


def test_without_max_model_len_the_context_is_what_the_memory_holds():
    lane = build(FakeTokenDriver(max_positions=10_000), kv_bytes=POSITION_BYTES * 404)
    assert lane.limits.max_len == 400
    assert build(FakeTokenDriver(max_positions=300)).limits.max_len == 300


def test_a_context_that_the_memory_cannot_hold_is_refused_with_the_numbers():
    with pytest.raises(CapacityError, match="kv_cache_bytes"):
        build(FakeTokenDriver(), kv_bytes=POSITION_BYTES * 100, max_model_len=1000)
    with pytest.raises(CapacityError, match="kv_cache_bytes"):
        build(FakeTokenDriver(), kv_bytes=POSITION_BYTES)


def test_pages_can_be_given_instead_of_bytes():
    lane = build(FakeTokenDriver(), kv_cache_pages=10)
    assert lane.cache.stats().pages_total == 10
    assert lane.limits.pool_len == 40


def test_one_step_is_in_flight_on_a_cpu_unless_asked_otherwise():
    assert build(FakeTokenDriver()).config.steps_in_flight == 1
    assert build(FakeTokenDriver(), steps_in_flight=2).config.steps_in_flight == 2


def test_only_models_that_show_media_have_a_feature_pool():
    assert build(FakeTokenDriver()).features is None
    assert build(ToyHybrid(0)).features is not None


def test_features_have_room_for_one_launch_and_for_the_next():
    lane = build(ToyHybrid(0), max_batched_tokens=512)
    assert lane.features is not None
    assert lane.limits.max_len < 1024 <= lane.features.rows
