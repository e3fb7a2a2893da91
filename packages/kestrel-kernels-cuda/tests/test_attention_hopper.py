"""The kernel of vision attention for sm_90: what it takes, and on such a GPU what it computes."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed here")

from kestrel.ops.random import normal
from kestrel.ops.vision_attention import vision_attention as vision_reference
from kestrel_kernels_cuda.attention_hopper import (
    PAIRS,
    HopperConfig,
    hopper_config,
    hopper_launch,
    is_served,
    trios_of,
)

META = torch.device("meta")

needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs an sm_90"
)


def seed() -> int:
    return int(torch.randint(2**31, ()))


def qkv(
    shape: tuple[int, int, int, int], place: torch.device, dtype: torch.dtype = torch.bfloat16
) -> tuple[torch.Tensor, ...]:
    items, length, heads, dim = shape
    return normal(seed(), (items, length, 3, heads, dim), place, dtype).unbind(2)


def assert_agrees(inputs: tuple[torch.Tensor, ...], config: HopperConfig, tolerance: float = 2e-2) -> None:
    dim = inputs[0].shape[3]
    out, launch = hopper_launch(*inputs, dim**-0.5, config)
    launch.run()
    want = vision_reference(*(x.float() for x in inputs), dim**-0.5)
    torch.testing.assert_close(out.float(), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dim", [64, 72, 96])
def test_slices_of_one_projection_are_served(dim: int) -> None:
    assert is_served(90, *torch.empty((2, 9, 3, 4, dim), dtype=torch.bfloat16, device=META).unbind(2))


def test_other_architectures_widths_types_and_distances_are_not_served() -> None:
    def part(dim: int, width: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty((2, 9, 4, width), dtype=dtype, device=META)[..., :dim]

    assert not is_served(80, part(72, 72))
    assert not is_served(100, part(72, 72))
    assert not is_served(90, part(48, 48))
    assert not is_served(90, part(128, 128))
    assert not is_served(90, part(72, 72, torch.float32))
    assert not is_served(90, part(72, 76))


def test_groups_are_as_many_as_keep_all_multiprocessors_busy() -> None:
    assert hopper_config(36, 729, 16, 72, 132) == trios_of(72)[0]  # 18 units of 3 groups against 27 of 2
    assert hopper_config(9, 729, 16, 72, 132) == PAIRS  # 5 of 3 against 7 of 2
    assert hopper_config(8, 1500, 20, 64, 132) == trios_of(64)[0]
    assert hopper_config(1, 1500, 20, 64, 132) == PAIRS


@needs_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("groups", [2, 3])
@pytest.mark.parametrize("length", [1, 63, 64, 65, 128, 129, 200, 385, 729, 1500])
@pytest.mark.parametrize("dim", [64, 72, 80, 88])
def test_lengths_around_tiles_of_queries_and_blocks_of_keys(
    place: torch.device, dim: int, length: int, groups: int
) -> None:
    assert_agrees(qkv((3, length, 2, dim), place), PAIRS if groups == 2 else trios_of(dim)[0])


@needs_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 72])
def test_more_units_than_programs_in_float16(place: torch.device, dim: int) -> None:
    for config in (PAIRS, trios_of(dim)[0]):
        assert_agrees(qkv((9, 729, 16, dim), place, torch.float16), config, tolerance=3e-3)


@needs_hopper
@pytest.mark.gpu
def test_scores_that_grow_from_block_to_block(place: torch.device) -> None:
    q, k, v = qkv((2, 700, 2, 72), place)
    growth = torch.linspace(8, 0, 700, device=place).view(1, 700, 1, 1)
    assert_agrees((q, (k * growth).to(k.dtype), v), PAIRS)


@needs_hopper
@pytest.mark.gpu
def test_the_same_inputs_give_the_same_bits(place: torch.device) -> None:
    inputs = qkv((9, 729, 16, 72), place)
    first, launch = hopper_launch(*inputs, 0.1, trios_of(72)[0])
    launch.run()
    for _ in range(5):
        again, launch = hopper_launch(*inputs, 0.1, trios_of(72)[0])
        launch.run()
        assert torch.equal(first, again)
