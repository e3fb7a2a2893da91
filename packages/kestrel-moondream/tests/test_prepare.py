"""Media made ready: odd sizes, digests, spatial references, and what is refused."""

import numpy as np
import pytest

from kestrel.errors import InvalidMediaError, InvalidRequestError
from kestrel.spi import AudioItem, FloatsItem, ImageItem


def picture(width, height, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def prepare(built, pixels):
    return built.main.prepare(ImageItem(pixels=pixels), {})


@pytest.mark.parametrize("size", [(1, 1), (1, 5000), (5000, 1), (2, 3), (640, 480)])
def test_any_size_gives_every_vision_token(built, size):
    item = prepare(built, picture(*size))
    features = built.main.encode("image", [item])
    assert item.num_positions == len(features) == 49
    assert features.isfinite().all()
    assert (item.meta["width"], item.meta["height"]) == size


def test_a_prepared_image_says_what_it_costs(built):
    small, large = prepare(built, picture(20, 20)), prepare(built, picture(90, 50))
    assert (small.cost, small.meta["tiling"]) == (1, (1, 1))
    assert large.cost == 1 + large.meta["tiling"][0] * large.meta["tiling"][1] == large.meta["crops"]
    assert built.main.spec.media_spec("image").max_cost >= 13


def test_equal_pixels_have_equal_digests_and_a_changed_pixel_another(built):
    pixels = picture(90, 50)
    digest = prepare(built, pixels).digest
    assert prepare(built, pixels.copy()).digest == digest
    assert prepare(built, np.asfortranarray(pixels)).digest == digest
    changed = pixels.copy()
    changed[25, 45] ^= 255
    assert prepare(built, changed).digest != digest
    assert prepare(built, pixels.transpose(1, 0, 2)).digest != digest


def test_spatial_references_have_digests_of_their_exact_values(built):
    def digest(*values):
        kind = "point" if len(values) == 2 else "box"
        return built.main.prepare(FloatsItem(values=values, kind=kind), {}).digest

    assert digest(0.1, 0.2) == digest(0.1, 0.2)
    assert digest(0.1, 0.2) != digest(0.1, 0.2 + 1e-15)
    assert len({digest(0.5, 0.5), digest(0.5, 0.5, 0.5, 0.5), digest(0.0, 0.0, 1.0, 1.0)}) == 3


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("point", (0.1,)), ("point", (0.1, 0.2, 0.3)), ("point", (-0.1, 0.5)), ("point", (0.1, float("nan"))),
        ("box", (0.1, 0.2)), ("box", (0.5, 0.1, 0.4, 0.9)), ("box", (0.1, 0.9, 0.4, 0.8)), ("box", (0, 0, 1, 1.1)),
    ],
)  # fmt: skip
def test_a_spatial_reference_outside_the_image_is_refused(built, kind, values):
    with pytest.raises(InvalidRequestError, match="spatial"):
        built.main.prepare(FloatsItem(values=values, kind=kind), {})


@pytest.mark.parametrize(
    "pixels",
    [
        np.zeros((4, 4), np.uint8),
        np.zeros((4, 4, 4), np.uint8),
        np.zeros((0, 4, 3), np.uint8),
        np.zeros((4, 4, 3)),
    ],
)
def test_an_array_that_is_no_image_is_refused(built, pixels):
    with pytest.raises(InvalidMediaError, match="uint8"):
        prepare(built, pixels)


def test_sound_and_pixel_limits_are_refused(built):
    with pytest.raises(InvalidRequestError, match="audio"):
        built.main.prepare(AudioItem(samples=np.zeros(4, np.float32), sample_rate=16000), {})
    with pytest.raises(InvalidRequestError, match="max_pixels"):
        built.main.prepare(ImageItem(pixels=picture(9, 9)), {"max_pixels": 10, "min_pixels": None})
