"""One log line, one span and a few instruments per request. Nothing is recorded per token.

Instruments come from ``opentelemetry-api``: no-ops until the host application installs an SDK. Names follow
vLLM's stems; with a Prometheus exporter they read ``kestrel_time_to_first_token_seconds`` and so on.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterable, Mapping

from opentelemetry import metrics, trace
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.trace import Status, StatusCode

from kestrel.engine.logs import JsonFormatter
from kestrel.engine.scope import CallScope
from kestrel.spi import RequestRecord

__all__ = ["JsonFormatter", "Telemetry", "record_fields"]

log = logging.getLogger("kestrel.request")

_LATENCY_BUCKETS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_TOKEN_BUCKETS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)

# Of a gauge, OpenTelemetry keeps the callbacks of its first creation alone and never lets go of them; so those read
# whatever engines live when they are called.
_living: weakref.WeakSet[Telemetry] = weakref.WeakSet()

Stats = Callable[[], Mapping[str, Mapping[str, float]]]


def record_fields(record: RequestRecord) -> dict[str, str | int | float | bool | None]:
    """The fields of a request's log line; no prompt or answer text."""
    m = record.metrics
    return {
        "request_id": record.request_id,
        "model": record.model_id,
        "skill": record.skill,
        "status": record.status,
        "error": record.error_type,
        "finish_reason": record.finish_reason,
        "streamed": record.streamed,
        "media": record.num_media,
        "input_tokens": m.input_tokens,
        "cached_tokens": m.cached_tokens,
        "output_tokens": m.output_tokens,
        "queue_ms": round(m.queue_time_ms, 3),
        "prefill_ms": round(m.prefill_time_ms, 3),
        "decode_ms": round(m.decode_time_ms, 3),
        "ttft_ms": round(m.ttft_ms, 3),
    }


class Telemetry:
    """The instruments of one engine. ``stats`` gives each loaded model's counters; gauges read it when collected."""

    def __init__(self, service_name: str, stats: Stats) -> None:
        meter = metrics.get_meter("kestrel")
        self._tracer = trace.get_tracer("kestrel")
        self._service = service_name
        self._stats = stats
        self._requests = meter.create_counter(
            "kestrel_requests", unit="1", description="Ended requests by status"
        )
        self._prompt = meter.create_counter("kestrel_prompt_tokens", unit="1", description="Prompt positions")
        self._cached = meter.create_counter(
            "kestrel_cached_prompt_tokens", unit="1", description="Prompt positions from the prefix cache"
        )
        self._generated = meter.create_counter(
            "kestrel_generation_tokens", unit="1", description="Generated tokens"
        )
        self._ttft = _seconds(meter, "kestrel_time_to_first_token", "Submission to first token")
        self._tpot = _seconds(meter, "kestrel_time_per_output_token", "Mean gap between tokens of a request")
        self._e2e = _seconds(meter, "kestrel_e2e_request_latency", "Submission to end")
        self._queue = _seconds(meter, "kestrel_request_queue_time", "Submission to first scheduling")
        self._length = meter.create_histogram(
            "kestrel_request_generation_tokens", unit="1", description="Generated tokens per request",
            explicit_bucket_boundaries_advisory=_TOKEN_BUCKETS,
        )  # fmt: skip
        for name, counter in (
            ("kestrel_num_requests_running", "running"),
            ("kestrel_num_requests_waiting", "waiting"),
            ("kestrel_kv_cache_usage_ratio", "cache_usage"),
        ):
            meter.create_observable_gauge(name, callbacks=[_observer(counter)], unit="1")
        _living.add(self)

    def begin(self, scope: CallScope) -> trace.Span:
        """The span of a call, under the caller's own; ``end`` ends it."""
        attributes = {
            "kestrel.request_id": scope.request_id,
            "kestrel.model": scope.model_id,
            "kestrel.skill": scope.skill,
        }
        return self._tracer.start_span("kestrel.request", attributes=attributes)

    @staticmethod
    def within(span: trace.Span) -> contextlib.AbstractContextManager[trace.Span]:
        """A block whose spans are children of ``span``. What it raises is not recorded: messages may quote a prompt."""
        return trace.use_span(span, end_on_exit=False, record_exception=False, set_status_on_exception=False)

    def end(self, span: trace.Span, record: RequestRecord, elapsed_s: float) -> None:
        """Count and log an ended request, and end its span."""
        self._count(record, elapsed_s)
        fields = record_fields(record)
        level = logging.WARNING if record.status == "failed" else logging.INFO
        line = " ".join(f"{name}={value}" for name, value in fields.items() if value is not None)
        log.log(level, line, extra={"kestrel": fields})
        for name in ("status", "error", "finish_reason", "input_tokens", "cached_tokens", "output_tokens"):
            if (value := fields[name]) is not None:
                span.set_attribute(f"kestrel.{name}", value)
        if record.status == "failed":
            span.set_status(Status(StatusCode.ERROR, record.error_type))
        span.end()

    def _count(self, record: RequestRecord, elapsed_s: float) -> None:
        m = record.metrics
        labels = {"model": record.model_id, "skill": record.skill, "service": self._service}
        self._requests.add(1, labels | {"status": record.status, "error": record.error_type or ""})
        self._prompt.add(m.input_tokens, labels)
        self._cached.add(m.cached_tokens, labels)
        self._generated.add(m.output_tokens, labels)
        self._e2e.record(elapsed_s, labels)
        if m.ttft_ms:
            self._ttft.record(m.ttft_ms / 1000.0, labels)
            self._queue.record(m.queue_time_ms / 1000.0, labels)
        if m.output_tokens:
            self._length.record(m.output_tokens, labels)
        if m.ttft_ms and m.output_tokens > 1:
            self._tpot.record(m.decode_time_ms / 1000.0 / (m.output_tokens - 1), labels)

    def gauge(self, counter: str) -> list[Observation]:
        """One counter of every loaded model."""
        return [
            Observation(counters[counter], {"model": model_id, "service": self._service})
            for model_id, counters in self._stats().items()
            if counter in counters
        ]


def _seconds(meter: metrics.Meter, name: str, description: str) -> metrics.Histogram:
    return meter.create_histogram(
        name, unit="s", description=description, explicit_bucket_boundaries_advisory=_LATENCY_BUCKETS_S
    )


def _observer(counter: str) -> Callable[[CallbackOptions], Iterable[Observation]]:
    return lambda options: [seen for telemetry in list(_living) for seen in telemetry.gauge(counter)]
