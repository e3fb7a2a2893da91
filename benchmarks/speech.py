"""How fast Whisper listens on a CPU, beside faster-whisper (CTranslate2) and openai-whisper, on the same weights.

    python benchmarks/speech.py [--models tiny.en base] [--rounds 3] [--threads 2] [--only openai …] [--batches 1 8]

Real weights and speech from the package registry; the others are measured where they are installed
(``hatch run oracles:python benchmarks/speech.py``). All are greedy at temperature 0, English, with segment times,
float32 unless named int8. Batch 1: seven recordings, 79 s, one after the other. Batch 8: eight recordings, which
Kestrel hears at once and the others one by one. faster-whisper batches pieces of one file only, so both of them also
hear the eight joined to one, packed into few windows, with ``batch_size`` 8 and, as that pipeline does by default,
without times (with them it drops what a window leaves unfinished, which Kestrel decodes again).

Rounds alternate between implementations and start with another one each time: other jobs of the machine disturb all
alike. Times are medians over rounds. "Kestrel is" compares each round of an implementation with Kestrel's of the same
turn, by wall time and by CPU time (which waits for nobody): the median of these ratios, and the least and greatest.
"behind the encoder" is the ratio of CPU times without what both spend in the encoder; with one thread only, since the
others' time is not seen. Every recording is a hair quieter each time, so that Kestrel does not find it in its cache.
RTFx is seconds of sound per second; CPU seconds add up all threads.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
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
from kestrel_speech.whisper.encoder import Encoder

BATCH = 8
PAUSE_S = 1.0


@dataclass(slots=True)
class Run:
    """One implementation doing one job; ``texts`` of its last round. ``rival``: who does the same job for Kestrel."""

    name: str
    work: Callable[[], list[str]]
    rival: Run | None = None
    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    rest_cpu_s: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)

    def once(self) -> None:
        """Measure one round."""
        encoders.cpu_s = 0.0
        wall, cpu = time.perf_counter(), time.process_time()
        self.texts = self.work()
        self.wall_s.append(time.perf_counter() - wall)
        self.cpu_s.append(time.process_time() - cpu)
        self.rest_cpu_s.append(self.cpu_s[-1] - encoders.cpu_s)

    @property
    def has_encoder(self) -> bool:
        """Its encoder is one of those watched."""
        return all(rest < cpu for rest, cpu in zip(self.rest_cpu_s, self.cpu_s, strict=True))


class Encoders:
    """Adds up the CPU seconds that encoders written in torch take in their own thread."""

    def __init__(self) -> None:
        self.cpu_s = 0.0

    def watch(self, module: type[torch.nn.Module]) -> None:
        """Time ``module``'s forward pass from now on."""
        plain = module.forward

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.thread_time()
            made = plain(*args, **kwargs)
            self.cpu_s += time.thread_time() - started
            return made

        module.forward = timed  # type: ignore[method-assign]


encoders = Encoders()


def main() -> None:
    """Print a table per model and batch."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["tiny.en", "base"], choices=list(realweights.WHISPER))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--only", nargs="+", default=[], help="parts of the names of others to measure; all")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, BATCH], choices=[1, BATCH])
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    encoders.watch(Encoder)
    samples = [*realweights.librivox(), *realweights.recordings()]
    sounds = [heard(sample.path) for sample in samples]
    said = [sample.text for sample in samples]
    print(f"{platform.processor() or platform.machine()}, {args.threads} threads, torch {torch.__version__}")
    for model in args.models:
        listeners = implementations(model, args.threads, args.only)
        for hear in listeners.values():
            hear(fresh(sounds[0]))  # warms up
        if 1 in args.batches:
            ours, *others = (Run(name, partial(one_by_one, hear, sounds)) for name, hear in listeners.items())
            runs = [ours, *(replace(other, rival=ours) for other in others)]
            report(model, 1, runs, sounds, said, args.rounds)
        if BATCH not in args.batches:
            continue
        eight = [sounds[i % len(sounds)] for i in range(BATCH)]
        words = [said[i % len(said)] for i in range(BATCH)]
        report(model, BATCH, batched_runs(listeners, eight), eight, words, args.rounds)


def implementations(model: str, threads: int, only: Sequence[str]) -> dict[str, Callable[..., str]]:
    """Name to a function from samples to text."""
    makers: dict[str, Callable[[], Callable[..., str]]] = {
        "kestrel": partial(kestrel, model),
        "faster-whisper": partial(faster, model, "float32", threads),
        "faster-whisper int8": partial(faster, model, "int8", threads),
        "openai-whisper": partial(openai, model),
    }
    made = {}
    for name, make in makers.items():
        if only and name != "kestrel" and not any(part in name for part in only):
            continue
        try:
            made[name] = make()
        except ImportError as error:
            print(f"{name}: {error}", file=sys.stderr)
    return made


def kestrel(model: str) -> Callable[..., str]:
    """Kestrel's engine."""
    engine = SyncEngine(RuntimeConfig(model_path=realweights.whisper(model), device="cpu"))

    def hear(samples: np.ndarray, **options: Any) -> str:
        result: Any = engine.transcribe(
            samples, sample_rate=SAMPLE_RATE, language="en", settings={"temperature": 0.0}, **options
        )
        return str(result.output["text"])

    return hear


def faster(model: str, compute_type: str, threads: int) -> Callable[..., str]:
    """faster-whisper; with ``batch_size`` its batched pipeline."""
    other = FasterWhisper(model, compute_type=compute_type, threads=threads)

    def hear(samples: np.ndarray, *, batch_size: int = 1, **options: Any) -> str:
        if batch_size == 1:
            return other.transcribe(samples, language="en").text
        return other.batched(samples, language="en", batch_size=batch_size, **options).text

    return hear


def openai(model: str) -> Callable[..., str]:
    """openai-whisper."""
    other = OpenAIWhisper(model)
    from whisper.model import AudioEncoder

    if AudioEncoder not in _watched:
        _watched.append(AudioEncoder)
        encoders.watch(AudioEncoder)
    return lambda samples: other.transcribe(samples, language="en").text


def batched_runs(listeners: dict[str, Callable[..., str]], sounds: Sequence[np.ndarray]) -> list[Run]:
    """Eight at once where that is possible, else one after the other."""
    pause = np.zeros(round(PAUSE_S * SAMPLE_RATE), np.float32)
    joined = np.concatenate([part for sound in sounds for part in (sound, pause)])
    together = {name: partial(in_one, hear, joined) for name, hear in listeners.items()}
    ours = Run("kestrel, at once", partial(at_once, listeners["kestrel"], sounds))
    ours_joined = Run("kestrel, joined", together["kestrel"])
    runs = [ours, ours_joined]
    for name, hear in listeners.items():
        if name != "kestrel":
            runs.append(Run(f"{name}, one by one", partial(one_by_one, hear, sounds), ours))
        if name.startswith("faster-whisper"):
            runs.append(Run(f"{name}, joined", together[name], ours_joined))
    return runs


_turns = itertools.count(1)
_watched: list[type] = []


def fresh(sound: np.ndarray) -> np.ndarray:
    """``sound`` by less than 0.1 dB quieter than ever before."""
    return sound * np.float32(1.0 - 1e-6 * next(_turns))


def one_by_one(hear: Callable[..., str], sounds: Sequence[np.ndarray]) -> list[str]:
    """Texts of recordings heard one after the other."""
    return [hear(fresh(sound)) for sound in sounds]


def in_one(hear: Callable[..., str], sound: np.ndarray) -> list[str]:
    """The text of one recording, whose pieces are heard side by side."""
    return [hear(fresh(sound), batch_size=BATCH, without_timestamps=True)]


def at_once(hear: Callable[..., str], sounds: Sequence[np.ndarray]) -> list[str]:
    """Texts of recordings heard at the same time."""
    with concurrent.futures.ThreadPoolExecutor(len(sounds)) as pool:
        return list(pool.map(hear, map(fresh, sounds)))


def report(
    model: str, batch: int, runs: list[Run], sounds: Sequence[np.ndarray], said: Sequence[str], rounds: int
) -> None:
    """Measure ``runs`` in turn and print how they compare."""
    for turn in range(rounds):
        for at in range(len(runs)):
            runs[(turn + at) % len(runs)].once()
    length_s = sum(map(len, sounds)) / SAMPLE_RATE
    print(f"\n{model}, batch {batch}: {len(sounds)} recordings, {length_s:.1f} s of sound, {rounds} rounds")
    print(f"{'':30}{'wall s':>8}{'RTFx':>7}{'CPU s':>8}{'WER':>7}   Kestrel is, by wall   by CPU", end="")
    print("               behind the encoder" if is_alone() else "")
    for run in runs:
        wall_s, cpu_s = statistics.median(run.wall_s), statistics.median(run.cpu_s)
        line = f"{run.name:30}{wall_s:8.2f}{length_s / wall_s:7.1f}{cpu_s:8.2f}{errors_of(run, said):7.1%}"
        if (ours := run.rival) is not None:
            line += f"   {times(run.wall_s, ours.wall_s)}   {times(run.cpu_s, ours.cpu_s)}"
            if is_alone() and run.has_encoder and ours.has_encoder:
                line += f"   {times(run.rest_cpu_s, ours.rest_cpu_s)}"
        print(line, flush=True)


def is_alone() -> bool:
    """One thread computes, whose time is that of the process."""
    return torch.get_num_threads() == 1


def errors_of(run: Run, said: Sequence[str]) -> float:
    """The word error rate of a run's last round."""
    if len(run.texts) == len(said):
        return error_rate(list(zip(said, run.texts, strict=True)))
    return error_rate([(" ".join(said), " ".join(run.texts))])


def times(theirs: Sequence[float], ours: Sequence[float]) -> str:
    """How many times as fast we are: the median over rounds, the least and the greatest."""
    ratios = [a / b for a, b in zip(theirs, ours, strict=True)]
    return f"{statistics.median(ratios):.2f} x ({min(ratios):.2f}-{max(ratios):.2f})"


def heard(path: Path) -> np.ndarray:
    """A recording's samples at 16 kHz."""
    with open_audio(path) as stream:
        return np.concatenate(list(stream.blocks()))


if __name__ == "__main__":
    main()
