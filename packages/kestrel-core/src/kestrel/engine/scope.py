"""What all requests of one call share: identity, deadline, seed, the stream, how it may be ended, what it cost."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kestrel.config import Settings
from kestrel.engine.router import Receiver
from kestrel.errors import KestrelError, ModelFaultError, RequestCancelledError, RequestTimeoutError
from kestrel.types import EngineResult, FinishReason, Metrics, StreamChunk

__all__ = ["CallScope"]

_NOT_YET = Settings()  # of a call that is not validated


@dataclass(slots=True, eq=False, kw_only=True)
class CallScope:
    """One call, from its entry to its end. On the event loop, but for what a step of the pool does for it.

    ``submitted`` is in ``time.monotonic`` seconds. ``settings`` are complete once the call is validated. ``ended``:
    why the call was ended from outside. ``running``: works on the lane. ``task`` runs the call; None before.
    """

    model_id: str
    skill: str
    streamed: bool = False
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    submitted: float = field(default_factory=time.monotonic)
    settings: Settings = _NOT_YET
    num_media: int = 0
    emit: Callable[[StreamChunk], None] | None = None
    admitted: bool = False
    ended: KestrelError | None = None
    task: asyncio.Task[EngineResult] | None = None
    running: set[Receiver] = field(default_factory=set)
    reasons: list[FinishReason] = field(default_factory=list)
    costs: dict[int, Metrics] = field(default_factory=dict)

    @property
    def seed(self) -> int:
        """The seed of the call's randomness."""
        assert self.settings.seed is not None, "the call is not validated yet"
        return self.settings.seed

    @property
    def deadline(self) -> float | None:
        """When ``timeout_s`` ends, in ``time.monotonic`` seconds."""
        timeout_s = self.settings.timeout_s
        return None if timeout_s is None else self.submitted + timeout_s

    @property
    def elapsed_s(self) -> float:
        """Seconds since the call came in."""
        return time.monotonic() - self.submitted

    def check(self) -> None:
        """Raise why the call must not go on, if it must not."""
        if self.ended is not None:
            raise self.ended
        if self.deadline is not None and time.monotonic() >= self.deadline:
            raise self.timed_out()

    def timed_out(self) -> RequestTimeoutError:
        """The error of a call that took longer than its ``timeout_s``."""
        return RequestTimeoutError(
            f"request {self.request_id} did not finish within timeout_s={self.settings.timeout_s:g} s "
            "(queue time included). Retry, or raise timeout_s."
        )

    @contextlib.contextmanager
    def typed_errors(self) -> Iterator[None]:
        """Whatever skills and families trip over inside ends this call alone, as a ModelFaultError."""
        try:
            yield
        except KestrelError:
            raise
        except Exception as error:
            raise ModelFaultError(
                f"request {self.request_id}: {self.skill} failed inside {self.model_id!r} ({type(error).__name__}: "
                f"{error}). This request alone is lost; if it repeats, tell whoever maintains the model's package"
            ) from error

    def end(self, error: KestrelError) -> None:
        """End the call with ``error``, wherever it is."""
        if self.ended is None:
            self.ended = error
        if self.task is not None:
            self.task.cancel()

    def cancel(self) -> None:
        """The caller gave up. Works on the lane end as "cancelled" and are still read; before, the call just ends."""
        error = RequestCancelledError(f"request {self.request_id} was cancelled by its caller")
        if not self.running:
            self.end(error)
            return
        self.ended = self.ended or error
        for receiver in list(self.running):
            receiver.cancel()

    def cost(self, receiver: Receiver, *, is_sibling: bool) -> None:
        """Note what a work cost. Siblings share one prompt, which the first of them pays for."""
        made = receiver.metrics or Metrics(output_tokens=receiver.num_tokens)
        if is_sibling:
            made = Metrics(output_tokens=made.output_tokens, decode_time_ms=made.decode_time_ms)
        self.costs[receiver.work_id] = made

    def total(self) -> Metrics:
        """The call's metrics: sums over its works; queue time and TTFT of the first."""
        if not self.costs:
            return Metrics()
        first, made = self.costs[min(self.costs)], self.costs.values()
        return Metrics(
            input_tokens=sum(m.input_tokens for m in made),
            output_tokens=sum(m.output_tokens for m in made),
            cached_tokens=sum(m.cached_tokens for m in made),
            queue_time_ms=first.queue_time_ms,
            prefill_time_ms=sum(m.prefill_time_ms for m in made),
            decode_time_ms=sum(m.decode_time_ms for m in made),
            ttft_ms=first.ttft_ms,
        )

    def finish_reason(self) -> FinishReason:
        """How a call of several works ended, taken together."""
        kinds = set(self.reasons)
        return "cancelled" if "cancelled" in kinds else "length" if "length" in kinds else "stop"
