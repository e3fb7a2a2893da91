"""Real weights and real speech from the package registry; what cannot be had skips its tests visibly."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import realweights
from realweights import oracles

from kestrel.media import open_audio

MODELS = ("tiny.en", "base")
GREEDY = {"temperature": 0.0}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here needs weights, and time."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.weights)
            item.add_marker(pytest.mark.timeout(1800))


def _had(fetch: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return fetch(*arguments)
    except realweights.NotAvailable as error:
        pytest.skip(f"not available: {error}")


@pytest.fixture(scope="session")
def had() -> Callable[..., Any]:
    """A function that calls another, and skips the test when what it fetches is not available."""
    return _had


@pytest.fixture(scope="session", autouse=True)
def _two_threads(_one_thread: None) -> Iterator[None]:
    """Real sizes are faster on several threads, unlike the tiny ones."""
    import torch

    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.fixture(scope="session", params=MODELS)
def model(request: pytest.FixtureRequest) -> str:
    """The name of a model."""
    return str(request.param)


@pytest.fixture(scope="session")
def engine_of() -> Iterator[Callable[[str], Any]]:
    """A function from a model's name to an engine with it."""
    from kestrel.config import RuntimeConfig
    from kestrel.engine import SyncEngine

    engines: dict[str, Any] = {}

    def engine_of(name: str) -> Any:
        if name not in engines:
            path = _had(realweights.whisper, name)
            engines[name] = SyncEngine(RuntimeConfig(model_path=path, device="cpu"))
        return engines[name]

    yield engine_of
    for engine in engines.values():
        engine.shutdown()


@pytest.fixture(scope="session")
def hear(engine_of: Callable[[str], Any]) -> Callable[..., dict[str, Any]]:
    """``hear(model, audio, …)``: the output of transcribe, greedy unless told otherwise."""

    def hear(
        name: str, audio: Any, *, settings: dict[str, Any] | None = None, **options: Any
    ) -> dict[str, Any]:
        given = {"sample_rate": 16_000} if isinstance(audio, np.ndarray) else {}
        result = engine_of(name).transcribe(
            audio, settings=GREEDY if settings is None else settings, **given, **options
        )
        return dict(result.output)

    return hear


@pytest.fixture(scope="session")
def librivox() -> tuple[realweights.Sample, ...]:
    return _had(realweights.librivox)


@pytest.fixture(scope="session")
def recordings() -> dict[str, realweights.Sample]:
    return {sample.name: sample for sample in _had(realweights.recordings)}


@pytest.fixture(scope="session")
def pangrams() -> tuple[realweights.Sample, ...]:
    return _had(realweights.pangrams)


@pytest.fixture(scope="session")
def faster_whisper() -> Callable[[str], oracles.FasterWhisper]:
    """A function from a model's name to faster-whisper in float32."""
    pytest.importorskip("faster_whisper")
    return functools.cache(lambda name: _had(oracles.FasterWhisper, name))


@pytest.fixture(scope="session")
def openai_whisper() -> Callable[[str], oracles.OpenAIWhisper]:
    """A function from a model's name to openai-whisper."""
    pytest.importorskip("whisper")
    return functools.cache(lambda name: _had(oracles.OpenAIWhisper, name))


@pytest.fixture(scope="session")
def pcm() -> Callable[[Path], np.ndarray]:
    """A recording as samples at 16 kHz, the same for every implementation."""

    @functools.cache
    def pcm(path: Path) -> np.ndarray:
        with open_audio(path) as stream:
            return np.concatenate(list(stream.blocks()))

    return pcm
