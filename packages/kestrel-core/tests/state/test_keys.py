"""Keys are exact: equal where, and only where, the state is the same."""

from __future__ import annotations

import threading
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from kestrel.state import Interner, KeyRun
from kestrel.types import Layout, Span


def codes(layout: Layout, interner: Interner, **options: int) -> bytes:
    return KeyRun.of(layout, interner, **options).bytes()


def shared(a: bytes, b: bytes) -> int:
    """Positions that begin both."""
    count = 0
    while a[8 * count : 8 * count + 8] == b[8 * count : 8 * count + 8] != b"":
        count += 1
    return count


def test_equal_prompts_have_equal_keys(picture):
    interner = Interner()
    assert codes(picture("cat", 9, (1, 2)), interner) == codes(picture("cat", 9, (1, 2)), interner)


def test_different_pictures_behind_equal_placeholders_share_no_position_of_their_range(picture):
    interner = Interner()
    cat, dog = (codes(picture(name, 9, (1, 2)), interner) for name in ("cat", "dog"))
    assert shared(cat, dog) == 0, "BOS sees the picture, so it differs too"


def test_two_kinds_of_media_with_one_digest_share_nothing(media):
    interner = Interner()
    point = media("cat", 2)
    layouts = (Layout(tokens=(0, 0), spans=(Span(0, 2, 0),), media=(item,)) for item in
               (point, replace(point, kind="box")))  # fmt: skip
    first, second = (codes(layout, interner) for layout in layouts)
    assert shared(first, second) == 0


def test_a_causal_position_before_a_picture_is_shared(media):
    interner = Interner()

    def layout(name: str) -> Layout:
        return Layout(tokens=(7, 8, 0, 0), spans=(Span(2, 4, 0),), media=(media(name, 2),))

    assert shared(codes(layout("cat"), interner), codes(layout("dog"), interner)) == 2


def test_bins_are_part_of_a_key_and_empty_bins_are_none():
    interner = Interner()
    plain = codes(Layout(tokens=(3, 4)), interner)
    assert codes(Layout(tokens=(3, 4), aux=((0, 0), (0, 0))), interner) == plain
    near, far = (codes(Layout(tokens=(3, 4), aux=((0, 0), (1, x))), interner) for x in (5, 6))
    assert shared(plain, near) == shared(near, far) == 1


def test_generated_keys_equal_those_of_the_next_turns_prompt():
    interner = Interner()
    keys = KeyRun.of(Layout(tokens=(1, 2)), interner)
    keys.append(3)
    keys.append(4, (9, 0))
    again = codes(Layout(tokens=(1, 2, 3, 4), aux=((0, 0), (0, 0), (0, 0), (9, 0))), interner)
    assert keys.bytes() == again
    assert len(keys) == 4


def test_a_fork_grows_on_its_own():
    keys = KeyRun.of(Layout(tokens=(1, 2), marks=(1,), stable=2), Interner())
    fork = keys.fork()
    fork.append(3)
    assert (len(keys), len(fork)) == (2, 3)
    assert (fork.marks, fork.stable, fork.namespace) == (keys.marks, 2, keys.namespace)


def test_the_namespace_holds_the_adapter_load_and_the_media_that_fill_no_position(media):
    interner = Interner()
    layout = Layout(tokens=(0, 0, 1), spans=(Span(0, 2, 0),), media=(media("cat", 2), media("bark")))
    keys = KeyRun.of(layout, interner, adapter_load=3)
    assert keys.namespace.adapter_load == 3
    assert keys.namespace.cross == (media("bark").digest,)


def test_marks_hold_span_ends_and_the_stable_mark_but_none_inside_a_range(media):
    layout = Layout(
        tokens=(0,) * 10,
        spans=(Span(1, 6, 0),),
        media=(media("cat", 5),),
        bidirectional=((0, 6),),
        marks=(3, 8, 99),
        stable=9,
    )
    assert KeyRun.of(layout, Interner()).marks == (6, 8, 9)


def test_forgetting_costs_a_hit_and_never_makes_one():
    interner = Interner(max_entries=2)
    first = interner.id(b"cat")
    for content in (b"dog", b"cow"):
        interner.id(content)
    assert len(interner) == 2
    assert interner.id(b"cat") not in {first, interner.id(b"dog"), interner.id(b"cow")}


def test_what_is_used_is_not_forgotten():
    interner = Interner(max_entries=2)
    first = interner.id(b"cat")
    interner.id(b"dog")
    assert interner.id(b"cat") == first
    interner.id(b"cow")
    assert interner.id(b"cat") == first


def test_threads_agree_on_ids():
    interner = Interner()
    found: list[list[int]] = []
    threads = [
        threading.Thread(target=lambda: found.append([interner.id(i) for i in range(500)])) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(ids == found[0] for ids in found)
    assert len(set(found[0])) == 500


position = st.tuples(st.integers(0, 3), st.sampled_from([(), (1,), (2,)]))


@given(a=st.lists(position, max_size=8), b=st.lists(position, max_size=8))
def test_keys_share_exactly_the_positions_that_are_equal(a, b):
    interner = Interner()

    def layout(positions: list[tuple[int, tuple[int, ...]]]) -> Layout:
        return Layout(tokens=tuple(t for t, _ in positions), aux=tuple(x or (0,) for _, x in positions))

    equal = 0
    while equal < min(len(a), len(b)) and a[equal] == b[equal]:
        equal += 1
    assert shared(codes(layout(a), interner), codes(layout(b), interner)) == equal
