"""Positions against transformers, exactly; marks and the stable position."""

import random
from types import SimpleNamespace

import pytest
import torch
from qwen_configs import config_of

from kestrel.errors import InvalidRequestError
from kestrel.types import Media, Prepared, Span, Text, Tokens
from kestrel_qwen.layout import build_layout
from kestrel_qwen.slices import slices_of

START, END, IMAGE, VIDEO, VISION, VISION_END = 1, 2, 3, 4, 5, 6
OPENING = [START, *(100 + byte for byte in b"assistant\n")]


def picture(rows, columns, kind="image", slices=1):
    """A media item of ``rows`` × ``columns`` merged positions (per slice)."""
    patches = slices * rows * columns * 4
    return Prepared(
        kind=kind,
        digest=bytes([rows, columns]) * 16,
        num_positions=patches // 4,
        tensors={
            "patches": torch.zeros(patches, 1),
            "grid": torch.tensor([[slices, 2 * rows, 2 * columns]]),
        },
        meta={
            "slice_times_s": tuple(range(slices)),
            "slice_digests": (b"s" * 32,) * slices,
            "width": 1,
            "height": 1,
        },
    )


def random_prompt(seed):
    """Segments of a random prompt, its ids, the kind of each position, and the grids of images and videos."""
    rng = random.Random(seed)
    segments, kinds, images, videos = [], [], [], []

    def say(segment, count, kind=0):
        segments.append(segment)
        kinds.extend([kind] * count)

    for _ in range(rng.randint(1, 7)):
        what = rng.choice(["text", "tokens", "image", "image", "video"])
        if what == "text":
            text = "x" * rng.randint(1, 9)
            say(Text(text), len(text))
        elif what == "tokens":
            ids = tuple(rng.randrange(100, 300) for _ in range(rng.randint(1, 5)))
            say(Tokens(ids), len(ids))
        else:
            rows, columns = rng.randint(1, 7), rng.randint(1, 9)
            if what == "image":
                whole = picture(rows, columns)
                items, grids, kind = [whole], images, 1
            else:
                whole = picture(rows, columns, "video", slices=rng.randint(1, 4))
                items, grids, kind = [part for _, part in slices_of(whole)], videos, 2
            grids.append(whole.tensors["grid"][0])
            for item in items:
                if kind == 2:
                    say(Text("<0.5 seconds>"), 13)
                say(Tokens((VISION,)), 1)
                say(Media(item), item.num_positions, kind)
                say(Tokens((VISION_END,)), 1)
    return segments, kinds, images, videos


@pytest.mark.parametrize("seed", range(50))
def test_positions_equal_those_of_transformers(seed, letters, config):
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5Model

    segments, kinds, images, videos = random_prompt(seed)
    layout = build_layout(segments, letters, config)

    def vision_positions(*args, **options):
        return Qwen3_5Model.get_vision_position_ids(None, *args, **options)

    model = SimpleNamespace(
        config=SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=2)),
        get_vision_position_ids=vision_positions,
    )
    positions, delta = Qwen3_5Model.get_rope_index(
        model,
        torch.tensor([layout.tokens]),
        torch.tensor([kinds]),
        image_grid_thw=torch.stack(images) if images else None,
        video_grid_thw=torch.stack(videos) if videos else None,
    )
    rows = layout.positions or (tuple(range(len(layout))),) * 3  # none are given where all count from zero
    assert torch.equal(torch.tensor(rows), positions[:, 0])
    assert layout.decode_offset == (delta.item(),) * 3
    assert [layout.tokens[i] for i, kind in enumerate(kinds) if kind] == [
        IMAGE if kind == 1 else VIDEO for kind in kinds if kind
    ]


def test_media_are_spans_in_order(letters, config):
    first, second = picture(1, 2), picture(2, 2)
    layout = build_layout([Text("ab"), Media(first), Tokens((7,)), Media(second)], letters, config)
    assert layout.spans == (Span(2, 4, 0), Span(5, 9, 1))
    assert layout.media == (first, second)


def test_turns_and_spans_end_at_marks_and_the_next_turn_repeats_up_to_its_opening(letters, config):
    user = [START, *letters.encode("user\n")]
    layout = build_layout(
        [
            Tokens(tuple(user)),
            Media(picture(1, 1)),
            Tokens((END,)),
            Text("\n"),
            Tokens((START,)),
            Text("assistant\n"),
            Tokens((9,)),
            Text("\n"),
        ],
        letters,
        config,
    )
    picture_end = len(user) + 1
    assert layout.marks == (picture_end, picture_end + 2)
    assert layout.stable == picture_end + 2 + len(OPENING)
    assert layout.tokens[: layout.stable][-len(OPENING) :] == tuple(OPENING)


def test_the_last_opening_is_the_stable_one(letters, config):
    turn = (*OPENING, END)
    layout = build_layout([Tokens((*turn, *turn))], letters, config)
    assert layout.stable == len(turn) + len(OPENING)


def test_a_raw_prompt_has_no_stable_position(letters, config):
    layout = build_layout([Text("assistant\n")], letters, config)
    assert (layout.stable, layout.marks) == (None, ())


def test_a_plain_prompt_counts_from_zero_on_every_axis(letters, config):
    layout = build_layout([Text("abc")], letters, config)
    assert layout.positions == ()
    assert layout.decode_offset == (0, 0, 0)


def test_an_empty_prompt_is_an_empty_layout(letters, config):
    layout = build_layout([], letters, config)
    assert (len(layout), layout.decode_offset) == (0, (0, 0, 0))


def test_a_text_only_model_refuses_media(letters):
    import dataclasses

    config = dataclasses.replace(config_of((3, 4, 5, 6)), vision=None, image_token_id=None)
    with pytest.raises(InvalidRequestError, match="text-only"):
        build_layout([Media(picture(1, 1))], letters, config)
