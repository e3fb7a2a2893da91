import numpy as np
import pytest
from moondream_oracle import Oracle, tile_counts

from kestrel_moondream.config import VisionConfig
from kestrel_moondream.crops import cut, tiling

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
