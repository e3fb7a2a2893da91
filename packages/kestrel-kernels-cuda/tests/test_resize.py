"""Resized pictures byte for byte, at sizes drawn anew."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed here")

import numpy as np
from PIL import Image

from kestrel.ops.resampling import CropPlan, crop_tables
from kestrel_kernels_cuda.resize import resize_crops


def test_a_picture_of_any_size_equals_pillows_passes(place: torch.device) -> None:
    draw = np.random.default_rng()
    for _ in range(6):
        height, width, out_height, out_width = (int(n) for n in draw.integers(1, 60, 4))
        pixels = draw.integers(0, 256, (height, width, 3), dtype=np.uint8)
        wide = Image.fromarray(pixels).resize((out_width, height), Image.Resampling.LANCZOS)
        want = np.asarray(wide.resize((out_width, out_height), Image.Resampling.LANCZOS))
        tables = crop_tables([CropPlan(source=(height, width), resized=(out_height, out_width))], "lanczos")
        arrays = (pixels.reshape(-1), tables.crops_MF, tables.starts_S, tables.weights_KS)
        args = [torch.from_numpy(a.copy()).to(place) for a in arrays]
        got = resize_crops(*args, (out_height, out_width))[0].cpu().numpy()
        assert np.array_equal(got, want), (height, width, out_height, out_width)
