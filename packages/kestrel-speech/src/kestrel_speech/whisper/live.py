"""Live sound: the window at the front is decoded again and again while it fills; what is behind a pause is final."""

from __future__ import annotations

from dataclasses import replace

from kestrel_speech.recording import Recording
from kestrel_speech.whisper.features import FRAMES_PER_SECOND, HOP
from kestrel_speech.whisper.segments import cut_window
from kestrel_speech.whisper.session import Heard
from kestrel_speech.whisper.walk import Walk

__all__ = ["live"]

EVERY_S = 5.0  # of new sound between two looks at it
SETTLED_S = 1.0  # segments that end so long before the newest sound are final


async def live(recording: Recording, walk: Walk) -> None:
    """Transcribe ``recording`` while it is still going on."""
    session = walk.session
    full = session.model.config.num_frames
    every = min(round(EVERY_S * FRAMES_PER_SECOND), full)
    seek = seen = 0
    while True:
        wanted = min(max(seen, seek) + every, seek + full)
        have = await recording.length_up_to(wanted * HOP) // HOP
        if have <= seek:
            return
        tail = ""
        if have < wanted or have - seek >= full:  # it is over, or a window is full: what is said now stays
            found = await walk.step(recording, seek, have - seek)
            session.accept(found.heard)
            seek = found.following
        else:
            seek, tail = await _look(recording, seek, have - seek, walk)
        seen = max(have, seek)
        recording.forget(seek * HOP)
        session.reached(recording.seconds_at(seek * HOP), tail)


async def _look(recording: Recording, seek: int, size: int, walk: Walk) -> tuple[int, str]:
    """Decode what there is of the window; keep what is settled. Where the next look begins, and what is not settled."""
    session = walk.session
    window = await walk.open(recording, seek, size)
    if window is None:
        return seek, ""
    attempt = await session.decode(window.prepared, window.prompt, attempts=1)
    if attempt.is_silence(session.ladder):
        return seek, ""
    if not window.prompt.with_times:
        return seek, attempt.text
    cut = cut_window(attempt.ids, session.model.special, size, keeps_rest=True)
    pieces = [replace(p, start=p.start + window.start, end=p.end + window.start) for p in cut.pieces]
    count = next((i for i, p in enumerate(pieces) if p.end > window.end - SETTLED_S), len(pieces) - 1)
    settled, rest = pieces[:count], pieces[count:]
    if settled:
        if session.options.with_words:
            settled = await walk.words(window, settled)
        walk.spoke_until(settled)
        heard = Heard(recording=recording, attempt=attempt, language=window.prompt.language, until=window.end,
                      probability=window.probability, pieces=tuple(settled))  # fmt: skip
        session.accept(walk.keep(heard))
        seek = max(seek + 1, round(settled[-1].end * FRAMES_PER_SECOND))
    return seek, "".join(session.text_of(piece) for piece in rest)
