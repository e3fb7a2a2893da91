"""A window's ids to segments, and how far the window got: OpenAI's rules for long files. Pure functions of ids.

Two times side by side end a segment and begin the next. Ids that end in one time alone, behind text, say that nothing
follows in the window. Whatever is left unfinished belongs to the next window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from kestrel.skills import SpokenWord
from kestrel_speech.whisper.features import FRAMES_PER_SECOND
from kestrel_speech.whisper.tokens import SpecialIds

__all__ = ["STEP_FRAMES", "Cut", "Piece", "cut_window", "with_longer_rest"]

STEP_FRAMES = 2  # mel frames per step of a time id: 0.02 s
LEAST_REST = (
    2 * FRAMES_PER_SECOND
)  # of what is left unfinished, in frames: models misunderstand shorter sounds


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A segment as ids, times included, from ``start`` to ``end`` seconds of the window."""

    ids: tuple[int, ...]
    start: float
    end: float
    words: tuple[SpokenWord, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """``pieces`` of a window; ``advance``: frames to the next window; ``ends_single``: the last id is a lone time."""

    pieces: tuple[Piece, ...]
    advance: int
    ends_single: bool


def cut_window(
    ids: Sequence[int],
    special: SpecialIds,
    num_frames: int,
    *,
    with_times: bool = True,
    keeps_rest: bool = False,
) -> Cut:
    """The segments of a window of ``num_frames`` whose ids (without the end) are ``ids``; one of them without times.

    ``keeps_rest``: what is left unfinished is a segment up to the window's end, since no other window follows.
    """
    if not with_times:
        piece = Piece(ids=tuple(ids), start=0.0, end=num_frames / FRAMES_PER_SECOND)
        return Cut(pieces=(piece,), advance=num_frames, ends_single=True)
    is_time = [special.is_time(i) for i in ids]
    ends_single = is_time[-2:] == [False, True]
    breaks = [at for at, pair in enumerate(pairwise(is_time), start=1) if all(pair)]
    if not breaks:
        piece = Piece(ids=tuple(ids), start=0.0, end=_lone_end(ids, special, num_frames))
        return Cut(pieces=(piece,), advance=num_frames, ends_single=ends_single)
    stops = [*breaks, len(ids)] if ends_single else breaks
    pieces = [
        Piece(ids=tuple(ids[a:b]), start=_seconds(ids[a], special), end=_seconds(ids[b - 1], special))
        for a, b in pairwise([0, *stops])
    ]
    if keeps_rest and stops[-1] < len(ids):
        rest = tuple(ids[stops[-1] :])
        pieces.append(Piece(ids=rest, start=_seconds(rest[0], special), end=num_frames / FRAMES_PER_SECOND))
    advance = num_frames if ends_single else (ids[stops[-1] - 1] - special.time_begin) * STEP_FRAMES
    return Cut(pieces=tuple(pieces), advance=advance or num_frames, ends_single=ends_single)


def with_longer_rest(cut: Cut, num_frames: int) -> Cut:
    """``cut`` of a window of ``num_frames`` behind which nothing is read: what is left for the next one begins with
    the last segment where it would be very short."""
    if not 0 < num_frames - cut.advance < LEAST_REST or len(cut.pieces) < 2:
        return cut
    start = round(cut.pieces[-1].start * FRAMES_PER_SECOND)
    return replace(cut, pieces=cut.pieces[:-1], advance=start) if start > 0 else cut


def _lone_end(ids: Sequence[int], special: SpecialIds, num_frames: int) -> float:
    """Where the one segment of a window ends: at its last time, if that is not 0."""
    times = [i for i in ids if special.is_time(i)]
    if times and times[-1] != special.time_begin:
        return _seconds(times[-1], special)
    return num_frames / FRAMES_PER_SECOND


def _seconds(token_id: int, special: SpecialIds) -> float:
    return max(0, token_id - special.time_begin) * STEP_FRAMES / FRAMES_PER_SECOND
