"""Random arrivals, chunks, aborts, preemptions and turns on tiny pools: nothing leaks, nothing wrong is ever read."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kestrel.types import Layout, Span

SYSTEM = (5, 6, 7, 8, 9)
TEXT = (1, 2, 0, 1, 2, 0, 1, 2)
MAX_CHUNK = 8

KINDS = [
    ("full",),
    ("window",),
    ("recurrent",),
    ("full", "window"),
    ("full", "recurrent"),
    ("full", "cross"),
    ("full", "window", "recurrent", "cross"),
]


def prompt(media, system: int, image: str, text: int, heard: str) -> Layout:
    """A system prompt (a part of one), perhaps an image that sees itself, perhaps heard audio, some text."""
    head, tail = SYSTEM[:system], TEXT[:text]
    positions = 5 if image else 0
    items = [media(image, positions)] if image else []
    start, end = len(head), len(head) + positions
    spans = (Span(start, end, 0),) if image else ()
    items += [media(heard)] if heard else []
    return Layout(
        tokens=(*head, *[0] * positions, *tail),
        spans=spans,
        media=tuple(items),
        bidirectional=((start, end),) if image == "cat" else (),
        marks=tuple({start, end} - {0}),
        stable=end + 2 if text > 2 else None,
    )


actions = st.tuples(
    st.sampled_from(
        [
            "open",
            "open",
            "run",
            "run",
            "run",
            "commit",
            "commit",
            "settle",
            "finish",
            "abort",
            "preempt",
            "resume",
        ]
    ),
    st.integers(0, 1 << 16),
)


def act(simulation, media, action: str, n: int, in_flight: int) -> None:
    running = simulation.sequences
    if action == "open":
        image, heard = ("", "cat", "dog")[n // 60 % 3], ("", "", "bark", "meow")[n // 180 % 4]
        simulation.open(prompt(media, n % 6, image, 1 + n // 6 % 8, heard))
    elif action == "resume":
        simulation.resume()
    elif action == "settle":
        simulation.settle()
    elif running:
        sequence = running[n % len(running)]
        if action == "run":
            if len(sequence.flights) < in_flight:
                simulation.launch(sequence, 1 + n // 7 % MAX_CHUNK)
        else:
            getattr(simulation, action)(sequence)


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("states", KINDS, ids="+".join)
@settings(max_examples=40)
@given(steps=st.lists(actions, min_size=20, max_size=90), pages=st.integers(6, 24), room=st.integers(0, 6))
def test_launches_read_what_their_prefix_wrote(simulate, media, states, in_flight, steps, pages, room):
    simulation = simulate(
        *states,
        pages=pages,
        window_pages=pages,
        live=3,
        checkpoints=room,
        entries=2,
        max_ahead=in_flight * MAX_CHUNK if pages % 2 else None,
    )
    for action, n in steps:
        act(simulation, media, action, n, in_flight)
        simulation.cache.check()
    simulation.end()
