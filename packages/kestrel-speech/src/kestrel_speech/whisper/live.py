"""Live sound: the window at the front is decoded again and again while it fills; what is behind a pause is final."""

from __future__ import annotations

from dataclasses import replace

from kestrel_speech.recording import Recording
from kestrel_speech.whisper.features import FRAMES_PER_SECOND, HOP
from kestrel_speech.whisper.segments import cut_window
from kestrel_speech.whisper.sequential import Sequential
from kestrel_speech.whisper.session import Session
from kestrel_speech.whisper.window import WindowPrompt

__all__ = ["Live"]

EVERY_S = 5.0  # of new sound between two looks at it
SETTLED_S = 1.0  # segments that end so long before the newest sound are final


class Live(Sequential):
    """As ``Sequential``, for recordings that are still going on."""

    def __init__(self, session: Session, *, with_times: bool = True) -> None:
        super().__init__(session, with_times=with_times)
        full = session.model.config.num_frames
        self._every = min(round(EVERY_S * FRAMES_PER_SECOND), full)
        self._full = full

    async def run(self, recording: Recording) -> None:
        seek, seen = 0, 0
        while True:
            wanted = min(max(seen, seek) + self._every, seek + self._full)
            have = await recording.length_up_to(wanted * HOP) // HOP
            if have <= seek:
                return
            if have < wanted or have - seek >= self._full:  # over, or a window is full: these steps are final
                seek = await self._window(recording, seek, have - seek)
            else:
                seek = await self._look(recording, seek, have - seek)
            seen = max(have, seek)
            recording.forget(seek * HOP)
            self._show(recording, seek)

    async def _look(self, recording: Recording, seek: int, size: int) -> int:
        """Decode what there is of the window; keep what is settled, show the rest. Where the next look begins."""
        session = self._session
        window = await session.prepare(await recording.read(seek * HOP, size * HOP))
        language, probability = await self._language(window)
        prompt = WindowPrompt(
            task=session.options.task, language=language, history=self._history.ids(), with_times=True
        )
        attempt = await session.decode(window, prompt, attempts=1)
        if attempt.is_silence(session.ladder) or not self._with_times:
            return seek
        start, latest = seek / FRAMES_PER_SECOND, size / FRAMES_PER_SECOND - SETTLED_S
        cut = cut_window(attempt.ids, session.model.special, size, keeps_rest=True)
        settled = []
        for piece in cut.pieces[:-1]:
            if piece.end > latest:
                break
            settled.append(replace(piece, start=piece.start + start, end=piece.end + start))
        rest = cut.pieces[len(settled) :]
        if settled and session.options.with_words:
            settled = await session.words(
                settled, window, prompt, size, offset=start, last_speech=self._last_speech
            )
        if settled:
            session.note(attempt)
            self._keep(settled, attempt, recording, start + size / FRAMES_PER_SECOND, language, probability)
            self._last_speech = settled[-1].end
        self._tail = "".join(session.text_of(piece) for piece in rest)
        return round(settled[-1].end * FRAMES_PER_SECOND) if settled else seek
