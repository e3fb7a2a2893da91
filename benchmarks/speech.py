"""How fast Whisper listens on a CPU, beside faster-whisper (CTranslate2) and openai-whisper, on the same weights.

    python benchmarks/speech.py [--models tiny.en base] [--rounds 3] [--threads 2] [--only kestrel …] [--no-batch]

Real weights and speech from the package registry; the others are measured where they are installed
(``hatch run oracles:python benchmarks/speech.py``). All are greedy at temperature 0, English, with segment times,
float32 unless named int8. Batch 1: seven recordings, 78 s, one after the other. Batch 8: eight recordings at once
(faster-whisper batches pieces of one file only: it hears the eight joined; and one after the other for comparison).

Rounds alternate between implementations, the best of each counts: other jobs of the machine disturb all alike. Every
recording is a hair quieter each time, so that Kestrel does not find it in its cache. RTFx is seconds of sound per
second; CPU seconds add up all threads.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "packages/kestrel-speech"))  # realweights: a tool

import realweights
from realweights.oracles import FasterWhisper, OpenAIWhisper, error_rate

from kestrel.config import RuntimeConfig
from kestrel.engine import SyncEngine
from kestrel.media import SAMPLE_RATE, open_audio

BATCH = 8
PAUSE_S = 1.0


@dataclass(slots=True)
class Run:
    """One implementation doing one job; ``texts`` of its last round."""

    name: str
    work: Callable[[], list[str]]
    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)

    def once(self) -> None:
        """Measure one round."""
        wall, cpu = time.perf_counter(), time.process_time()
        self.texts = self.work()
        self.wall_s.append(time.perf_counter() - wall)
        self.cpu_s.append(time.process_time() - cpu)


def main() -> None:
    """Print a table per model and batch."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["tiny.en", "base"], choices=list(realweights.WHISPER))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--only", nargs="+", help="parts of the names of implementations to measure")
    parser.add_argument("--no-batch", action="store_true", help="batch 1 alone")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    samples = [*realweights.librivox(), *realweights.recordings()]
    sounds = [heard(sample.path) for sample in samples]
    said = [sample.text for sample in samples]
    print(f"{platform.processor() or platform.machine()}, {args.threads} threads, torch {torch.__version__}")
    for model in args.models:
        listeners = implementations(model, args.threads, args.only)
        report(model, 1, [Run(name, partial(one_by_one, hear, sounds)) for name, hear in listeners.items()],
               sounds, said, args.rounds)  # fmt: skip
        if args.no_batch:
            continue
        eight = [sounds[i % len(sounds)] for i in range(BATCH)]
        words = [said[i % len(said)] for i in range(BATCH)]
        report(model, BATCH, batched_runs(listeners, eight), eight, words, args.rounds)


def implementations(model: str, threads: int, only: Sequence[str] | None) -> dict[str, Callable[..., str]]:
    """Name to a function from samples to text."""
    makers: dict[str, Callable[[], Callable[..., str]]] = {
        "kestrel": partial(kestrel, model),
        "faster-whisper": partial(faster, model, "float32", threads),
        "faster-whisper int8": partial(faster, model, "int8", threads),
        "openai-whisper": partial(openai, model),
    }
    made = {}
    for name, make in makers.items():
        if only and not any(part in name for part in only):
            continue
        try:
            made[name] = make()
        except ImportError as error:
            print(f"{name}: {error}", file=sys.stderr)
    return made


def kestrel(model: str) -> Callable[..., str]:
    """Kestrel's engine."""
    engine = SyncEngine(RuntimeConfig(model_path=realweights.whisper(model), device="cpu"))

    def hear(samples: np.ndarray) -> str:
        result: Any = engine.transcribe(
            samples, sample_rate=SAMPLE_RATE, language="en", settings={"temperature": 0.0}
        )
        return str(result.output["text"])

    return hear


def faster(model: str, compute_type: str, threads: int) -> Callable[..., str]:
    """faster-whisper; with ``batch_size`` its batched pipeline."""
    other = FasterWhisper(model, compute_type=compute_type, threads=threads)

    def hear(samples: np.ndarray, *, batch_size: int = 1) -> str:
        if batch_size == 1:
            return other.transcribe(samples, language="en").text
        return other.batched(samples, language="en", batch_size=batch_size, without_timestamps=False).text

    return hear


def openai(model: str) -> Callable[..., str]:
    """openai-whisper."""
    other = OpenAIWhisper(model)
    return lambda samples: other.transcribe(samples, language="en").text


def batched_runs(listeners: dict[str, Callable[..., str]], sounds: Sequence[np.ndarray]) -> list[Run]:
    """Eight at once where that is possible, else one after the other."""
    pause = np.zeros(round(PAUSE_S * SAMPLE_RATE), np.float32)
    joined = np.concatenate([part for sound in sounds for part in (sound, pause)])
    runs = []
    for name, hear in listeners.items():
        if name == "kestrel":
            runs.append(Run(f"{name}, at once", partial(at_once, hear, sounds)))
        if name.startswith("faster-whisper"):
            runs.append(Run(f"{name}, joined", lambda hear=hear: [hear(fresh(joined), batch_size=BATCH)]))
        runs.append(Run(f"{name}, one by one", partial(one_by_one, hear, sounds)))
    return runs


_turns = itertools.count(1)


def fresh(sound: np.ndarray) -> np.ndarray:
    """``sound`` by less than 0.1 dB quieter than ever before."""
    return sound * np.float32(1.0 - 1e-6 * next(_turns))


def one_by_one(hear: Callable[..., str], sounds: Sequence[np.ndarray]) -> list[str]:
    """Texts of recordings heard one after the other."""
    return [hear(fresh(sound)) for sound in sounds]


def at_once(hear: Callable[..., str], sounds: Sequence[np.ndarray]) -> list[str]:
    """Texts of recordings heard at the same time."""
    with concurrent.futures.ThreadPoolExecutor(len(sounds)) as pool:
        return list(pool.map(hear, map(fresh, sounds)))


def report(
    model: str, batch: int, runs: list[Run], sounds: Sequence[np.ndarray], said: Sequence[str], rounds: int
) -> None:
    """Measure ``runs`` in turn and print how they compare."""
    for _ in range(rounds + 1):
        for run in runs:
            run.once()
    length_s = sum(map(len, sounds)) / SAMPLE_RATE
    print(
        f"\n{model}, batch {batch}: {len(sounds)} recordings, {length_s:.1f} s of sound, best of {rounds} rounds"
    )
    print(f"{'':36}{'wall s':>9}{'RTFx':>9}{'CPU s':>9}{'WER':>8}")
    for run in runs:
        wall_s, cpu_s = min(run.wall_s[1:]), min(run.cpu_s[1:])  # the first round warms up
        texts = run.texts if len(run.texts) == len(said) else [" ".join(run.texts)]
        wanted = list(said) if len(texts) == len(said) else [" ".join(said)]
        errors = error_rate(list(zip(wanted, texts, strict=True)))
        print(f"{run.name:36}{wall_s:9.2f}{length_s / wall_s:9.1f}{cpu_s:9.2f}{errors:8.1%}")


def heard(path: Path) -> np.ndarray:
    """A recording's samples at 16 kHz."""
    with open_audio(path) as stream:
        return np.concatenate(list(stream.blocks()))


if __name__ == "__main__":
    main()
