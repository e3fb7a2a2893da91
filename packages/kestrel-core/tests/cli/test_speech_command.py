"""transcribe over a fake engine: formats, files, options, progress."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from kestrel.cli import session
from kestrel.errors import InvalidMediaError
from kestrel.types import ChunkKind, EngineResult, StreamChunk

SEGMENTS = [
    {"text": " First words.", "start": 0.0, "end": 1.5},
    {"text": " And more.", "start": 1.5, "end": 3.25},
]
OUTPUT: Mapping[str, Any] = {
    "text": "First words. And more.",
    "language": "en",
    "duration_seconds": 3.5,
    "segments": SEGMENTS,
}
MODEL = ("--model", "some/whisper")
SRT = "1\n00:00:00,000 --> 00:00:01,500\nFirst words.\n\n2\n00:00:01,500 --> 00:00:03,250\nAnd more.\n"


@pytest.fixture
def speech(engine: Any) -> Any:
    """An engine that hears the same in every recording."""
    engine.answers = lambda skill, inputs: OUTPUT
    return engine


@pytest.fixture
def recording(tmp_path: Path) -> Any:
    def recording(name: str = "talk.mp3") -> Path:
        path = tmp_path / name
        path.write_bytes(b"sound")
        return path

    return recording


def test_text_has_a_line_per_segment(run: Any, speech: Any, recording: Any) -> None:
    path = recording()
    ran = run("transcribe", path, *MODEL)
    assert (ran.code, ran.out) == (0, "First words.\nAnd more.\n")
    assert speech.calls == [("transcribe", {"audio": path}, {})]


def test_a_misspelt_format_is_told_which_one_was_likely_meant(run: Any, recording: Any) -> None:
    ran = run("transcribe", recording("a.wav"), *MODEL, "--format", "srtt")
    assert ran.code == 2
    assert "Did you mean 'srt'?" in " ".join(ran.err.replace("│", " ").split())


@pytest.mark.parametrize("format", ["srt", "vtt", "tsv", "json"])
def test_formats_are_printed_as_they_are_written(
    run: Any, speech: Any, recording: Any, tmp_path: Path, format: str
) -> None:
    path = recording()
    printed = run("transcribe", path, *MODEL, "--format", format)
    written = tmp_path / f"out.{format}"
    ran = run("transcribe", path, *MODEL, "--format", format, "--output", written)
    assert (ran.code, ran.out) == (0, "")
    assert f"written to {written}" in " ".join(ran.err.split())
    assert written.read_text(encoding="utf-8") == printed.out
    if format == "srt":
        assert printed.out == SRT
    if format == "json":
        assert json.loads(printed.out) == OUTPUT


def test_several_recordings_are_written_side_by_side(
    run: Any, speech: Any, recording: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "subtitles"
    ran = run("transcribe", recording("a.mp3"), recording("b.wav"), *MODEL, "-f", "srt", "-o", f"{folder}/")
    assert ran.code == 0
    assert sorted(path.name for path in folder.iterdir()) == ["a.srt", "b.srt"]


def test_several_recordings_as_text_are_prefixed(run: Any, speech: Any, recording: Any) -> None:
    first, second = recording("a.mp3"), recording("b.wav")
    lines = run("transcribe", first, second, *MODEL).lines
    assert lines == [f"{name}: {line}" for name in (first, second) for line in ("First words.", "And more.")]


def test_several_subtitles_on_stdout_are_refused(run: Any, speech: Any, recording: Any) -> None:
    ran = run("transcribe", recording("a.mp3"), recording("b.wav"), *MODEL, "--format", "srt")
    assert ran.code == 2
    assert "--output DIRECTORY" in ran.err
    assert speech.calls == []


def test_options_reach_the_skill(run: Any, speech: Any, recording: Any) -> None:
    path = recording()
    run(
        "transcribe", path, *MODEL, "--language", "de", "--task", "translate", "--word-timestamps", "--vad",
        "--prompt", "Kestrel", "--option", "hotwords=falcon", "--option", "batch-size=8", "--temperature", "0",
    )  # fmt: skip
    [(_, inputs, settings)] = speech.calls
    assert inputs == {
        "audio": path,
        "language": "de",
        "task": "translate",
        "word_timestamps": True,
        "vad_filter": True,
        "initial_prompt": "Kestrel",
        "hotwords": "falcon",
        "batch_size": 8,
    }
    assert settings == {"temperature": 0.0}


def test_option_given_twice_is_refused(run: Any, speech: Any, recording: Any) -> None:
    ran = run("transcribe", recording(), *MODEL, "--language", "de", "--option", "language=en")
    assert ran.code == 2
    assert "--option gives 'language'" in ran.err


def test_model_must_be_named(run: Any, speech: Any, recording: Any) -> None:
    ran = run("transcribe", recording())
    assert ran.code == 2
    assert "no --model given" in ran.err


def test_json_is_one_object_per_recording(run: Any, speech: Any, recording: Any) -> None:
    ran = run("transcribe", recording("a.mp3"), recording("b.mp3"), *MODEL, "--json", "-f", "srt")
    objects = [json.loads(line) for line in ran.lines]
    assert [Path(o["file"]).name for o in objects] == ["a.mp3", "b.mp3"]
    assert objects[0]["segments"] == SEGMENTS


def test_silence_says_so_on_stderr(run: Any, engine: Any, recording: Any) -> None:
    engine.answers = lambda skill, inputs: {"text": "", "segments": []}
    ran = run("transcribe", recording(), *MODEL)
    assert (ran.code, ran.out) == (0, "")
    assert "nothing found" in ran.err


def test_recording_that_fails_does_not_stop_the_others(run: Any, engine: Any, recording: Any) -> None:
    bad, good = recording("bad.mp3"), recording("good.mp3")

    def answers(skill: str, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        if inputs["audio"] == bad:
            raise InvalidMediaError("no audio track")
        return OUTPUT

    engine.answers = answers
    ran = run("transcribe", bad, good, *MODEL)
    assert ran.code == 1
    assert "no audio track" in ran.err
    assert f"{good}: First words." in ran.lines


def test_recording_on_stdin_is_heard(run: Any, speech: Any) -> None:
    assert run("transcribe", "-", *MODEL, stdin=b"sound").code == 0
    assert speech.calls[0][1]["audio"] == b"sound"


def test_input_is_never_overwritten(run: Any, speech: Any, recording: Any) -> None:
    path = recording("talk.txt")
    ran = run("transcribe", path, *MODEL, "--output", path)
    assert ran.code == 2
    assert "overwrite" in ran.err


def test_snapshots_move_the_bar(
    run: Any, speech: Any, recording: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, int, int]] = []
    ended = speech._result(dict(OUTPUT))

    class Snapshots:
        async def __aiter__(self) -> AsyncIterator[StreamChunk]:
            for done in (1.0, 2.6, 3.5):
                value = {**OUTPUT, "completed_seconds": done, "total_seconds": None if done < 2 else 3.5}
                yield StreamChunk(ChunkKind.SNAPSHOT, value=value)

        async def result(self) -> EngineResult:
            return ended

    async def start_stream(skill: str, inputs: Mapping[str, Any], settings: Any = None) -> Snapshots:
        return Snapshots()

    class Bars:
        def __enter__(self) -> session.Report:
            return lambda what, done, total: seen.append((what, done, total))

        def __exit__(self, *ended: object) -> None: ...

    monkeypatch.setattr(speech, "start_stream", start_stream, raising=False)
    monkeypatch.setattr(session, "progress_bars", lambda amount=None: Bars())
    path = recording()
    assert run("transcribe", path, *MODEL).out == "First words.\nAnd more.\n"
    assert [event for event in seen if event[0] == str(path)] == [
        (str(path), 1, 0), (str(path), 3, 4), (str(path), 4, 4)
    ]  # fmt: skip


def test_bar_counts_minutes() -> None:
    assert session.clock(65, 760) == "1:05/12:40"
    assert session.clock(5, 0) == "0:05"
