"""Carries lane events from device threads to the event loop: at most one cross-thread call per tick, one receiver per
work."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence

from kestrel.lanes import Event, Failed, Finished, TokensReady
from kestrel.types import Metrics, Token

__all__ = ["Receiver", "Router"]

OnTokens = Callable[[Sequence[Token]], None]

GATHERED = 32  # tokens of a work that nobody watches, handed over together: a wake costs as much as a step
WOKEN_TOGETHER = 8  # works in a row that hand over at one tick; the next ones do at another


class Receiver:
    """One work's side of the event loop. ``done`` has one result: how the work finished, or the error that ended it.

    ``on_tokens`` is called with each batch of committed tokens, in order, before the end is known; what it raises
    ends this work alone. ``metrics`` is what the lane says that the work cost, None until its end there is known.
    ``is_watched``: somebody wants to see each token when it is there.
    """

    def __init__(
        self,
        work_id: int,
        done: asyncio.Future[Finished],
        cancel: Callable[[int], None],
        on_tokens: OnTokens,
        *,
        is_watched: bool,
    ) -> None:
        self.work_id = work_id
        self.is_watched = is_watched
        self.metrics: Metrics | None = None
        self.frames: list[int] = []
        self.durations: list[int] = []
        self.done = done
        self._cancel = cancel
        self._on_tokens = on_tokens
        self._num_taken = 0
        self._held: TokensReady | None = None  # of the device thread, as is what follows
        # Rows that began together would all hand over at once, and the device would wait for the loop to read it all
        self._enough = GATHERED - work_id // WOKEN_TOGETHER % GATHERED

    @property
    def num_tokens(self) -> int:
        """Tokens that the lane made for this work, as far as is known here."""
        held = self._held
        return self._num_taken + (0 if held is None else len(held.tokens))

    def gather(self, event: Event, ready: list[Event]) -> None:
        """Add ``event`` to ``ready``, or hold its tokens until there are more. On the device thread."""
        held = self._held
        if isinstance(event, TokensReady):
            if held is not None:
                held.tokens += event.tokens
                held.frames += event.frames
                held.durations += event.durations
                event = held
            if len(event.tokens) < self._enough:
                self._held = event
                return
            self._enough = GATHERED
        elif held is not None:
            ready.append(held)
        self._held = None
        ready.append(event)

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
        self._num_taken += len(event.tokens)
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
    """Work ids and their receivers. ``close`` is the event loop's; the rest is safe on any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._ids = itertools.count(1)
        self._receivers: dict[int, Receiver] = {}

    def open(
        self, cancel: Callable[[int], None], on_tokens: OnTokens, *, is_watched: bool = True
    ) -> Receiver:
        """A receiver under a fresh work id; ``cancel`` is its lane's."""
        done: asyncio.Future[Finished] = self.loop.create_future()
        receiver = Receiver(next(self._ids), done, cancel, on_tokens, is_watched=is_watched)
        self._receivers[receiver.work_id] = receiver
        return receiver

    def abandon(self, receivers: Sequence[Receiver]) -> None:
        """End the works of ``receivers``, for which nobody waits or will."""
        for receiver in receivers:
            self._receivers.pop(receiver.work_id, None)
            receiver.cancel()

    def close(self, receiver: Receiver) -> None:
        """Settle and forget a receiver; its later events are dropped."""
        self._receivers.pop(receiver.work_id, None)
        receiver.settle()

    def deliver(self, events: Sequence[Event]) -> None:
        """Hand a tick's events to the event loop; called on a device thread. Tokens that nobody watches may wait."""
        ready: list[Event] = []
        for event in events:
            receiver = self._receivers.get(event.work_id)
            if receiver is None:  # nobody waits any more
                continue
            if receiver.is_watched:
                ready.append(event)
            else:
                receiver.gather(event, ready)
        if not ready:
            return
        try:
            self.loop.call_soon_threadsafe(self._dispatch, ready)
        except RuntimeError:  # the loop is closed: nobody waits any more
            return

    def _dispatch(self, events: Sequence[Event]) -> None:
        for event in events:
            receiver = self._receivers.get(event.work_id)
            if receiver is not None:
                receiver.take(event)
