"""Half an hour of real speech with silences between: no drift, nothing lost, memory flat."""

import itertools
import os
import wave

import numpy as np
import psutil
import pytest
import realweights
from realweights.oracles import error_rate, normalise

from kestrel.config import RuntimeConfig
from kestrel.engine import SyncEngine
from kestrel.types import ChunkKind

RATE = 16000
MINUTES = int(os.environ.get("KESTREL_LONG_MINUTES", "30"))


@pytest.fixture(scope="module")
def long(librivox, pcm, tmp_path_factory):
    """(path, [(start, end, text)]): the clips again and again, behind pauses of 0.5 to 4 s."""
    random = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("long") / "long.wav"
    said, at = [], 0
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, RATE, 0, "NONE", ""))
        while at < MINUTES * 60 * RATE:
            sample = librivox[len(said) % len(librivox)]
            pause = round(random.uniform(0.5, 4.0) * RATE)
            samples = pcm(sample.path)
            file.writeframes((random.standard_normal(pause) * 3).astype("<i2").tobytes())
            file.writeframes((samples * 32767).astype("<i2").tobytes())
            said.append(((at + pause) / RATE, (at + pause + len(samples)) / RATE, sample.text))
            at += pause + len(samples)
    return path, said


@pytest.fixture
def engine(had):
    """tiny.en with pools small enough to be filled before the memory is looked at."""
    path = had(realweights.whisper, "tiny.en")
    with SyncEngine(RuntimeConfig(model_path=path, device="cpu", kv_cache_bytes=2**26)) as engine:
        yield engine


@pytest.mark.parametrize("way", ["sequential", "batched"])
def test_half_an_hour_keeps_its_clock_and_its_words(engine, long, way):
    path, said = long
    options = {"batch_size": 8} if way == "batched" else {"condition_on_previous_text": False}
    stream = engine.transcribe(path, timestamps="word", stream=True, settings={"temperature": 0.0}, **options)
    process, used = psutil.Process(), []
    for chunk in stream:
        if chunk.kind is ChunkKind.SNAPSHOT and "completed_seconds" in chunk.value:
            used.append((chunk.value["completed_seconds"], process.memory_info().rss))
    output = stream.result().output
    assert output["source_duration_seconds"] == pytest.approx(said[-1][1], abs=0.01)

    words = [word for segment in output["segments"] for word in segment["words"]]
    assert all(a["start"] <= b["start"] + 1e-6 for a, b in itertools.pairwise(words))
    assert all(0 <= word["start"] <= word["end"] <= said[-1][1] + 0.01 for word in words)

    pairs, late = [], []
    for start, end, text in said:
        inside = [word for word in words if start - 0.3 <= (word["start"] + word["end"]) / 2 <= end + 0.3]
        assert inside, f"nothing was heard from {start:.1f} to {end:.1f} s"
        pairs.append((text, "".join(word["word"] for word in inside)))
        late.append(inside[0]["start"] - start)
    assert error_rate(pairs) < 0.10
    part = max(1, len(late) // 4)
    assert abs(np.median(late[-part:]) - np.median(late[:part])) < 0.2, "the clock drifts"
    assert len(words) <= 1.05 * sum(len(normalise(text).split()) for *_, text in said)

    half = [rss for seconds, rss in used if seconds > said[-1][1] / 2]
    quarter = [rss for seconds, rss in used if said[-1][1] / 8 < seconds < said[-1][1] / 4]
    if half and quarter:
        assert max(half) - max(quarter) < 64 * 2**20, "memory grows with the length"
