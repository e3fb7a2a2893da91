"""Pictures against transformers' own preparation, and what is refused."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kestrel.errors import InvalidMediaError, InvalidRequestError
from kestrel.spi import ImageItem
from kestrel_qwen.images import prepare_image
from kestrel_qwen.processor import ImageConfig
from kestrel_qwen.resize import clip_size, image_size, pixel_budget

SIZES = [
    (64, 64),
    (100, 37),
    (37, 100),
    (333, 517),
    (1, 1),
    (3, 600),
    (600, 3),
    (48, 16),
    (700, 900),
    (80, 48),
]


def noise(height, width, seed=0):
    """A picture with edges and gradients, so that resizing shows."""
    rng = np.random.default_rng(seed)
    ramp = np.linspace(0, 255, width)[None, :, None] * np.linspace(0.2, 1, height)[:, None, None]
    speckle = rng.integers(0, 80, (height, width, 3))
    return np.clip(ramp + speckle, 0, 255).astype(np.uint8)


def scaled(prepared):
    return (prepared.tensors["patches"].float() / 255 - 0.5) / 0.5


@pytest.mark.parametrize(("height", "width"), SIZES)
@pytest.mark.parametrize("limits", [(65_536, 16_777_216), (1024, 40_000)])
def test_patches_equal_those_of_transformers(height, width, limits, config):
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    low, high = limits
    config = dataclasses.replace(config, images=ImageConfig(min_pixels=low, max_pixels=high))
    pixels = noise(height, width)
    if max(height, width) > 200 * min(height, width):
        pytest.skip("beyond the aspect limit of both")
    processor = Qwen2VLImageProcessorPil(
        size={"shortest_edge": low, "longest_edge": high},
        patch_size=16,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )
    expected = processor(images=[pixels], return_tensors="pt", input_data_format="channels_last")
    prepared = prepare_image(ImageItem(pixels=pixels), {}, config)
    assert torch.equal(prepared.tensors["grid"], expected["image_grid_thw"])
    level = 2 / 255
    assert (scaled(prepared) - expected["pixel_values"]).abs().max() <= level + 1e-6
    _, rows, columns = prepared.tensors["grid"][0].tolist()
    assert prepared.num_positions == rows * columns // 4
    assert prepared.cost == math.ceil(rows * columns / 1024)


def test_rows_go_block_by_merged_block_and_hold_both_frames(config):
    pixels = np.zeros((64, 64, 3), np.uint8)
    for row in range(4):
        for column in range(4):
            pixels[row * 16 : row * 16 + 16, column * 16 : column * 16 + 16] = row * 4 + column
    small = dataclasses.replace(config, images=ImageConfig(min_pixels=64 * 64, max_pixels=64 * 64))
    patches = prepare_image(ImageItem(pixels=pixels), {}, small).tensors["patches"]
    assert patches.shape == (16, 3 * 2 * 16 * 16)
    assert patches.dtype == torch.uint8
    assert patches[:, 0].tolist() == [0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15]
    assert (patches == patches[:, :1]).all()


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 300_000), st.integers(0, 2_000_000))
def test_sizes_are_multiples_of_a_position_within_the_budget(height, width, low, more):
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    high = low + 1024 + more
    if max(height, width) > 200 * min(height, width):
        with pytest.raises(InvalidMediaError, match="200 times"):
            image_size(height, width, 32, low, high)
        return
    size = image_size(height, width, 32, low, high)
    assert size == smart_resize(height, width, factor=32, min_pixels=low, max_pixels=high)
    assert min(size) >= 32
    assert size[0] % 32 == size[1] % 32 == 0


def test_halves_round_to_even():
    assert image_size(48, 80, 32, 1024, 10**6) == (64, 64)
    assert image_size(80, 112, 32, 1024, 10**6) == (64, 128)


@given(
    st.integers(2, 40),
    st.integers(1, 2000),
    st.integers(1, 2000),
    st.integers(1, 10**6),
    st.integers(0, 10**7),
)
def test_frames_are_sized_as_published(frames, height, width, low, more):
    def published(t, h, w, smallest, largest):
        """Source: the published video preparation, its rule for one clip."""
        if h < 32 or w < 32:
            scale = max(32 / h, 32 / w)
            h, w = int(h * scale), int(w * scale)
        if max(h, w) / min(h, w) > 200:
            return None
        bars = [round(side / 32) * 32 for side in (h, w)]
        even = round(t / 2) * 2
        if even * bars[0] * bars[1] > largest:
            beta = math.sqrt(t * h * w / largest)
            bars = [max(32, math.floor(side / beta / 32) * 32) for side in (h, w)]
        elif even * bars[0] * bars[1] < smallest:
            beta = math.sqrt(smallest / (t * h * w))
            bars = [math.ceil(side * beta / 32) * 32 for side in (h, w)]
        return tuple(bars)

    expected = published(frames, height, width, low, low + 1024 + more)
    if expected is None:
        with pytest.raises(InvalidMediaError):
            clip_size(frames, height, width, 32, low, low + 1024 + more)
    else:
        assert clip_size(frames, height, width, 32, low, low + 1024 + more) == expected


def test_the_requests_pixel_limits_win(config):
    picture = ImageItem(pixels=noise(256, 256))
    assert prepare_image(picture, {}, config).num_positions == 64
    assert prepare_image(picture, {"max_pixels": 4096}, config).num_positions == 4
    assert prepare_image(picture, {"min_pixels": 512 * 512}, config).num_positions == 256


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"max_pixels": 1000}, "smallest picture"),
        ({"min_pixels": 5000, "max_pixels": 4000}, "more than max_pixels"),
        ({"min_pixels": 10**9}, "give max_pixels too"),
    ],
)
def test_pixel_limits_that_cannot_hold_are_refused(settings, match):
    with pytest.raises(InvalidRequestError, match=match):
        pixel_budget(settings, 65_536, 16_777_216, 32)


@pytest.mark.parametrize("shape", [(1, 201, 3), (402, 2, 3)])
def test_a_picture_too_long_and_thin_is_refused(shape, config):
    with pytest.raises(InvalidMediaError, match="200 times"):
        prepare_image(ImageItem(pixels=np.zeros(shape, np.uint8)), {}, config)


@pytest.mark.parametrize(
    "pixels", [np.zeros((4, 4), np.uint8), np.zeros((4, 4, 3)), np.zeros((0, 4, 3), np.uint8)]
)
def test_an_array_that_is_no_picture_is_refused(pixels, config):
    with pytest.raises(InvalidMediaError, match="uint8"):
        prepare_image(ImageItem(pixels=pixels), {}, config)


def test_the_digest_is_that_of_the_prepared_picture(config):
    pixels = noise(64, 96)
    other = pixels.copy()
    other[20, 20] ^= 255
    digests = {
        prepare_image(ImageItem(pixels=p), s, config).digest
        for p, s in ((pixels, {}), (other, {}), (pixels, {"max_pixels": 2048}))
    }
    assert len(digests) == 3
    assert prepare_image(ImageItem(pixels=pixels.copy()), {}, config).digest in digests
    turned = prepare_image(ImageItem(pixels=np.zeros((64, 128, 3), np.uint8)), {}, config)
    upright = prepare_image(ImageItem(pixels=np.zeros((128, 64, 3), np.uint8)), {}, config)
    assert turned.digest != upright.digest


def test_a_text_only_model_takes_no_picture(config):
    with pytest.raises(InvalidRequestError, match="text-only"):
        prepare_image(ImageItem(pixels=noise(32, 32)), {}, dataclasses.replace(config, vision=None))
