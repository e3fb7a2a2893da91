"""What a host sees of its requests: instruments, spans, log lines, observers. Never a word of a prompt."""

import asyncio
import json
import logging
import math

import pytest
from engine_toys import LONG, picture, until
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from kestrel.engine import JsonFormatter, telemetry
from kestrel.errors import InvalidRequestError, ModelFaultError

SECRET = "xyzzy"


class Host:
    """An application that has installed an SDK."""

    def __init__(self):
        self.reader = InMemoryMetricReader()
        self.meters = MeterProvider(metric_readers=[self.reader])
        self.exporter = InMemorySpanExporter()
        self.tracers = TracerProvider()
        self.tracers.add_span_processor(SimpleSpanProcessor(self.exporter))

    def points(self, name):
        """The data points of one instrument."""
        found = self.reader.get_metrics_data()
        scopes = [] if found is None else [s for r in found.resource_metrics for s in r.scope_metrics]
        metrics = [m for scope in scopes for m in scope.metrics if m.name == name]
        return [point for metric in metrics for point in metric.data.data_points]

    def total(self, name, **labels):
        return sum(
            p.value for p in self.points(name) if all(p.attributes.get(k) == v for k, v in labels.items())
        )

    def histogram(self, name):
        (point,) = self.points(name)
        return point.count, point.sum

    @property
    def spans(self):
        return self.exporter.get_finished_spans()


@pytest.fixture
def host(monkeypatch):
    made = Host()
    monkeypatch.setattr(telemetry.metrics, "get_meter", made.meters.get_meter)
    monkeypatch.setattr(telemetry.trace, "get_tracer", made.tracers.get_tracer)
    yield made
    made.meters.shutdown()
    made.tracers.shutdown()


async def every_end(engine, toys):
    """A good, a refused, a failed and a cancelled request."""
    await engine.query(picture(), SECRET)
    with pytest.raises(InvalidRequestError):
        await engine.query(question=SECRET, settings={"temperature": -1})
    toys.controls().failure = RuntimeError(SECRET)
    with pytest.raises(ModelFaultError):
        await engine.query(question=SECRET)
    toys.controls().failure = None
    stream = await engine.query(question=SECRET, stream=True, settings=LONG)
    await anext(stream)
    await stream.aclose()


async def test_counters_count_requests_by_status_and_tokens(toys, host):
    async with toys.engine(service_name="shop") as engine:
        await every_end(engine, toys)
        again = await engine.query(picture(), SECRET)
    labels = {"model": "toy", "skill": "query", "service": "shop"}
    assert host.total("kestrel_requests", status="ok", error="", **labels) == 2
    assert host.total("kestrel_requests", status="failed", error="InvalidRequestError", **labels) == 1
    assert host.total("kestrel_requests", status="failed", error="ModelFaultError", **labels) == 1
    assert host.total("kestrel_requests", status="cancelled", **labels) == 1
    metrics = [record.metrics for record in toys.records]
    assert host.total("kestrel_prompt_tokens") == sum(m.input_tokens for m in metrics)
    assert host.total("kestrel_generation_tokens") == sum(m.output_tokens for m in metrics)
    assert host.total("kestrel_cached_prompt_tokens") >= again.metrics.cached_tokens > 0


async def test_histograms_have_one_value_per_request_that_got_so_far(toys, host):
    async with toys.engine() as engine:
        results = [await engine.query(question=f"{i}") for i in range(3)]
        with pytest.raises(InvalidRequestError):
            await engine.query(question="")
    seconds = sum(result.metrics.ttft_ms for result in results) / 1000
    assert host.histogram("kestrel_time_to_first_token") == (3, pytest.approx(seconds))
    assert host.histogram("kestrel_request_queue_time")[0] == 3
    assert host.histogram("kestrel_request_generation_tokens") == (3, 81)
    per_token = sum(result.metrics.decode_time_ms for result in results) / 1000 / 26
    assert host.histogram("kestrel_time_per_output_token") == (3, pytest.approx(per_token))
    count, latency = host.histogram("kestrel_e2e_request_latency")
    assert (count, latency > seconds) == (4, True)


async def test_gauges_show_what_runs_now_in_every_engine(toys, host):
    toys.controls().delay_s = 0.001
    async with toys.engine(max_batch_size=1, service_name="first") as engine:
        tasks = [asyncio.ensure_future(engine.query(question="?", settings=LONG)) for _ in range(3)]
        await until(lambda: engine.stats()["toy"]["running"] and engine.stats()["toy"]["waiting"] == 2)
        async with await toys.create(toys.config("other", service_name="second")):
            gauges = {
                name: {(p.attributes["model"], p.attributes["service"]): p.value for p in host.points(name)}
                for name in (
                    "kestrel_num_requests_running",
                    "kestrel_num_requests_waiting",
                    "kestrel_kv_cache_usage_ratio",
                )
            }
        one, other = ("toy", "first"), ("other", "second")
        assert gauges["kestrel_num_requests_running"] == {one: 1, other: 0}
        assert gauges["kestrel_num_requests_waiting"] == {one: 2, other: 0}
        assert 0 < gauges["kestrel_kv_cache_usage_ratio"][one] < 1
        assert len(host.points("kestrel_num_requests_running")) == 1, "a stopped engine shows nothing"
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_nothing_is_recorded_per_token(toys, host, monkeypatch):
    calls = []
    async with toys.engine() as engine:
        await engine.query(question="?")
        real = engine._calls._telemetry._generated.add
        monkeypatch.setattr(
            engine._calls._telemetry._generated, "add", lambda *a, **k: (calls.append(a), real(*a, **k))
        )
        await engine.query(question="?", settings={**LONG, "max_tokens": 100})
    assert [amount for amount, _ in calls] == [100]


async def test_every_request_is_one_span_under_its_callers(toys, host):
    tracer = host.tracers.get_tracer("caller")
    async with toys.engine() as engine:
        with tracer.start_as_current_span("outer") as outer:
            result = await engine.query(question="?")
        await every_end(engine, toys)
    spans = [span for span in host.spans if span.name == "kestrel.request"]
    assert len(spans) == 5
    first = spans[0]
    assert first.parent.span_id == outer.get_span_context().span_id
    assert first.attributes["kestrel.request_id"] == result.request_id
    assert first.attributes["kestrel.output_tokens"] == 27
    assert [span.status.status_code for span in spans] == [
        StatusCode.UNSET, StatusCode.UNSET, StatusCode.ERROR, StatusCode.ERROR, StatusCode.UNSET,
    ]  # fmt: skip
    assert [span.attributes["kestrel.status"] for span in spans] == [
        "ok", "ok", "failed", "failed", "cancelled",
    ]  # fmt: skip
    assert [span.status.description for span in spans if span.status.description] == [
        "InvalidRequestError",
        "ModelFaultError",
    ]
    assert all(span.parent is None for span in spans[1:])
    assert SECRET not in "".join(span.to_json() for span in spans)


async def test_spans_of_a_composition_are_inside_the_requests(toys, host):
    from kestrel.spi import Call, Skill

    tracer = host.tracers.get_tracer("family")

    class Inner(Skill):
        name = "inner"

        def parse(self, inputs, settings):
            return Call(skill=self.name, settings=settings)

        def request(self, call, prompt, tokenizer):
            raise AssertionError

    async def work(call, infer):
        with tracer.start_as_current_span("inside"):
            return {}

    toys.skills = (Inner(),)
    toys.family.compositions["inner"] = work
    async with toys.engine() as engine:
        await (await engine.model().stream("inner")).result()
    inside, request = host.spans
    assert (inside.name, request.name) == ("inside", "kestrel.request")
    assert inside.parent.span_id == request.context.span_id


async def test_one_log_line_per_request_without_its_text(toys, caplog):
    caplog.set_level(logging.INFO, "kestrel.request")
    async with toys.engine() as engine:
        await every_end(engine, toys)
    lines = [record for record in caplog.records if record.name == "kestrel.request"]
    assert [(line.levelname, line.kestrel["status"]) for line in lines] == [
        ("INFO", "ok"),
        ("WARNING", "failed"),
        ("WARNING", "failed"),
        ("INFO", "cancelled"),
    ]
    assert lines[0].kestrel["model"] == "toy"
    assert lines[0].kestrel["media"] == 1
    assert lines[0].kestrel["output_tokens"] == 27
    assert lines[2].kestrel["error"] == "ModelFaultError"
    for line in lines:
        assert SECRET not in line.getMessage()
        assert "ghijkl" not in line.getMessage()
        assert f"request_id={line.kestrel['request_id']}" in line.getMessage()


async def test_unknown_skills_share_one_label(toys):
    async with toys.engine() as engine:
        for name in ("a" * 50, "b" * 50):
            with pytest.raises(InvalidRequestError):
                await engine.run(name, {})
    assert [(record.skill, record.status) for record in toys.records] == [("unknown", "failed")] * 2


async def test_observers_learn_of_every_end_once(toys):
    async with toys.engine() as engine:
        await every_end(engine, toys)
    assert [(r.status, r.error_type, r.finish_reason, r.streamed) for r in toys.records] == [
        ("ok", None, "stop", False),
        ("failed", "InvalidRequestError", None, False),
        ("failed", "ModelFaultError", None, False),
        ("cancelled", None, "cancelled", True),
    ]


def test_json_lines_are_strict_whatever_is_in_them():
    formatter = JsonFormatter()
    record = logging.LogRecord("kestrel.request", logging.INFO, "f.py", 1, 'said "%s"\n', ("ä",), None)
    record.kestrel = {"ttft_ms": math.nan, "more": [math.inf, {"x": -math.inf, 3: object}], "ok": 1.5}
    line = formatter.format(record)
    assert "\n" not in line
    found = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert found["message"] == 'said "ä"\n'
    assert (found["ttft_ms"], found["ok"]) == (None, 1.5)
    assert found["more"] == [None, {"x": None, "3": "<class 'object'>"}]
    assert found["time"].endswith("+00:00")
    assert (found["level"], found["logger"]) == ("INFO", "kestrel.request")


def test_json_lines_hold_tracebacks():
    try:
        raise LookupError("gone")
    except LookupError as error:
        info = (type(error), error, error.__traceback__)
    record = logging.LogRecord("kestrel", logging.ERROR, "f.py", 1, "failed", (), info)
    assert "LookupError: gone" in json.loads(JsonFormatter().format(record))["exception"]
