"""Qwen on one GPU: decode steps, prefill, and how much of the time no kernel runs."""

from __future__ import annotations

import asyncio
import gc
import random
import statistics
import string
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch
from gpu_probe import busy_share, kernel_spans, show_kernels
from gpu_report import Report, jpegs
from torch.profiler import ProfilerActivity, profile

from kestrel.engine import EngineResult, InferenceEngine
from kestrel.media import DecoderProcesses, MediaLimits, load_decoders, normalise_image

__all__ = ["NEW", "PROMPT", "QWEN_BYTES", "decode", "idle", "prefill", "prompts"]

PROMPT, NEW = 1024, 128
# Bytes that a decode step of Qwen 3.5 moves: its weights; a row's state and its KV per position
QWEN_BYTES = {"4B": (8.41e9, 51_511_296, 32_768), "0.8B": (1.50e9, 19_537_920, 12_288),
              "35B-A3B": (5.89e9, 64_389_120, 20_480)}  # fmt: skip


def prompts(count: int, seed: int) -> list[str]:
    """Random letters, a token each."""
    source = random.Random(seed)
    return ["".join(source.choices(string.ascii_letters, k=PROMPT)) for _ in range(count)]


async def together(
    engine: InferenceEngine, texts: Sequence[str], new: int
) -> tuple[float, list[EngineResult]]:
    """Seconds until every prompt has ``new`` tokens, and the results."""
    settings = {"max_tokens": new, "ignore_eos": True, "temperature": 0.0}
    start = time.perf_counter()
    results = await asyncio.gather(*(engine.generate(text, settings=settings) for text in texts))
    return time.perf_counter() - start, list(results)


async def decode(
    engine: InferenceEngine, report: Report, size: str, batches: Sequence[int], spared: float = 0.0
) -> None:
    """Milliseconds of a decode step, beside the time that its bytes take at the copy rate. ``spared``: bytes that
    8-bit weights do not have."""
    weights, state, kv = QWEN_BYTES[size]
    for batch in batches:
        texts = prompts(batch, batch)
        for new in (4, 4):
            await together(engine, texts, new)
        short, long = [], []
        for _ in range(5):
            seconds, _ = await together(engine, texts, 16)
            short.append(seconds)
            seconds, results = await together(engine, texts, 16 + NEW)
            long.append(seconds)
        step = (statistics.median(long) - statistics.median(short)) / NEW * 1e3
        moved = weights - spared + batch * (2 * state + kv * (PROMPT + NEW / 2))
        floor = moved / report.copy_tb_s / 1e9
        with report.profiled(f"decode, batch {batch}"):
            await together(engine, texts, 32)
        cached = statistics.mean(result.metrics.cached_tokens for result in results)
        name = f"Qwen3.5-{size}{' FP8' if spared else ''} batch {batch}"
        report.add("decode", name, step, "ms/step", tok_s=round(batch / step * 1e3),
                   floor_ms=round(floor, 2), share=f"{floor / step:.0%}", cached=round(cached))  # fmt: skip


async def prefill(engine: InferenceEngine, report: Report, size: str) -> None:
    """Time to the first token of one prompt, and of sixteen."""
    first = []
    for seed in range(7):
        _, results = await together(engine, prompts(1, 1000 + seed), 1)
        first.append(results[0].metrics.ttft_ms)
    report.add("prefill", f"Qwen3.5-{size} TTFT, 1 × {PROMPT}", statistics.median(first[2:]), "ms")
    walls = []
    for seed in range(4):
        wall, _ = await together(engine, prompts(16, 2000 + seed), 1)
        walls.append(wall * 1e3)
    wall = statistics.median(walls[1:])
    with report.profiled("prefill, 16 prompts"):
        await together(engine, prompts(16, 3000), 1)
    report.add("prefill", f"Qwen3.5-{size} 16 × {PROMPT}", wall, "ms", tok_s=round(16 * PROMPT / wall * 1e3))


@contextmanager
def decoding(threads: int, processes: int) -> Iterator[list[int]]:
    """So many threads decode JPEGs, as the engine's pool does, while the context lasts; with ``processes``, in these.
    Gives the number of pictures so far, one count per thread."""
    pictures, done, counts = jpegs(4, 7), threading.Event(), [0] * threads
    decoders = DecoderProcesses(processes) if processes else None

    def work(number: int) -> None:
        while not done.is_set():
            for picture in pictures:
                normalise_image(picture, MediaLimits(), decode=None if decoders is None else decoders.decode)
                counts[number] += 1

    load_decoders()
    with ThreadPoolExecutor(max(1, threads)) as pool:
        jobs = [pool.submit(work, number) for number in range(threads)]
        while not all(counts) and not any(job.done() for job in jobs):  # processes are being started
            time.sleep(0.01)
        try:
            yield counts
        finally:
            done.set()
    for job in jobs:
        job.result()
    if decoders is not None:
        decoders.close()


async def _read(engine: InferenceEngine, text: str, new: int) -> None:
    """Take every token of an answer of ``new`` tokens."""
    settings = {"max_tokens": new, "ignore_eos": True, "temperature": 0.0}
    stream = await engine.generate(text, stream=True, settings=settings)
    async for _ in stream:
        pass


async def _rates(engine: InferenceEngine, counts: Sequence[int], seconds: float = 0.5) -> dict[str, int]:
    """Tokens and pictures per second from now on; ``counts``: pictures of each thread so far."""

    def tokens() -> float:
        return sum(lane["generated_tokens"] for lane in engine.stats().values())

    start, before, pictures = time.perf_counter(), tokens(), sum(counts)
    await asyncio.sleep(seconds)
    took = time.perf_counter() - start
    return {
        "tokens_s": round((tokens() - before) / took),
        "pictures_s": round((sum(counts) - pictures) / took),
    }


async def idle(
    engine: InferenceEngine, report: Report, size: str, threads: int = 0, processes: int = 0
) -> None:
    """How much of a decoding run the GPU has nothing to do, while 64 readers take every token and ``threads`` decode
    pictures (in ``processes`` of their own); before it, how fast tokens and pictures come."""
    texts = prompts(64, 64)
    await together(engine, texts, 2)
    what = f"{threads} decode JPEGs" + (f" in {processes} processes" if processes else "")
    with decoding(threads, processes) as counts:
        running = [asyncio.create_task(_read(engine, text, 400)) for text in texts]
        await asyncio.sleep(1.0)
        rates = await _rates(engine, counts)
        with profile(activities=[ProfilerActivity.CUDA]) as recorded:
            await asyncio.sleep(0.4)
            torch.cuda.synchronize()
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    spans = kernel_spans(recorded)
    report.add(
        "idle",
        f"Qwen3.5-{size}, 64 readers, {what}",
        1 - busy_share(spans),
        "of time",
        kernels=len(spans),
        **rates,
    )
    report.keep(recorded, f"idle, {what}")
    if not threads:
        show_kernels(recorded)
    del recorded
    gc.collect()  # as in ``Report.profiled``
