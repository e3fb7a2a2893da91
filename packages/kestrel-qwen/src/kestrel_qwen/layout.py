"""A prompt as positions on three axes, and where its cached states may be taken up again.

Text moves on all axes together. A picture starting at position s fills time s, rows from s and columns from s of its
merged grid; what follows starts behind its longer side.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from kestrel.errors import InvalidRequestError
from kestrel.spi import TextTokenizer
from kestrel.types import Layout, Media, Prepared, Segment, Span, Tokens
from kestrel_qwen.markup import START
from kestrel_qwen.slices import VIDEO

if TYPE_CHECKING:
    from kestrel_qwen.config import QwenConfig

__all__ = ["build_layout"]

# Behind START: the last that the next turn repeats, since it drops the thinking that follows.
ANSWER = "assistant\n"


def build_layout(segments: Sequence[Segment], tokenizer: TextTokenizer, config: QwenConfig) -> Layout:
    """The positions of ``segments``.

    Marks stand where turns begin and spans end; ``stable`` right behind the last opening of an answer.
    """
    ids: list[int] = []
    spans: list[Span] = []
    media: list[Prepared] = []
    rows: tuple[list[int], list[int], list[int]] = ([], [], [])
    following = 0  # the position of what comes next, on every axis
    has_media = any(isinstance(segment, Media) for segment in segments)  # else all axes count from zero
    for segment in segments:
        if isinstance(segment, Media):
            prepared = segment.prepared
            new = [_placeholder(prepared, config)] * prepared.num_positions
            spans.append(Span(len(ids), len(ids) + len(new), len(media)))
            media.append(prepared)
            height, width = _merged_grid(prepared, config)
            axes, step = _axes(following, height, width), max(height, width)
        else:
            new = list(segment.ids) if isinstance(segment, Tokens) else tokenizer.encode(segment.text)
            axes, step = (range(following, following + len(new)),) * 3, len(new)
        ids += new
        following += step
        if has_media:
            for row, values in zip(rows, axes, strict=True):
                row += values
    offset = following - len(ids)
    begins = list(_turns(ids, tokenizer))
    return Layout(
        tokens=tuple(ids),
        positions=tuple(map(tuple, rows)) if has_media else (),
        spans=tuple(spans),
        media=tuple(media),
        marks=tuple(sorted({*(span.end for span in spans), *begins} - {0})),
        stable=_stable(ids, begins, tokenizer),
        decode_offset=(offset,) * 3,
    )


def _placeholder(prepared: Prepared, config: QwenConfig) -> int:
    found = config.video_token_id if prepared.kind == VIDEO else config.image_token_id
    if found is None:
        raise InvalidRequestError(
            f"this Qwen is a text-only model; it was given {prepared.kind!r}. Leave it out"
        )
    return found


def _merged_grid(prepared: Prepared, config: QwenConfig) -> tuple[int, int]:
    """Rows and columns of positions of an image or of one slice of a video."""
    assert config.vision is not None, "media have a placeholder, so there is a tower"
    merge = config.vision.spatial_merge_size
    slices, height, width = prepared.tensors["grid"][0].tolist()
    assert slices == 1, "a video stands in a prompt slice by slice"
    return height // merge, width // merge


def _axes(start: int, height: int, width: int) -> tuple[list[int], list[int], list[int]]:
    """Time, row and column of each position of a merged grid."""
    columns = range(start, start + width)
    return (
        [start] * (height * width),
        [row for row in range(start, start + height) for _ in columns],
        [*columns] * height,
    )


def _turns(ids: Sequence[int], tokenizer: TextTokenizer) -> Iterator[int]:
    """Where turns begin, in order. Control ids come from templates and callers' own tokens, never from text."""
    start, at = tokenizer.token_id(START), -1
    while start is not None:
        try:
            at = ids.index(start, at + 1)
        except ValueError:
            return
        yield at


def _stable(ids: Sequence[int], begins: Sequence[int], tokenizer: TextTokenizer) -> int | None:
    opening = tokenizer.encode(ANSWER)
    for at in reversed(begins):
        end = at + 1 + len(opening)
        if list(ids[at + 1 : end]) == opening:
            return end
    return None
