import numpy as np
import pytest
import torch
from moondream_oracle import Oracle, tile_counts

from kestrel.ops.resize_crops import resize_crops
from kestrel.spi import ImageItem
from kestrel_moondream.config import VisionConfig
from kestrel_moondream.crops import cut, tiling
from kestrel_moondream.pictures import crops_of, inputs_of
from kestrel_moondream.prepare import prepare_image

VISION = VisionConfig()
SMALL = VisionConfig(crop_size=28, enc_patch_size=4, overlap_margin=1)


@pytest.mark.parametrize(
    ("size", "tiles"),
    [
        ((640, 480), (2, 4)), ((1500, 500), (2, 6)), ((2600, 2100), (3, 3)), ((200, 150), (1, 1)),
        ((378, 378), (1, 1)), ((1, 1), (1, 1)), ((1, 5000), (1, 1)), ((5000, 1), (1, 1)),
    ],
)  # fmt: skip
def test_tilings_are_those_of_the_published_code(size, tiles):
    assert tiling(*size, VISION) == tiles


def test_tilings_never_exceed_the_limit_and_equal_the_oracle():
    rng = np.random.default_rng(0)
    for width, height in rng.integers(1, 6000, (300, 2)).tolist():
        rows, columns = tiling(width, height, VISION)
        assert 1 <= rows * columns <= 12
        assert (rows, columns) == tile_counts(width, height)


@pytest.mark.parametrize("size", [(90, 50), (30, 200), (200, 30), (64, 64)])
def test_local_crops_are_overlapping_windows_of_one_resized_copy(size):
    pixels = np.random.default_rng(1).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    oracle = Oracle(
        {}, {"vision": {"crop_size": 28, "enc_patch_size": 4, "overlap_margin": 1, "max_crops": 12}}
    )
    expected, rows, columns = oracle.crops(pixels)
    crops = cut(pixels, SMALL)
    assert (crops.rows, crops.columns) == (rows, columns)
    assert rows * columns > 1
    assert np.array_equal(crops.pixels, np.stack(expected))


@pytest.mark.parametrize("shape", [(1, 1, 3), (1, 5000, 3), (5000, 1, 3), (28, 28, 3)])
def test_an_image_too_small_to_tile_is_one_crop_since_its_local_crop_would_repeat_it(shape):
    pixels = np.random.default_rng(2).integers(0, 256, shape, dtype=np.uint8)
    oracle = Oracle(
        {}, {"vision": {"crop_size": 28, "enc_patch_size": 4, "overlap_margin": 1, "max_crops": 12}}
    )
    expected, _, _ = oracle.crops(pixels)
    crops = cut(pixels, SMALL)
    assert crops.pixels.shape == (1, 28, 28, 3)
    assert np.array_equal(expected[0], expected[1])
    assert np.array_equal(crops.pixels[0], expected[0])


@pytest.mark.parametrize("size", [(20, 20), (64, 40), (300, 61), (37, 91), (1, 1)])
def test_a_device_cuts_the_same_crops(size):
    pixels = np.random.default_rng(size).integers(0, 256, (*size[::-1], 3), dtype=np.uint8)
    by_host, by_device = (
        prepare_image(ImageItem(pixels=pixels), SMALL, {}, by_device=flag) for flag in (False, True)
    )
    assert "pixels" in by_device.tensors
    assert "crops" in by_host.tensors
    items = [by_device, by_host, by_device]
    inputs = [torch.cat(part) for item in items for part in inputs_of(item)]
    crops, tilings = crops_of(inputs, SMALL.crop_size, resize_crops)
    assert tilings == [by_host.meta["tiling"]] * 3 == [by_device.meta["tiling"]] * 3
    assert by_host.meta == by_device.meta
    assert torch.equal(crops, torch.cat([by_host.tensors["crops"]] * 3))


def test_pictures_of_like_sizes_give_a_device_tensors_of_the_same_shapes():
    drawn = np.random.default_rng(0)
    shapes = {
        tuple(
            (sum(map(len, parts)), *parts[0].shape[1:])
            for parts in inputs_of(prepare_image(ImageItem(pixels=pixels), SMALL, {}, by_device=True))
        )
        for pixels in (drawn.integers(0, 256, (40, width, 3), dtype=np.uint8) for width in (60, 61, 63))
    }
    assert len(shapes) == 1
