"""Clips: sizes, slices and times."""

import dataclasses

import numpy as np
import pytest
import torch

from kestrel.errors import InvalidMediaError
from kestrel.spi import ImageItem, VideoItem
from kestrel_qwen.images import prepare_image
from kestrel_qwen.processor import ImageConfig, VideoConfig
from kestrel_qwen.slices import slices_of
from kestrel_qwen.video import prepare_video, slice_times


def frames(count, height=64, width=96):
    rng = np.random.default_rng(1)
    return tuple(rng.integers(0, 256, (height, width, 3), np.uint8) for _ in range(count))


def clip(count, fps=2.0, **size):
    return VideoItem(frames=frames(count, **size), times_s=tuple(i / fps for i in range(count)))


def test_two_frames_are_a_slice_and_an_odd_one_is_repeated(config):
    five = prepare_video(clip(5), {}, config)
    assert five.tensors["grid"].tolist() == [[3, 4, 6]]
    assert five.num_positions == 3 * 6
    parts = [part for _, part in slices_of(five)]
    assert [part.num_positions for part in parts] == [6, 6, 6]
    last = parts[-1].tensors["patches"].unflatten(1, (3, 2, 256))
    assert torch.equal(last[:, :, 0], last[:, :, 1])


def test_a_slice_is_what_the_picture_of_its_two_equal_frames_is(config):
    frame = frames(1)[0]
    item = VideoItem(frames=(frame, frame), times_s=(0.0, 0.5))
    config = dataclasses.replace(config, images=ImageConfig(min_pixels=1024))
    ((_, part),) = slices_of(prepare_video(item, {}, config))
    picture = prepare_image(ImageItem(pixels=frame), {}, config)
    assert torch.equal(part.tensors["patches"], picture.tensors["patches"])


def test_times_are_the_middle_of_a_slice(config):
    prepared = prepare_video(clip(5), {}, config)
    assert [seconds for seconds, _ in slices_of(prepared)] == [0.25, 1.25, 2.0]
    assert slice_times([0.0, 0.4, 1.1], 2) == (0.2, 1.1)


def test_times_equal_those_of_transformers():
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

    indices = [0, 7, 15, 22, 29]
    expected = Qwen3VLProcessor._calculate_timestamps(None, list(indices), 24.0, 2)
    assert slice_times([i / 24.0 for i in indices], 2) == tuple(expected)


def test_one_frame_is_a_clip(config):
    assert prepare_video(clip(1), {}, config).tensors["grid"].tolist() == [[1, 4, 6]]


def test_the_pixel_budget_is_that_of_all_frames_together(config):
    small = dataclasses.replace(config, videos=VideoConfig(min_pixels=1024, max_pixels=8 * 32 * 64))
    assert prepare_video(clip(8), {}, small).tensors["grid"].tolist() == [[4, 2, 2]]
    assert prepare_video(clip(2), {}, small).tensors["grid"].tolist() == [[1, 4, 6]]
    assert prepare_video(clip(8), {"max_pixels": 8 * 96 * 64}, small).tensors["grid"].tolist() == [[4, 4, 6]]


def test_equal_slices_of_different_clips_share_their_digest(config):
    longer, shorter = prepare_video(clip(4), {}, config), prepare_video(clip(2), {}, config)
    digests = [[part.digest for _, part in slices_of(p)] for p in (longer, shorter)]
    assert digests[1] == digests[0][:1]
    assert longer.digest != shorter.digest


@pytest.mark.parametrize(
    ("item", "match"),
    [
        (VideoItem(frames=(), times_s=()), "0 frames"),
        (VideoItem(frames=frames(2), times_s=(0.0,)), "2 frames and 1 times"),
        (
            VideoItem(frames=(*frames(1), *frames(1, height=32)), times_s=(0.0, 0.5)),
            "96 × 64 and 96 × 32",
        ),
        (VideoItem(frames=frames(2, height=1, width=300), times_s=(0.0, 0.5)), "200 times"),
    ],
)
def test_clips_that_cannot_be_used_are_refused(item, match, config):
    with pytest.raises(InvalidMediaError, match=match):
        prepare_video(item, {}, config)
