"""Whisper on windows of noise and Moondream on photos, on one GPU."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from gpu_models import WHISPER_EOT
from gpu_report import Report, closed_loop, jpegs

from kestrel.engine import EngineResult, InferenceEngine

__all__ = ["TOKENS", "photo", "questions", "whisper", "windows"]

TOKENS = 112  # of a window


def windows(count: int, source: np.random.Generator) -> list[np.ndarray]:
    """Noise, 30 s at a time."""
    return [source.standard_normal(480_000, dtype=np.float32) * 0.1 for _ in range(count)]


async def whisper(engine: InferenceEngine, report: Report, batches: Sequence[int]) -> None:
    """Seconds of sound per second; windows of noise, text drawn at temperature 1, the end forbidden."""
    source = np.random.default_rng(0)
    options = {"language": "en", "timestamps": "none", "suppress_tokens": [WHISPER_EOT]}
    off = {"temperature": 1.0, "max_tokens": TOKENS, "compression_ratio_threshold": None, "logprob_threshold": None,
           "no_speech_threshold": None, "best_of": 1}  # fmt: skip

    for batch in batches:
        count, warm = max(4 * batch, 8), max(4, 2 * batch)  # programs are captured when shapes come again
        sounds = iter(windows(count + warm + batch, source))

        async def hear(sounds: Iterator[Any] = sounds) -> EngineResult:
            return await engine.run(
                "transcribe", {"audio": next(sounds), "sample_rate": 16_000, **options}, off
            )

        await closed_loop(hear, batch, warm)
        wall, results = await closed_loop(hear, batch, count)
        with report.profiled(f"whisper, {batch} at a time"):
            await closed_loop(hear, batch, batch)
        tokens = statistics.mean(result.metrics.output_tokens for result in results)
        report.add(
            "whisper", f"large-v3-turbo, {batch} at a time", 30 * count / wall, "RTFx", tokens=round(tokens)
        )


async def photo(
    engine: InferenceEngine, report: Report, lengths: Sequence[int] = (3, 30), case: str = "photo"
) -> None:
    """Requests per second, a new picture in each."""
    for new in lengths:
        for width, count in ((1, 24), (64, 256)):
            warm = max(4, width)  # programs of an encoder are captured when its shapes come again
            pictures = iter(jpegs(count + warm + width, new * 1000 + width))
            took: list[float] = []
            settings = {"max_tokens": new, "ignore_eos": True, "temperature": 0.0}

            async def ask(
                pictures: Any = pictures, settings: Any = settings, took: list[float] = took
            ) -> EngineResult:
                start = time.perf_counter()
                result = await engine.query(next(pictures), "What is shown here?", settings=settings)
                took.append((time.perf_counter() - start) * 1e3)
                return result

            await closed_loop(ask, width, warm)
            took.clear()
            wall, _ = await closed_loop(ask, width, count)
            middle = statistics.median(took)
            with report.profiled(f"{case}, {new} tokens, {width} at a time"):
                await closed_loop(ask, width, width)
            report.add(case, f"Moondream 2, {new} tokens, c = {width}", count / wall, "req/s",
                       p50_ms=round(middle, 1))  # fmt: skip


async def questions(engine: InferenceEngine, report: Report) -> None:
    """Requests per second, five questions on each of three photos, shuffled; new photos each round."""
    for new in (3, 30):
        for width in (1, 4, 16, 64):
            settings = {"max_tokens": new, "ignore_eos": True, "temperature": 0.0}
            rounds = 12 if width > 4 else 4
            work = []
            for number in range(rounds + 1):
                asks = [
                    (picture, f"Question number {i}: what is there?")
                    for picture in jpegs(3, 50_000 + 1000 * new + 20 * width + number)
                    for i in range(5)
                ]
                random.Random(number).shuffle(asks)
                work += asks
            left = iter(work)

            async def ask(left: Any = left, settings: Any = settings) -> EngineResult:
                picture, question = next(left)
                return await engine.query(picture, question, settings=settings)

            await closed_loop(ask, width, 15)
            wall, _ = await closed_loop(ask, width, 15 * rounds)
            report.add("questions", f"Moondream 2, {new} tokens, c = {width}", 15 * rounds / wall, "req/s")
