"""Carries lane events from device threads to the event loop: one cross-thread call per tick, one receiver per work."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence

from kestrel.lanes import Event, Failed, Finished, TokensReady
from kestrel.types import Metrics, Token

__all__ = ["Receiver", "Router"]

OnTokens = Callable[[Sequence[Token]], None]


class Receiver:
    """One work's side of the event loop. ``done`` has one result: how the work finished, or the error that ended it.

    ``on_tokens`` is called with each batch of committed tokens, in order, before the end is known; what it raises
    ends this work alone. ``metrics`` is what the lane says that the work cost, None until its end there is known.
    """

    def __init__(self, work_id: int, cancel: Callable[[int], None], on_tokens: OnTokens) -> None:
        self.work_id = work_id
        self.metrics: Metrics | None = None
        self.num_tokens = 0
        self.frames: list[int] = []
        self.durations: list[int] = []
        self.done: asyncio.Future[Finished] = asyncio.get_running_loop().create_future()
        self._cancel = cancel
        self._on_tokens = on_tokens

    def cancel(self) -> None:
        """Ask the lane to end the work; it ends as "cancelled" with the tokens that it has by then."""
        if self.metrics is None:
            self._cancel(self.work_id)

    def take(self, event: Event) -> None:
        """An event of this work."""
        match event:
            case TokensReady():
                self._feed(event)
            case Finished():
                self.metrics = event.metrics
                if not self.done.done():
                    self.done.set_result(event)
            case Failed():
                self.metrics = event.metrics
                self._fail(event.error)

    def settle(self) -> None:
        """Nobody waits any more: end what still runs on the lane, and count an error as seen."""
        self.cancel()
        if not self.done.done():
            self.done.cancel()
        elif not self.done.cancelled():
            self.done.exception()

    def _feed(self, event: TokensReady) -> None:
        if self.done.done():
            return
        self.num_tokens += len(event.tokens)
        self.frames += event.frames
        self.durations += event.durations
        try:
            self._on_tokens(event.tokens)
        except Exception as error:  # a reader's failure belongs to its own request
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if not self.done.done():
            self.done.set_exception(error)


class Router:
    """Work ids and their receivers. Used on the event loop only, but for ``deliver``."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._ids = itertools.count(1)
        self._receivers: dict[int, Receiver] = {}

    def open(self, cancel: Callable[[int], None], on_tokens: OnTokens) -> Receiver:
        """A receiver under a fresh work id; ``cancel`` is its lane's."""
        receiver = Receiver(next(self._ids), cancel, on_tokens)
        self._receivers[receiver.work_id] = receiver
        return receiver

    def close(self, receiver: Receiver) -> None:
        """Settle and forget a receiver; its later events are dropped."""
        self._receivers.pop(receiver.work_id, None)
        receiver.settle()

    def deliver(self, events: Sequence[Event]) -> None:
        """Hand a tick's events to the event loop; called on a device thread."""
        try:
            self.loop.call_soon_threadsafe(self._dispatch, events)
        except RuntimeError:  # the loop is closed: nobody waits any more
            return

    def _dispatch(self, events: Sequence[Event]) -> None:
        for event in events:
            receiver = self._receivers.get(event.work_id)
            if receiver is not None:
                receiver.take(event)
