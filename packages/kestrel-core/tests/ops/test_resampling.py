"""Resized pictures against Pillow, whose integers the tables follow."""

import numpy as np
import pytest
import torch
from PIL import Image

from kestrel.ops.resampling import CropPlan, crop_tables, taps
from kestrel.ops.resize_crops import resize_crops

FILTERS = {"lanczos": Image.Resampling.LANCZOS, "bicubic": Image.Resampling.BICUBIC}


def resized(pixels, plans, kernel, size):
    tables = crop_tables(plans, kernel)
    arrays = (pixels.reshape(-1), tables.crops_MF, tables.starts_S, tables.weights_KS)
    return resize_crops(*(torch.from_numpy(a.copy()) for a in arrays), size).numpy()


@pytest.mark.parametrize("kernel", FILTERS)
def test_a_resized_picture_equals_pillows_byte_for_byte(kernel):
    draw = np.random.default_rng()
    for _ in range(12):
        height, width, out_height, out_width = (int(n) for n in draw.integers(1, 70, 4))
        pixels = draw.integers(0, 256, (height, width, 3), dtype=np.uint8)
        picture = Image.fromarray(pixels)
        # one pass at a time: which pass is first when there are two is Pillow's own choice, which 13.0 changed
        wide = picture.resize((out_width, height), FILTERS[kernel])
        want = np.asarray(wide.resize((out_width, out_height), FILTERS[kernel]))
        plan = CropPlan(source=(height, width), resized=(out_height, out_width))
        got = resized(pixels, [plan], kernel, (out_height, out_width))[0]
        assert np.array_equal(got, want), (height, width, out_height, out_width)


def test_a_smooth_picture_is_within_one_level_of_pillow_in_one_call():
    y, x = np.mgrid[0:120, 0:160]
    waves = [np.sin(x / a) + np.cos(y / b) for a, b in ((9, 14), (17, 11), (13, 23))]
    pixels = (np.stack(waves, axis=-1) * 60 + 127).astype(np.uint8)
    want = np.asarray(Image.fromarray(pixels).resize((76, 76), Image.Resampling.LANCZOS))
    plan = CropPlan(source=(120, 160), resized=(76, 76))
    got = resized(pixels, [plan], "lanczos", (76, 76))[0]
    assert np.abs(got.astype(int) - want).max() <= 1


def test_a_crop_is_a_window_of_the_resized_picture():
    draw = np.random.default_rng(1)
    first, second = (draw.integers(0, 256, shape, dtype=np.uint8) for shape in ((20, 30, 3), (11, 8, 3)))
    pixels = np.concatenate([first.reshape(-1), second.reshape(-1)])
    whole = CropPlan(source=(11, 8), resized=(24, 24), offset=first.size)
    window = CropPlan(source=(11, 8), resized=(24, 24), top=5, left=9, offset=first.size)
    want = resized(pixels, [whole], "lanczos", (24, 24))[0]
    got = resized(pixels, [window], "lanczos", (10, 12))[0]
    assert np.array_equal(got, want[5:15, 9:21])


def test_taps_sum_to_one_and_stay_inside_the_line():
    for source, target in ((1, 5), (7, 7), (100, 3), (3, 100), (4000, 378)):
        found = taps(source, target, "lanczos")
        sums = found.weights_KS.sum(axis=0)
        assert np.abs(sums - (1 << 22)).max() <= found.weights_KS.shape[0]
        used = (found.weights_KS != 0).cumsum(axis=0).argmax(axis=0)  # the last tap that counts
        assert (found.starts_S + used < source).all()
