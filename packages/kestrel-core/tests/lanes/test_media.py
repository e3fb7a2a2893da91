"""Pictures and clips: encoded once, only when needed, and never waited for by others."""

import pytest

from kestrel.errors import ModelFaultError
from kestrel.testing.bench import Bench
from kestrel.testing.toy_expected import Expected
from kestrel.testing.toys import ToyHybrid, toy_media
from kestrel.types import Layout, Span


def picture(seed, size=5, head=(4, 5), tail=(7, 8), cost=1, bidirectional=True):
    at = len(head)
    return Layout(
        tokens=(*head, *(0,) * size, *tail),
        spans=(Span(at, at + size, 0),),
        media=(toy_media("image", seed, size, cost=cost),),
        bidirectional=((0, at + size),) if bidirectional else (),
        marks=(at + size,),
    )


def clip(seed, tokens=(4, 5, 6), size=4):
    return Layout(tokens=tokens, media=(toy_media("audio", seed, size, positions=0),))


@pytest.fixture
def toy():
    return ToyHybrid(3)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_one_picture_asked_at_the_same_time_is_encoded_once(toy, depth, prefix_cache):
    bench = Bench(toy, depth=depth, prefix_cache=prefix_cache)
    first = bench.submit(picture(0, tail=(7, 8)))
    second = bench.submit(picture(0, tail=(9,)))
    bench.run()
    assert toy.encoded_items == 1
    assert bench.outcomes[first].ids == Expected(toy).ids(picture(0, tail=(7, 8)), 8)
    assert bench.outcomes[second].ids == Expected(toy).ids(picture(0, tail=(9,)), 8)


def test_a_prefix_hit_that_covers_the_picture_skips_its_encoding(toy):
    bench = Bench(toy)
    bench.generate(picture(0))
    bench.lane.features.clear()
    again = bench.generate(picture(0, tail=(9, 10)))
    assert toy.encoded_items == 1
    assert again.finished.metrics.cached_tokens == 7
    assert again.ids == Expected(toy).ids(picture(0, tail=(9, 10)), 8)


def test_equal_placeholders_of_two_pictures_share_nothing(toy):
    bench = Bench(toy)
    bench.generate(picture(0))
    other = bench.generate(picture(1))
    assert toy.encoded_items == 2
    assert other.finished.metrics.cached_tokens == 0
    assert other.ids == Expected(toy).ids(picture(1), 8)


def test_an_encoder_launch_stays_within_its_cost(toy):
    bench = Bench(toy, max_rows=4)
    packed = []
    encode = toy.encode
    toy.encode = lambda kind, items: packed.append(len(items)) or encode(kind, items)
    for seed in range(4):
        bench.submit(picture(seed))
    bench.submit(picture(9, cost=5))
    bench.run()
    assert packed == [2, 2, 1]


def test_text_goes_on_while_pictures_wait_for_the_encoder(toy):
    bench = Bench(toy, max_rows=4, budget=40)
    pictures = [bench.submit(picture(seed)) for seed in range(3)]
    text = bench.submit([4, 5, 6], max_tokens=8)
    bench.tick()
    assert len(bench.outcomes[text].ids) == 1
    assert not bench.outcomes[pictures[2]].ids
    bench.run()


def test_several_pictures_that_exceed_the_pool_together_take_turns(toy):
    bench = Bench(toy, feature_rows=7, budget=16)
    layouts = []
    for seed in (0, 2, 4):
        items = (toy_media("image", seed, 5), toy_media("image", seed + 1, 4))
        layouts.append(
            Layout(
                tokens=(4, *(0,) * 5, 6, *(0,) * 4, 8),
                spans=(Span(1, 6, 0), Span(7, 11, 1)),
                media=items,
                marks=(6, 11),
            )
        )
    works = [bench.submit(layout) for layout in layouts]
    bench.run()
    for work_id, layout in zip(works, layouts, strict=True):
        assert bench.outcomes[work_id].ids == Expected(toy).ids(layout, 8)


def test_a_picture_of_several_chunks_keeps_its_features_until_passed(toy):
    layout = picture(0, size=9, bidirectional=False)
    outcome = Bench(toy, budget=4, page_size=4).generate(layout)
    assert outcome.ids == Expected(toy).ids(layout, 8)


def test_a_failing_encoder_fails_the_works_of_its_launch_alone(toy):
    bench = Bench(toy)
    encode = toy.encode

    def broken(kind, items):
        if any(
            float(item.tensors["x"][0, 0]) == float(toy_media("image", 1, 5).tensors["x"][0, 0])
            for item in items
        ):
            raise RuntimeError("no kernel image")
        return encode(kind, items)

    toy.encode = broken
    good, bad = bench.submit(picture(0, cost=2)), bench.submit(picture(1, cost=2))
    text = bench.submit([4, 5, 6])
    bench.run()
    assert isinstance(bench.outcomes[bad].error, ModelFaultError)
    assert isinstance(bench.outcomes[bad].error.__cause__, RuntimeError)
    assert bench.outcomes[good].ids == Expected(toy).ids(picture(0), 8)
    assert len(bench.outcomes[text].ids) == 8


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_deterministic_lane_encodes_each_picture_by_itself(toy, deterministic):
    bench = Bench(toy, deterministic=deterministic)
    encode, launches = toy.encode, []
    toy.encode = lambda kind, items: launches.append(len(items)) or encode(kind, items)
    works = [bench.submit(picture(seed, cost=1)) for seed in range(2)]
    bench.run()
    assert launches == ([1, 1] if deterministic else [2])
    for seed, work_id in enumerate(works):
        assert bench.outcomes[work_id].ids == Expected(toy).ids(picture(seed), 8)


def test_a_picture_that_cannot_be_encoded_fails_alone_in_its_launch(toy):
    bench = Bench(toy)
    encode, launches = toy.encode, []

    def broken(kind, items):
        launches.append(len(items))
        if any(item.digest == toy_media("image", 1, 5).digest for item in items):
            raise RuntimeError("no kernel image")
        return encode(kind, items)

    toy.encode = broken
    good, bad = (bench.submit(picture(seed, cost=1)) for seed in range(2))
    bench.run()
    assert launches[0] == 2
    assert isinstance(bench.outcomes[bad].error, ModelFaultError)
    assert bench.outcomes[good].ids == Expected(toy).ids(picture(0), 8)


@pytest.mark.parametrize("depth", [1, 2])
def test_cross_attention_is_written_once_per_clip(depth):
    toy = ToyHybrid(6, cross=True)
    bench = Bench(toy, depth=depth)
    works = {bench.submit(layout): layout for layout in (clip(0), clip(0, (4, 9)), clip(1), clip(0, (7,)))}
    bench.run()
    assert toy.encoded_items == 2
    for work_id, layout in works.items():
        assert bench.outcomes[work_id].ids == Expected(toy).ids(layout, 8)
    bench.generate(clip(1, (5, 5)))
    assert toy.encoded_items == 2


def test_works_wait_for_a_cross_entry_when_all_are_in_use():
    toy = ToyHybrid(6, cross=True)
    bench = Bench(toy, entries=1)
    works = {bench.submit(clip(seed)): clip(seed) for seed in range(3)}
    bench.run()
    for work_id, layout in works.items():
        assert bench.outcomes[work_id].ids == Expected(toy).ids(layout, 8)


def test_a_leader_that_is_cancelled_leaves_the_clip_to_the_next():
    toy = ToyHybrid(6, cross=True)
    bench = Bench(toy)
    first, second = bench.submit(clip(0)), bench.submit(clip(0, (9,)))
    bench.lane.cancel(first)
    bench.run()
    assert bench.outcomes[second].ids == Expected(toy).ids(clip(0, (9,)), 8)
