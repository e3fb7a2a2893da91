"""The tower against transformers, and answers about pictures and clips from raw pixels on."""

import numpy as np
import pytest
import torch
from qwen_oracle import greedy, logits

from kestrel.config import Settings
from kestrel.spi import Decoding, ImageItem, VideoItem
from kestrel.testing.bare import BareLoop
from kestrel.types import Media, Text, Tokens
from kestrel_qwen.slices import slices_of

FREE = Settings(temperature=0.0, ignore_eos=True)
START, END = Tokens((3,)), Tokens((4,))


def picture(seed, width=40, height=32):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def image(driver, seed, *size):
    return driver.prepare(ImageItem(pixels=picture(seed, *size)), {})


def pixel_values(items):
    """Patches as transformers takes them."""
    return torch.cat([item.tensors["patches"].float() / 127.5 - 1 for item in items])


def grids(items):
    return torch.cat([item.tensors["grid"] for item in items])


def as_hf(layout, images=(), videos=()):
    """Explicit ids and the media of a prompt, as ``generate`` takes them."""
    kinds = torch.zeros(1, len(layout), dtype=torch.int32)
    for span in layout.spans:
        kinds[0, span.start : span.end] = 1 if layout.media[span.item].kind == "image" else 2
    media = {"mm_token_type_ids": kinds}
    if images:
        media |= {"pixel_values": pixel_values(images), "image_grid_thw": grids(images)}
    if videos:
        media |= {"pixel_values_videos": pixel_values(videos), "video_grid_thw": grids(videos)}
    return list(layout.tokens), media


def assert_close(got, want, share=1e-4):
    assert got.shape == want.shape
    assert (got - want).abs().max() <= share * (want.max() - want.min())


@pytest.mark.parametrize("shape", ["dense", "moe, tied"])
@pytest.mark.parametrize(
    "sizes",
    [[(1, 2, 2)], [(1, 6, 4), (1, 6, 4), (1, 4, 6)], [(2, 4, 2), (1, 8, 1 * 6), (3, 2, 4)], [(1, 12, 14)]],
)
def test_features_are_those_of_transformers(pair, shape, sizes):
    model = pair(shape)
    patches = torch.randn(sum(t * h * w for t, h, w in sizes), 96, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        want = model.hf.model.visual(patches, grid_thw=torch.tensor(sizes)).pooler_output
    assert_close(model.driver.model.visual(patches, sizes), want)


def test_bytes_are_scaled_as_transformers_scales_them(pair):
    model = pair("dense")
    items = [image(model.driver, 1), image(model.driver, 2, 64, 24)]
    with torch.no_grad():
        want = model.hf.model.visual(pixel_values(items), grid_thw=grids(items)).pooler_output
    assert_close(model.driver.encode("image", items), want)


def test_slices_of_a_clip_encoded_together_equal_the_clip(pair):
    driver = pair("dense").driver
    frames = tuple(picture(i) for i in range(5))
    clip = driver.prepare(VideoItem(frames=frames, times_s=(0.0, 0.5, 1.0, 1.5, 2.0)), {})
    slices = [part for _, part in slices_of(clip)]
    assert len(slices) == 3
    assert_close(driver.encode("video", slices), driver.encode("video", [clip]), 1e-6)


def prompts(driver):
    """Prompts with pictures, under names, and the pictures in order."""
    a, b, c = image(driver, 1), image(driver, 2, 64, 24), image(driver, 3, 16, 48)
    words, ask = Tokens(tuple(range(40, 61))), Tokens((100, 101, 102))
    return {
        "one image": ([START, Media(a), END, ask], [a]),
        "three images": (
            [START, Media(a), END, START, Media(b), END, ask, START, Media(c), END, ask],
            [a, b, c],
        ),
        "image after text": ([words, START, Media(c), END, ask], [c]),
        "the same image twice": ([START, Media(b), END, ask, START, Media(b), END, words], [b, b]),
    }


NAMES = ["one image", "three images", "image after text", "the same image twice"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", ["dense", "moe"])
def test_answers_about_pictures_are_those_of_transformers(pair, shape, name):
    model = pair(shape)
    segments, items = prompts(model.driver)[name]
    layout = model.driver.layout(segments)
    ids, media = as_hf(layout, images=items)
    loop = BareLoop(model.driver, max_rows=1, max_len=256)
    hidden = loop.prefill([loop.open(layout)])
    assert_close(model.driver.logits(hidden)[0], logits(model.hf, ids, **media)[-1])
    (tokens,) = BareLoop(model.driver, max_rows=1, max_len=256).run(
        [layout], [Decoding()], FREE, max_tokens=64
    )
    assert [t.id for t in tokens] == greedy(model.hf, ids, 64, **media)


@pytest.mark.parametrize("frames", [2, 5])
def test_answers_about_clips_are_those_of_transformers(pair, frames):
    model = pair("dense")
    item = VideoItem(
        frames=tuple(picture(i) for i in range(frames)), times_s=tuple(0.5 * i for i in range(frames))
    )
    clip = model.driver.prepare(item, {})
    segments = []
    for seconds, part in slices_of(clip):
        segments += [Text(f"<{seconds:.1f} seconds>"), START, Media(part), END]
    layout = model.driver.layout([*segments, Tokens((100, 101))])
    ids, media = as_hf(layout, videos=[clip])
    (tokens,) = BareLoop(model.driver, max_rows=1, max_len=384).run(
        [layout], [Decoding()], FREE, max_tokens=64
    )
    assert [t.id for t in tokens] == greedy(model.hf, ids, 64, **media)


@pytest.mark.parametrize("chunk", [5, 16])
def test_a_chunk_may_end_inside_a_picture(pair, chunk):
    driver = pair("dense").driver
    segments, _ = prompts(driver)["three images"]
    layout = driver.layout(segments)
    hidden = []
    for size in (None, chunk):
        loop = BareLoop(driver, max_rows=1, max_len=256)
        hidden.append(loop.prefill([loop.open(layout)], size))
    assert_close(hidden[1], hidden[0])
