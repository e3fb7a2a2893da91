"""The model against the float64 oracle, block by block and whole, on the tiny checkpoint."""

import numpy as np
import pytest
import torch

from kestrel.config import Settings
from kestrel.spi import Call, FloatsItem, ImageItem
from kestrel.testing.bare import BareLoop
from kestrel.types import Media, Tokens

SIZES = [(64, 40), (300, 60), (20, 20), (57, 91)]  # several tilings, one without local crops


@pytest.fixture(scope="module")
def pictures():
    rng = np.random.default_rng(7)
    small = [rng.integers(0, 256, (max(2, h // 6), max(2, w // 6), 3), dtype=np.uint8) for w, h in SIZES]
    return [
        np.kron(s, np.ones((6, 6, 1), dtype=np.uint8))[:h, :w] for s, (w, h) in zip(small, SIZES, strict=True)
    ]


def assert_close(got: torch.Tensor, expected: np.ndarray, relative: float = 1e-4):
    """float32 on the CPU is within 1e-4 of float64, relative to the largest value."""
    got = got.detach().double().numpy()
    assert got.shape == expected.shape
    assert np.abs(got - expected).max() <= relative * np.abs(expected).max()


def prepare(driver, pixels):
    return driver.prepare(ImageItem(pixels=np.ascontiguousarray(pixels)), {})


def f32(x):
    return torch.tensor(x, dtype=torch.float32)


@pytest.mark.parametrize("index", range(len(SIZES)))
def test_an_image_becomes_the_oracles_embeddings(built, oracle, pictures, index):
    item = prepare(built.main, pictures[index])
    assert_close(built.main.encode("image", [item]), oracle.image(pictures[index]))


def test_images_encoded_together_equal_images_encoded_alone(built, pictures):
    items = [prepare(built.main, p) for p in pictures]
    alone = torch.cat([built.main.encode("image", [item]) for item in items])
    assert torch.allclose(built.main.encode("image", items), alone, atol=1e-5)


def test_a_vision_block_and_the_patches(built, oracle, pictures):
    vision = built.main.model.vision
    crop = oracle.crops(pictures[0])[0][1]
    assert_close(vision.encode(torch.from_numpy(crop.copy())[None])[0], oracle.vision(crop))
    x = np.random.default_rng(0).normal(size=(49, 32))
    before, after = vision._lacks[2], vision._lacks[4]
    total = vision.blocks[1](f32(x)[None] - before, before, vision._lacks[3]) + after
    assert_close(total[0], oracle.vision_block(1, x, 4))


@pytest.mark.parametrize(("rows", "columns"), [(2, 3), (1, 2), (4, 1), (3, 4)])
def test_stitching_and_pooling(built, oracle, rows, columns):
    local = np.random.default_rng(1).normal(size=(rows * columns, 7, 7, 32))
    whole = oracle.stitch(list(local), rows, columns)
    assert whole.shape == (rows * 5 + 2, columns * 5 + 2, 32)
    globe = np.random.default_rng(2).normal(size=(49, 32))
    features = f32(np.concatenate([globe[None], local.reshape(-1, 49, 32)]))
    pair = built.main.model.vision._pair(features, rows, columns)
    assert_close(pair, np.concatenate([globe, oracle.pool(whole, 7).reshape(49, 32)], -1))


def test_region_encoders_and_decoders(built, oracle):
    region = built.main.model.region
    for value in (0.0, 0.25, 0.999):
        assert_close(region.encode_coordinates(f32([[value]])), oracle.encode_coord(value))
        assert_close(region.encode_sizes(f32([[value, 1 - value]])), oracle.encode_size(value, 1 - value))
    hidden = np.random.default_rng(3).normal(size=(5, 64))
    bins = region.bin_logits(f32(hidden)).max(-1).indices
    assert bins.min() >= 1
    for row, h in zip(bins.tolist(), hidden, strict=True):
        assert (row[0] - 1) / 32 == oracle.decode_coord(h)
        sizes = [2 ** ((b - 1) / 63 * 10 - 10) for b in row[1:]]
        assert sizes == pytest.approx(oracle.decode_size(h))


def test_bins_feed_back_as_the_values_they_stand_for(built, oracle):
    region = built.main.model.region
    x = torch.zeros(4, 64)
    aux = torch.tensor([[9, 0, 0], [0, 64, 1], [0, 0, 0], [9, 0, 0]])
    is_coord, is_size = torch.tensor([True, False, True, False]), torch.tensor([False, True, False, False])
    got = region.embed_bins(x, is_coord, is_size, aux)
    assert_close(got[:1], oracle.encode_coord(8 / 32))
    assert_close(got[1:2], oracle.encode_size(1.0, 2.0**-10))
    assert not got[2:].any(), "a token without bins, and one that is no coordinate, keep their embedding"


def test_spatial_references_are_encoded_from_exact_values(built, oracle):
    driver = built.main
    point = driver.prepare(FloatsItem(values=(0.123, 0.987), kind="point"), {})
    box = driver.prepare(FloatsItem(values=(0.1, 0.2, 0.5, 0.8), kind="box"), {})
    assert (point.num_positions, box.num_positions) == (2, 3)
    assert_close(
        driver.encode("point", [point]),
        np.concatenate([oracle.encode_coord(0.123), oracle.encode_coord(0.987)]),
    )
    expected = [oracle.encode_coord(0.3), oracle.encode_coord(0.5), oracle.encode_size(0.4, 0.6)]
    assert_close(driver.encode("box", [box, box]), np.concatenate(expected * 2))


@pytest.mark.parametrize("num_images", [0, 1, 2])
@pytest.mark.parametrize("chunk", [None, 5])
def test_hidden_states_and_logits_of_a_prompt(built, oracle, pictures, num_images, chunk):
    driver = built.main
    items = [prepare(driver, p) for p in pictures[:num_images]]
    ids = (1, 14, 2, 100, 101, 5, 102, 3, 3)  # a 5 without bins is an ordinary token
    layout = driver.layout([Tokens((0,)), *map(Media, items), Tokens(ids)])
    x, ranges = oracle.prompt(ids, [oracle.image(p) for p in pictures[:num_images]])
    assert layout.bidirectional == tuple(ranges)
    assert len(layout) == 1 + 49 * num_images + len(ids)
    expected = oracle.decoder(x, ranges)
    loop = BareLoop(driver, max_len=256)
    got = loop.prefill([loop.open(layout)], chunk)
    assert_close(got, expected[-1:])
    assert_close(driver.logits(got), oracle.logits(expected[-1:]))


def test_images_that_follow_text_are_ranges_of_their_own(built, pictures):
    items = [prepare(built.main, p) for p in pictures[:3]]
    segments = [Tokens((0,)), Media(items[0]), Media(items[1]), Tokens((1, 2)), Media(items[2]), Tokens((3,))]
    assert built.main.layout(segments).bidirectional == ((0, 50), (50, 99), (101, 150))


def call(skill, driver, picture=None, spatial=(), reasoning=False, **values):
    media = [] if picture is None else [prepare(driver, picture)]
    media += [
        driver.prepare(FloatsItem(values=s, kind="point" if len(s) == 2 else "box"), {}) for s in spatial
    ]
    settings = Settings(max_objects=values.pop("max_objects", None))
    return Call(skill=skill, values=values, prepared=tuple(media), reasoning=reasoning, settings=settings)


def run(built, calls, max_tokens=24):
    layouts = [built.main.layout(built.prompt.segments(c.skill, c)) for c in calls]
    decodings = [built.prompt.decoding(c.skill, c) for c in calls]
    return BareLoop(built.main, max_len=256).run(layouts, decodings, max_tokens=max_tokens)


def found(built, c, tokens):
    parser = built.prompt.parser(c.skill, c)
    return [tuple(piece.value.values()) for token in tokens for piece in parser.feed(token)]


def byte_ids(built, text):
    return built.main.tokenizer.encode(text)


@pytest.mark.parametrize("index", [None, 0, 1])
def test_greedy_answers_equal_the_oracles(built, oracle, pictures, index):
    picture = None if index is None else pictures[index]
    c = call("query", built.main, picture, question="what?")
    (tokens,) = run(built, [c])
    ids = [1, 14, 2, *byte_ids(built, "what?"), 3, 3]
    images = [] if picture is None else [oracle.image(picture)]
    assert [t.id for t in tokens] == oracle.greedy(*oracle.prompt(ids, images), 24)


@pytest.mark.parametrize("length", ["short", "long"])
def test_greedy_captions_equal_the_oracles(built, oracle, pictures, length):
    (tokens,) = run(built, [call("caption", built.main, pictures[3], length=length)])
    ids = [1, 10, 2, {"short": 11, "long": 13}[length], 3]
    assert [t.id for t in tokens] == oracle.greedy(*oracle.prompt(ids, [oracle.image(pictures[3])]), 24)


@pytest.mark.parametrize("skill", ["point", "detect"])
@pytest.mark.parametrize("thing", ["dog", "cat", "a", "b", "zebra"])
def test_objects_equal_the_plain_loop(built, oracle, pictures, skill, thing):
    c = call(skill, built.main, pictures[0], object=thing, max_objects=4)
    (tokens,) = run(built, [c])
    prefix = [1, 17, 2] if skill == "point" else [1, 15, 16, 2]
    x, ranges = oracle.prompt([*prefix, *byte_ids(built, " " + thing), 3], [oracle.image(pictures[0])])
    expected, ended = oracle.objects(x, ranges, skill, 4)
    got = found(built, c, tokens)
    assert len(got) == len(expected)
    assert np.allclose(got, expected, atol=1e-6)
    assert (tokens[-1].id == 0) == ended
    assert len(tokens) == len(expected) * {"point": 2, "detect": 3}[skill] + ended


def test_some_loops_find_objects_and_some_end_by_themselves(built, pictures):
    calls = [
        call("point", built.main, pictures[0], object=o, max_objects=4) for o in ("dog", "cat", "a", "b")
    ]
    outs = [run(built, [c])[0] for c in calls]
    assert any(len(out) > 2 for out in outs)


def test_spatial_references_stand_right_after_the_skill(built, oracle, pictures):
    point, box = (0.25, 0.75), (0.1, 0.1, 0.9, 0.5)
    c = call("query", built.main, pictures[0], [point, box], question="what?")
    embeddings = [
        oracle.encode_coord(0.25), oracle.encode_coord(0.75),
        oracle.encode_coord(0.5), oracle.encode_coord(0.3), oracle.encode_size(0.8, 0.4),
    ]  # fmt: skip
    ids = [1, 14, 2, *embeddings, *byte_ids(built, "what?"), 3, 3]
    (tokens,) = run(built, [c])
    assert [t.id for t in tokens] == oracle.greedy(*oracle.prompt(ids, [oracle.image(pictures[0])]), 24)


@pytest.mark.parametrize("question", ["why?", "who?", "how many?"])
def test_reasoning_equals_the_plain_loop(built, oracle, pictures, question):
    c = call("query", built.main, pictures[0], question=question, reasoning=True)
    (tokens,) = run(built, [c], max_tokens=40)
    prompt = [1, 14, 2, *byte_ids(built, question), 3, 4]
    ids, values = oracle.reasoning(*oracle.prompt(prompt, [oracle.image(pictures[0])]), 40)
    assert [t.id for t in tokens] == ids
    assert [(t.aux[0] - 1) / 32 for t in tokens if t.id == 5] == values


def test_requests_run_together_equal_requests_run_alone(built, pictures):
    calls = [
        call("query", built.main, pictures[0], question="what?"),
        call("detect", built.main, pictures[1], object="dog", max_objects=3),
        call("query", built.main, question="no image here", reasoning=True),
        call("point", built.main, pictures[2], object="cat", max_objects=3),
    ]
    assert run(built, calls) == [run(built, [c])[0] for c in calls]


def test_bfloat16_stays_near_float32(load, built, tiny_dir, pictures):
    """Within 2e-2 of the features' size for the image; hidden states pass three layers, and get twice that."""
    half = load(tiny_dir, dtype=torch.bfloat16)
    item = prepare(built.main, pictures[0])
    exact, rough = (b.main.encode("image", [item]).float() for b in (built, half))
    assert (rough - exact).norm() <= 2e-2 * exact.norm()
    layout = built.main.layout([Tokens((0,)), Media(item), Tokens((1, 14, 2, 100, 101, 3, 3))])
    hidden = []
    for b, dtype in ((built, torch.float32), (half, torch.bfloat16)):
        loop = BareLoop(b.main, max_len=128, dtype=dtype)
        hidden.append(loop.prefill([loop.open(layout)]))
    bins = half.main.aux_logits(hidden[1], torch.tensor([5]))
    assert bins.isfinite().all()
    assert bins.dtype == torch.bfloat16
    assert (hidden[1].float() - hidden[0]).norm() <= 4e-2 * hidden[0].norm()
