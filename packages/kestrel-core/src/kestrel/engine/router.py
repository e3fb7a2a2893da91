"""Carries lane events from device threads to the event loop: one cross-thread call per tick, one receiver per work."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence

from kestrel.errors import EngineStoppedError, KestrelError
from kestrel.lanes import Event, Failed, Finished, TokensReady
from kestrel.types import Token

__all__ = ["Receiver", "Router"]


class Receiver:
    """One work's side of the event loop. Exactly one of ``finished`` and an error ends it; later events are dropped.

    ``on_tokens`` is called with each batch of committed tokens, in order, before the end is known.
    """

    def __init__(self, work_id: int, on_tokens: Callable[[Sequence[Token]], None] | None = None) -> None:
        self.work_id = work_id
        self.on_tokens = on_tokens
        self.tokens: list[Token] = []
        self.done: asyncio.Future[Finished | None] = asyncio.get_running_loop().create_future()

    def feed(self, tokens: Sequence[Token]) -> None:
        """Take committed tokens; an exception of the reader ends this work alone."""
        if self.done.done():
            return
        self.tokens.extend(tokens)
        if self.on_tokens is None:
            return
        try:
            self.on_tokens(tokens)
        except Exception as error:  # a reader's failure belongs to its own request
            self.fail(error)

    def finish(self, finished: Finished | None) -> None:
        """End well; None means the caller cancelled."""
        if not self.done.done():
            self.done.set_result(finished)

    def fail(self, error: BaseException) -> None:
        """End with ``error``."""
        if not self.done.done():
            self.done.set_exception(error)


class Router:
    """Work ids and their receivers. Used on the event loop only, but for ``deliver``."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._ids = itertools.count(1)
        self._receivers: dict[int, Receiver] = {}

    def open(self, on_tokens: Callable[[Sequence[Token]], None] | None = None) -> Receiver:
        """A receiver under a fresh work id."""
        receiver = Receiver(next(self._ids), on_tokens)
        self._receivers[receiver.work_id] = receiver
        return receiver

    def close(self, receiver: Receiver) -> None:
        """Forget a receiver; its later events are dropped."""
        self._receivers.pop(receiver.work_id, None)
        if receiver.done.done() and not receiver.done.cancelled():
            receiver.done.exception()  # mark as seen
        else:
            receiver.done.cancel()

    def deliver(self, events: Sequence[Event]) -> None:
        """Hand a tick's events to the event loop; called on a device thread."""
        try:
            self._loop.call_soon_threadsafe(self._dispatch, events)
        except RuntimeError:  # the loop is closed: nobody waits any more
            return

    def fail_all(self, error: KestrelError) -> None:
        """End every open work with ``error``."""
        for receiver in list(self._receivers.values()):
            receiver.fail(EngineStoppedError(str(error)))

    def _dispatch(self, events: Sequence[Event]) -> None:
        for event in events:
            receiver = self._receivers.get(event.work_id)
            if receiver is None:
                continue
            if isinstance(event, TokensReady):
                receiver.feed(event.tokens)
            elif isinstance(event, Finished):
                receiver.finish(event)
            elif isinstance(event, Failed):
                receiver.fail(event.error)
