"""One log line, one span and a few instruments per request. Nothing is recorded per token.

Instruments come from ``opentelemetry-api``: no-ops until the host application installs an SDK. Names follow
vLLM's stems; with a Prometheus exporter they read ``kestrel_time_to_first_token_seconds`` and so on.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from opentelemetry import metrics, trace
from opentelemetry.metrics import CallbackOptions, Observation

from kestrel.spi import RequestRecord

__all__ = ["JsonFormatter", "Telemetry", "record_fields"]

log = logging.getLogger("kestrel.request")

_LATENCY_BUCKETS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_TOKEN_BUCKETS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)

GaugeReader = Callable[[], Iterable[tuple[float, dict[str, str]]]]


class JsonFormatter(logging.Formatter):
    """One JSON object per log record, with the record's ``kestrel`` fields at top level. Strict JSON."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {"time": self.formatTime(record), "level": record.levelname, "logger": record.name}
        extra = record.__dict__.get("kestrel", {})
        line = fields | {"message": record.getMessage()} | dict(extra)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, allow_nan=False)


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
    """The instruments of one engine. ``running``, ``waiting`` and ``cache_usage`` read gauges when collected."""

    def __init__(
        self, service_name: str, *, running: GaugeReader, waiting: GaugeReader, cache_usage: GaugeReader
    ) -> None:
        meter = metrics.get_meter("kestrel")
        self._tracer = trace.get_tracer("kestrel")
        self._service = service_name
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
        self._ttft = self._seconds(meter, "kestrel_time_to_first_token", "Submission to first token")
        self._tpot = self._seconds(
            meter, "kestrel_time_per_output_token", "Mean gap between tokens of a request"
        )
        self._e2e = self._seconds(meter, "kestrel_e2e_request_latency", "Submission to end")
        self._queue = self._seconds(meter, "kestrel_request_queue_time", "Submission to first scheduling")
        self._length = meter.create_histogram(
            "kestrel_request_generation_tokens", unit="1", description="Generated tokens per request",
            explicit_bucket_boundaries_advisory=_TOKEN_BUCKETS,
        )  # fmt: skip
        for name, reader in (
            ("kestrel_num_requests_running", running),
            ("kestrel_num_requests_waiting", waiting),
            ("kestrel_kv_cache_usage_ratio", cache_usage),
        ):
            meter.create_observable_gauge(name, callbacks=[_observer(reader)], unit="1")

    @staticmethod
    def _seconds(meter: metrics.Meter, name: str, description: str) -> metrics.Histogram:
        return meter.create_histogram(
            name, unit="s", description=description, explicit_bucket_boundaries_advisory=_LATENCY_BUCKETS_S
        )

    @contextmanager
    def span(self, request_id: str, model_id: str, skill: str) -> Iterator[trace.Span]:
        """The span of one request; an exception inside marks it as failed."""
        attributes = {"kestrel.request_id": request_id, "kestrel.model": model_id, "kestrel.skill": skill}
        with self._tracer.start_as_current_span("kestrel.request", attributes=attributes) as span:
            yield span

    def record(self, record: RequestRecord, elapsed_s: float) -> None:
        """Count and log an ended request."""
        m = record.metrics
        labels = {"model": record.model_id, "skill": record.skill, "service": self._service}
        self._requests.add(1, labels | {"status": record.status, "error": record.error_type or ""})
        self._prompt.add(m.input_tokens, labels)
        self._cached.add(m.cached_tokens, labels)
        self._generated.add(m.output_tokens, labels)
        self._e2e.record(elapsed_s, labels)
        if m.output_tokens:
            self._ttft.record(m.ttft_ms / 1000.0, labels)
            self._queue.record(m.queue_time_ms / 1000.0, labels)
            self._length.record(m.output_tokens, labels)
        if m.output_tokens > 1:
            self._tpot.record(m.decode_time_ms / 1000.0 / (m.output_tokens - 1), labels)
        fields = record_fields(record)
        level = logging.WARNING if record.status == "failed" else logging.INFO
        log.log(
            level, " ".join(f"{k}={v}" for k, v in fields.items() if v is not None), extra={"kestrel": fields}
        )


def _observer(reader: GaugeReader) -> Callable[[CallbackOptions], Iterable[Observation]]:
    return lambda options: [Observation(value, labels) for value, labels in reader()]
