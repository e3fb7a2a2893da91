"""A fake engine behind the command line: it answers by rule, and remembers what it was asked."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner

from kestrel.cli import output, session
from kestrel.cli.app import build_app
from kestrel.config import RuntimeConfig
from kestrel.plugins import PluginHost
from kestrel.types import ChunkKind, EngineResult, Metrics, StreamChunk

METRICS = Metrics(
    input_tokens=730,
    output_tokens=11,
    cached_tokens=729,
    prefill_time_ms=5.0,
    decode_time_ms=100.0,
    ttft_ms=12.0,
)
BOX = {"x_min": 0.0, "y_min": 0.0, "x_max": 0.5, "y_max": 1.0}
OUTPUTS: Mapping[str, Mapping[str, Any]] = {
    "query": {"answer": "two red circles"},
    "caption": {"caption": "A red circle on grey."},
    "point": {"points": [{"x": 0.25, "y": 0.5}, {"x": 0.75, "y": 0.125}]},
    "detect": {"objects": [{"x_min": 0.25, "y_min": 0.25, "x_max": 0.5, "y_max": 0.75}]},
    "transcribe": {
        "text": "Words.",
        "duration_seconds": 1.0,
        "segments": [{"text": "Words.", "start": 0, "end": 1}],
    },
    "segment": {"segments": [{"svg_path": "M 0 0 L 1 1 Z", "bbox": BOX}]},
}


class FakeStream:
    """Chunks of a result's text, a word each, behind a thought when ``reasons``."""

    def __init__(self, result: EngineResult, text: str, reasons: bool) -> None:
        self._result = result
        self._chunks = [StreamChunk(ChunkKind.REASONING, "hmm")] if reasons else []
        self._chunks += [StreamChunk(ChunkKind.TEXT, word) for word in text.replace(" ", "\0 ").split("\0")]

    async def __aiter__(self) -> AsyncIterator[StreamChunk]:
        for chunk in self._chunks:
            yield chunk

    async def result(self) -> EngineResult:
        return self._result


@dataclass
class FakeEngine:
    """Implements what the commands use of ``InferenceEngine``. ``answers`` overrides the output or raises, per call."""

    config: RuntimeConfig = field(default_factory=RuntimeConfig)
    answers: Callable[[str, Mapping[str, Any]], Mapping[str, Any] | None] = lambda skill, inputs: None
    delay_s: Callable[[Mapping[str, Any]], float] = lambda inputs: 0.0
    calls: list[tuple[str, dict[str, Any], dict[str, Any]]] = field(default_factory=list)
    streamed: int = 0
    running: int = 0
    most_running: int = 0
    was_stopped: bool = False
    models: tuple[str, ...] = ("fake/model",)
    finish_reason: Any = "stop"
    warnings: tuple[str, ...] = ()

    async def __aenter__(self) -> FakeEngine:
        return self

    async def __aexit__(self, *ended: object) -> None:
        self.was_stopped = True

    def model(self, model_id: str | None = None) -> Any:
        return SimpleNamespace(model_id=self.models[0], skills=("query",), supports=lambda skill: True)

    async def run(self, skill: str, inputs: Mapping[str, Any], settings: Any = None) -> EngineResult:
        self.calls.append((skill, dict(inputs), dict(settings or {})))
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        await asyncio.sleep(self.delay_s(inputs))
        self.running -= 1
        output = self.answers(skill, inputs)
        return self._result(dict(output if output is not None else _output(skill, inputs)))

    async def start_stream(self, skill: str, inputs: Mapping[str, Any], settings: Any = None) -> FakeStream:
        result = await self.run(skill, inputs, settings)
        self.streamed += 1
        text = next(iter(result.output.values()))
        return FakeStream(
            result, text["content"] if isinstance(text, dict) else text, bool(inputs.get("reasoning"))
        )

    async def generate(self, prompt: str, settings: Any = None) -> EngineResult:
        return await self.run("generate", {"prompt": prompt}, settings)

    def _result(self, output: dict[str, Any]) -> EngineResult:
        return EngineResult(
            output=output,
            finish_reason=self.finish_reason,
            metrics=METRICS,
            request_id="r1",
            seed=7,
            model_id=self.models[0],
            warnings=self.warnings,
        )


def _output(skill: str, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    if skill == "chat":
        turns = [message for message in inputs["messages"] if message["role"] == "user"]
        return {"message": {"role": "assistant", "content": f"answer {len(turns)}"}, "finish_reason": "stop"}
    return {"text": "words", "token_ids": []} if skill == "generate" else OUTPUTS[skill]


@pytest.fixture(autouse=True)
def loggers_as_before() -> Iterator[None]:
    """What a command does to Kestrel's loggers ends with the test."""
    loggers = [logging.getLogger(name) for name in ("kestrel", "kestrel.request")]
    before = [(logger.handlers[:], logger.propagate, logger.level) for logger in loggers]
    yield
    for logger, (handlers, propagate, level) in zip(loggers, before, strict=True):
        logger.handlers[:] = handlers
        logger.propagate = propagate
        logger.setLevel(level)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    """The engine that every command of the test gets; no plugin is installed."""
    fake = FakeEngine()

    async def create(config: RuntimeConfig, progress: session.Report, plugins: PluginHost) -> FakeEngine:
        fake.config = config
        progress("load", 1, 1)
        return fake

    monkeypatch.setattr(session, "create_engine", create)
    monkeypatch.setattr(session, "load_plugins", lambda: PluginHost.from_modules({}))
    return fake


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Standard output (and only that) is a terminal."""
    import sys

    monkeypatch.setattr(output, "is_terminal", lambda stream: stream is sys.stdout)


@dataclass(frozen=True)
class Ran:
    """What a command printed and returned."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()


Run = Callable[..., Ran]


@pytest.fixture
def run() -> Run:
    """Runs ``kestrel ARGUMENTS`` in this process."""

    def run(*arguments: str | Path, stdin: str | bytes | None = None) -> Ran:
        result = CliRunner().invoke(build_app(), [str(a) for a in arguments], input=stdin)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Ran(result.exit_code, result.stdout, result.stderr)

    return run


@pytest.fixture
def picture(tmp_path: Path) -> Callable[[str], Path]:
    """Writes a small grey picture under a name and returns its path."""

    def picture(name: str = "grey.png") -> Path:
        path = tmp_path / name
        Image.new("RGB", (40, 20), (128, 128, 128)).save(path)
        return path

    return picture


def json_lines(text: str) -> Sequence[Any]:
    """Every line as strict JSON."""
    import json

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]
