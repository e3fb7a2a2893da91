"""How the embedded model uses an accelerator's memory. Run with ``-m gpu``."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from kestrel.config import RuntimeConfig
from kestrel.engine import InferenceEngine
from kestrel.errors import CapacityError

pytestmark = pytest.mark.gpu

IMAGE = Path(__file__).parents[3] / "examples" / "images" / "bars.png"
GREEDY = {"temperature": 0.0, "max_tokens": 24}


def config(**settings: object) -> RuntimeConfig:
    return RuntimeConfig.from_mapping({"model": "kestrel/nano", "device": "cuda"} | settings)


async def test_no_room_for_state_is_refused_with_every_number():
    with pytest.raises(CapacityError, match=r"no memory is left for state.*its largest launches.*too much"):
        await InferenceEngine.create(config(memory_utilization=0.0001))


async def test_pools_and_all_else_stay_within_the_share_of_memory():
    share = 0.3
    total = torch.cuda.mem_get_info()[1]
    async with await InferenceEngine.create(config(memory_utilization=share)) as engine:
        calls = [engine.query(IMAGE, f"What is {i}?", settings=GREEDY) for i in range(64)]
        await asyncio.gather(*calls)
        free, _ = torch.cuda.mem_get_info()
        assert total - free <= share * total * 1.02


async def test_what_repeats_allocates_nothing_new():
    async with await InferenceEngine.create(config()) as engine:

        async def rounds(count: int) -> int:
            for _ in range(count):
                calls = [engine.query(IMAGE, f"What is {i}?", settings=GREEDY) for i in range(32)]
                await asyncio.gather(*calls)
            return torch.cuda.memory_reserved()

        await rounds(3)
        before = await rounds(3)
        assert await rounds(20) == before
