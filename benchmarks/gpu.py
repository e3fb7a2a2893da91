"""The engine on one NVIDIA GPU: published sizes with random weights, as shares of what the machine can do.

    python benchmarks/gpu.py [--cases ceilings decode prefill idle whisper photo questions] [--size 4B] [--json FILE]
                             [--weights DIR] [--set decode_path=native …]

``ceilings``: a large copy and a large product, which the floors below are computed from. ``decode``: a step of Qwen at
batch 1, 16, 64, 256 with prompts of 1,024; the difference between runs of 144 and of 16 tokens, whose prompts the
prefix cache holds, over 128. ``prefill``: TTFT at batch 1, and 16 prompts at once, nothing cached. ``idle``: the share
of time in which no kernel runs, with 64 streaming consumers, without and with eight threads that decode JPEGs.
``whisper``: windows of 30 s of noise, 112 tokens each. ``photo``: Moondream 2, a question on distinct JPEGs of
800 × 600, 1 and 64 at a time. ``questions``: five on each of three photos, shuffled. ``--cold`` compiles every kernel
again, as a new installation would.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import logging
import os
import platform
import random
import re
import statistics
import string
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_models import WHISPER_EOT, write_moondream, write_qwen, write_whisper
from gpu_probe import busy_share, copy_rate, gemm_rate, kernel_spans, save_trace, show_kernels
from torch.profiler import ProfilerActivity, profile

from kestrel.config import RuntimeConfig
from kestrel.engine import EngineResult, InferenceEngine
from kestrel.media import MediaLimits, normalise_image

CASES = ("ceilings", "decode", "prefill", "idle", "whisper", "photo", "questions")
DEVICE = torch.device("cuda")
PROMPT, NEW = 1024, 128
# Bytes that a decode step of Qwen 3.5 moves: its weights; a row's state and its KV per position
QWEN_BYTES = {"4B": (8.41e9, 51_511_296, 32_768), "0.8B": (1.50e9, 19_537_920, 12_288),
              "35B-A3B": (5.89e9, 64_389_120, 20_480)}  # fmt: skip


class Report:
    """Lines of the table, as they are measured."""

    def __init__(self, with_profiles: bool = False, traces: Path | None = None) -> None:
        self.rows: list[dict[str, Any]] = []
        self._with_profiles = with_profiles or traces is not None
        self._traces = traces
        self.copy_tb_s = 4.25
        self.gemm_tflop_s = 770.0

    def add(self, case: str, what: str, value: float, unit: str, **more: Any) -> None:
        """One measured value."""
        self.rows.append({"case": case, "what": what, "value": round(value, 4), "unit": unit, **more})
        extra = "  ".join(f"{name} {shown}" for name, shown in more.items())
        print(f"{case:<10} {what:<44} {value:>12,.3f} {unit:<8} {extra}", flush=True)

    @contextmanager
    def profiled(self, what: str) -> Iterator[None]:
        """With profiles on, the kernels of the context by the time that they took."""
        if not self._with_profiles:
            yield
            return
        with profile(activities=[ProfilerActivity.CUDA]) as recorded:
            yield
            torch.cuda.synchronize()
        self.add("profile", what, 1 - busy_share(kernel_spans(recorded)), "idle")
        show_kernels(recorded)
        if self._traces is not None:
            save_trace(recorded, self._traces / f"trace_{'_'.join(re.findall('[a-z0-9]+', what))}.json.gz")


@asynccontextmanager
async def opened(path: Path, report: Report, case: str, **settings: Any) -> AsyncIterator[InferenceEngine]:
    """An engine of the checkpoint in ``path``; how long it took to be ready is reported."""
    start = time.perf_counter()
    engine = await InferenceEngine.create(RuntimeConfig(model_path=path, device="cuda", **settings))
    report.add(case, "engine ready", time.perf_counter() - start, "s")
    async with engine:
        yield engine


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


async def decode(engine: InferenceEngine, report: Report, size: str, batches: Sequence[int]) -> None:
    """Milliseconds of a decode step, beside the time that its bytes take at the copy rate."""
    weights, state, kv = QWEN_BYTES[size]
    for batch in batches:
        texts = prompts(batch, batch)
        for new in (4, 4):
            await together(engine, texts, new)
        steps = []
        for _ in range(3):
            short, _ = await together(engine, texts, 16)
            long, results = await together(engine, texts, 16 + NEW)
            steps.append((long - short) / NEW * 1e3)
        step = statistics.median(steps)
        moved = weights + batch * (2 * state + kv * (PROMPT + NEW / 2))
        floor = moved / report.copy_tb_s / 1e9
        with report.profiled(f"decode, batch {batch}"):
            await together(engine, texts, 32)
        cached = statistics.mean(result.metrics.cached_tokens for result in results)
        report.add("decode", f"Qwen3.5-{size} batch {batch}", step, "ms/step", tok_s=round(batch / step * 1e3),
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
def decoding(threads: int) -> Iterator[None]:
    """So many threads decode JPEGs, as the engine's pool does, while the context lasts."""
    pictures, done = jpegs(4, 7), threading.Event()

    def work() -> None:
        while not done.is_set():
            for picture in pictures:
                normalise_image(picture, MediaLimits())

    with ThreadPoolExecutor(max(1, threads)) as pool:
        jobs = [pool.submit(work) for _ in range(threads)]
        try:
            yield
        finally:
            done.set()
    for job in jobs:
        job.result()


async def idle(engine: InferenceEngine, report: Report, size: str, threads: int) -> None:
    """How much of a decoding run the GPU has nothing to do, while 64 readers take every token and ``threads`` decode
    pictures."""
    texts = prompts(64, 64)
    await together(engine, texts, 2)

    async def read(text: str, new: int) -> None:
        settings = {"max_tokens": new, "ignore_eos": True, "temperature": 0.0}
        stream = await engine.generate(text, stream=True, settings=settings)
        async for _ in stream:
            pass

    with decoding(threads):
        running = [asyncio.create_task(read(text, 400)) for text in texts]
        await asyncio.sleep(1.0)
        with profile(activities=[ProfilerActivity.CUDA]) as recorded:
            await asyncio.sleep(0.4)
            torch.cuda.synchronize()
        await asyncio.gather(*running)
    spans = kernel_spans(recorded)
    what = f"Qwen3.5-{size}, 64 readers, {threads} decode JPEGs"
    report.add("idle", what, 1 - busy_share(spans), "of time", kernels=len(spans))
    if not threads:
        show_kernels(recorded)


async def whisper(engine: InferenceEngine, report: Report, batches: Sequence[int]) -> None:
    """Seconds of sound per second; windows of noise, text drawn at temperature 1, the end forbidden."""
    source = np.random.default_rng(0)
    options = {"language": "en", "timestamps": "none", "suppress_tokens": [WHISPER_EOT]}
    off = {"temperature": 1.0, "max_tokens": 112, "compression_ratio_threshold": None, "logprob_threshold": None,
           "no_speech_threshold": None, "best_of": 1}  # fmt: skip

    for batch in batches:
        count, warm = max(4 * batch, 8), max(4, 2 * batch)  # programs are captured when shapes come again
        sounds = iter(
            [(source.standard_normal(480_000, dtype=np.float32) * 0.1) for _ in range(count + warm + batch)]
        )

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


async def closed_loop(
    ask: Callable[[], Awaitable[EngineResult]], width: int, count: int
) -> tuple[float, list[EngineResult]]:
    """``count`` calls, ``width`` of them at a time: seconds and results."""
    left, results = iter(range(count)), []

    async def one() -> None:
        for _ in left:
            results.append(await ask())

    start = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(width)))
    return time.perf_counter() - start, results


def jpegs(count: int, seed: int) -> list[bytes]:
    """Distinct photos of 800 × 600: smooth noise."""
    from PIL import Image

    source = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        small = source.integers(0, 256, (38, 50, 3), dtype=np.uint8)
        file = io.BytesIO()
        Image.fromarray(small).resize((800, 600), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
        found.append(file.getvalue())
    return found


async def photo(engine: InferenceEngine, report: Report, lengths: Sequence[int] = (3, 30)) -> None:
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
            with report.profiled(f"photo, {new} tokens, {width} at a time"):
                await closed_loop(ask, width, width)
            report.add("photo", f"Moondream 2, {new} tokens, c = {width}", count / wall, "req/s",
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


def as_value(text: str) -> Any:
    """A setting as JSON where it is some, else as text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


async def run(args: argparse.Namespace, report: Report) -> None:
    """All cases asked for, each model loaded once."""
    settings = {name: as_value(text) for name, text in (pair.split("=", 1) for pair in args.set)}
    print(
        f"{torch.cuda.get_device_name(DEVICE)}, torch {torch.__version__}, Python {platform.python_version()}"
    )
    wanted = set(args.cases)
    if "ceilings" in wanted:
        report.copy_tb_s, report.gemm_tflop_s = copy_rate(DEVICE), gemm_rate(DEVICE)
        report.add("ceilings", "copy", report.copy_tb_s, "TB/s")
        report.add("ceilings", "bfloat16 product, 4096 × 8192 × 8192", report.gemm_tflop_s, "TFLOP/s")
    torch.cuda.empty_cache()
    if wanted & {"decode", "prefill", "idle"}:
        path = args.weights / f"qwen-{args.size}"
        if not path.exists():
            write_qwen(path, args.size, DEVICE)
            torch.cuda.empty_cache()
        sizes = {"max_batch_size": max(args.batches), "max_model_len": 4096, "max_batched_tokens": 8192}
        async with opened(path, report, "decode", **(sizes | settings)) as engine:
            if "decode" in wanted:
                await decode(engine, report, args.size, args.batches)
            if "prefill" in wanted:
                await prefill(engine, report, args.size)
            if "idle" in wanted:
                for threads in (0, 8):
                    await idle(engine, report, args.size, threads)
    if "whisper" in wanted:
        path = args.weights / "whisper"
        if not path.exists():
            write_whisper(path, "large-v3-turbo", DEVICE)
            torch.cuda.empty_cache()
        async with opened(path, report, "whisper", max_batch_size=64, **settings) as engine:
            await whisper(engine, report, (1, 4, 16, 64))
    if wanted & {"photo", "questions"}:
        path = args.weights / "moondream"
        if not path.exists():
            write_moondream(path, DEVICE)
            torch.cuda.empty_cache()
        async with opened(
            path, report, "photo", max_batch_size=64, max_batched_tokens=4096, **settings
        ) as engine:
            if "photo" in wanted:
                await photo(engine, report)
            if "questions" in wanted:
                await questions(engine, report)


def main() -> None:
    """Measure and print; ``--json`` keeps the rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--size", default="4B", choices=sorted(QWEN_BYTES))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 16, 64, 256])
    parser.add_argument(
        "--weights", type=Path, default=Path(tempfile.gettempdir()) / "kestrel-random-weights"
    )
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="engine settings")
    parser.add_argument("--cold", action="store_true", help="compile every kernel again")
    parser.add_argument("--log", action="store_true", help="print what the engine logs")
    parser.add_argument("--profile", action="store_true", help="print the kernels of each case")
    parser.add_argument("--trace", type=Path, metavar="DIR", help="also keep when each kernel ran")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs an NVIDIA GPU; torch sees none")
    if args.log:
        logging.basicConfig(level=logging.WARNING, format="    %(relativeCreated)d ms %(name)s %(message)s")
        logging.getLogger("kestrel").setLevel(logging.INFO)
        logging.getLogger("kestrel.request").setLevel(logging.WARNING)
    with tempfile.TemporaryDirectory() as cache:
        if args.trace:
            args.trace.mkdir(parents=True, exist_ok=True)
        if args.cold:
            os.environ["TRITON_CACHE_DIR"] = cache
        report = Report(args.profile, args.trace)
        try:
            asyncio.run(run(args, report))
        finally:
            if args.json:
                args.json.write_text(json.dumps(report.rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
