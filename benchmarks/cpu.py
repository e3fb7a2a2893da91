"""Generation with the embedded model on a CPU: the engine against a bare loop over the same modules and attention op.

    python benchmarks/cpu.py [--cases text image] [--batches 1 2 4 8 16] [--rounds 9] [--threads 1] [--json]

Both generate 64 tokens from the same random prompts. Greedy ones must agree on every token. Cases: "text"; "image",
with a picture in each prompt, prepared beforehand; "drawn", with temperature 0.2 and top_p 0.9 in the engine alone;
"streamed", with every token delivered on its own.

Rounds of both take turns in one process, so that a busy moment of the machine hits both; ratios are medians over the
rounds. ``speed`` is the bare loop's time over the engine's, from submission to the last token; ``cpu`` the same of the
process's CPU time, which other jobs disturb less; ``step`` that of decoding alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from kestrel.engine import EngineResult, InferenceEngine
from kestrel.spi import RowExtent, TokenDriver
from kestrel.testing.bare import BareLoop
from kestrel.types import Layout, Media, Segment, Token, Tokens

FIRST_ID = 16  # ids below are control ids
IMAGE_SIZE = (256, 192)
CASES = ("text", "image", "drawn", "streamed")


@dataclass(slots=True)
class Times:
    """Seconds of each round: all of it, process CPU time, and the decode steps alone."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table. Rates are tokens per second of the whole batch; times are medians in milliseconds."""

    case: str
    batch: int
    speed: float
    speed_low: float
    speed_high: float
    cpu: float
    step: float
    tokens_per_s: float
    bare_ms: float
    engine_ms: float
    ttft_ms: float
    prefill_share: float


class Loop(BareLoop):
    """``BareLoop`` with a decode loop that does nothing but the model and an argmax."""

    def generate(self, layouts: Sequence[Layout], count: int) -> tuple[list[list[int]], float]:
        """``count`` greedy tokens of each prompt, all prompts side by side, and the seconds that decoding took."""
        driver = self.driver
        with torch.inference_mode():
            sequences = [self.open(layout) for layout in layouts]
            ids_B = driver.logits(self.prefill(sequences)).argmax(-1)
            kept = [ids_B]
            start = time.perf_counter()
            for sequence, token_id in zip(sequences, ids_B.tolist(), strict=True):
                sequence.output.append(Token(token_id, (0,) * self.spec.aux_width))
            batch = self.batch([(sequence, 1) for sequence in sequences])
            extents, views = batch.extents, [batch.paged(name) for name in batch.states]
            assert isinstance(extents, list)
            moving = [batch.positions_PT, *(t for view in views for t in (view.slots_T, view.computed_B))]
            for _ in range(count - 1):
                ids_B = driver.logits(driver.forward(batch, driver.embed(batch))).argmax(-1)
                kept.append(ids_B)
                batch.ids_T.copy_(ids_B)
                for tensor in moving:
                    tensor.add_(1)
                extents[:] = [RowExtent(1, extent.computed + 1) for extent in extents]
            out = torch.stack(kept, 1).tolist()
            spent = time.perf_counter() - start
        for sequence in sequences:
            self.close(sequence)
        return out, spent


class Duel:
    """Rounds of the bare loop and the engine at one batch size."""

    def __init__(
        self, engine: InferenceEngine, driver: TokenDriver, args: argparse.Namespace, batch: int
    ) -> None:
        self._engine, self._driver, self._batch = engine, driver, batch
        self._count, self._prompt = args.tokens, args.prompt
        self._loop = Loop(driver, max_rows=batch, max_len=driver.spec.max_positions)
        self._random = random.Random(batch)

    async def run(
        self,
        case: str,
        rounds: int,
        settings: dict[str, Any],
        *,
        images: bool = False,
        streamed: bool = False,
    ) -> Row:
        """The medians of ``rounds`` rounds, after one that warms up."""
        bare, engine, ttft, prefill = Times(), Times(), [], []
        for number in range(rounds + 1):
            prompts = [await self._segments(images) for _ in range(self._batch)]
            layouts = [self._driver.layout([s for s, _ in prompt]) for prompt in prompts]
            expected = _timed(bare, lambda layouts=layouts: self._loop.generate(layouts, self._count))
            wall, cpu = time.perf_counter(), time.process_time()
            results = await asyncio.gather(
                *(self._generate([part for _, part in prompt], settings, streamed) for prompt in prompts)
            )
            engine.wall.append(time.perf_counter() - wall)
            engine.cpu.append(time.process_time() - cpu)
            engine.decode.append(statistics.median(r.metrics.decode_time_ms for r in results) / 1e3)
            if not settings["temperature"]:
                _check(expected, results)
            ttft.append(statistics.median(r.metrics.ttft_ms for r in results))
            prefill.append(statistics.median(_prefill_share(r) for r in results))
            if not number:
                bare, engine, ttft, prefill = Times(), Times(), [], []
        low, speed, high = statistics.quantiles(_ratios(bare.wall, engine.wall), n=4)
        return Row(
            case=case,
            batch=self._batch,
            speed=speed,
            speed_low=low,
            speed_high=high,
            cpu=statistics.median(_ratios(bare.cpu, engine.cpu)),
            step=statistics.median(_ratios(bare.decode, engine.decode)),
            tokens_per_s=self._batch * self._count / statistics.median(engine.wall),
            bare_ms=statistics.median(bare.wall) * 1e3,
            engine_ms=statistics.median(engine.wall) * 1e3,
            ttft_ms=statistics.median(ttft),
            prefill_share=statistics.median(prefill),
        )

    async def _generate(
        self, prompt: list[dict[str, Any]], settings: dict[str, Any], streamed: bool
    ) -> EngineResult:
        if not streamed:
            return await self._engine.generate(prompt, settings=settings)
        stream = await self._engine.generate(prompt, stream=True, settings=settings)
        async for _ in stream:
            pass
        return await stream.result()

    async def _segments(self, images: bool) -> list[tuple[Segment, dict[str, Any]]]:
        """A prompt of its own, as the driver and as the engine take it; images are prepared beforehand."""
        vocab = self._driver.tokenizer.vocab_size
        ids = tuple(self._random.randrange(FIRST_ID, vocab) for _ in range(self._prompt))
        parts: list[tuple[Segment, dict[str, Any]]] = []
        if images:
            noise = np.random.default_rng(self._random.randrange(2**32))
            pixels = noise.integers(0, 256, (*reversed(IMAGE_SIZE), 3), dtype=np.uint8)
            media = await self._engine.prepare(pixels)
            parts.append((Media(media.prepared), {"type": "image", "image": media}))
        parts.append((Tokens(ids), {"type": "tokens", "token_ids": ids}))
        return parts


def _timed(times: Times, run: Any) -> list[list[int]]:
    wall, cpu = time.perf_counter(), time.process_time()
    out, decode = run()
    times.wall.append(time.perf_counter() - wall)
    times.cpu.append(time.process_time() - cpu)
    times.decode.append(decode)
    return out


def _ratios(bare: Sequence[float], engine: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(bare, engine, strict=True)]


def _check(expected: Sequence[Sequence[int]], results: Sequence[EngineResult]) -> None:
    found = [list(result.tokens) for result in results]
    assert found == list(expected), "the engine and the bare loop wrote different tokens"


def _prefill_share(result: EngineResult) -> float:
    metrics = result.metrics
    return metrics.prefill_time_ms / (metrics.prefill_time_ms + metrics.decode_time_ms)


async def measure(args: argparse.Namespace) -> list[Row]:
    """All rows that ``args`` ask for."""
    greedy = {"temperature": 0.0, "ignore_eos": True, "max_tokens": args.tokens}
    drawn = greedy | {"temperature": 0.2, "top_p": 0.9, "seed": 1}
    cases: dict[str, dict[str, Any]] = {
        "text": {"settings": greedy},
        "image": {"settings": greedy, "images": True},
        "drawn": {"settings": drawn},
        "streamed": {"settings": greedy, "streamed": True},
    }
    rows = []
    async with await InferenceEngine.create() as engine:
        model = await engine.fleet.ready(engine.models[0])
        driver = model.built.main
        assert isinstance(driver, TokenDriver)
        for case in args.cases:
            for batch in args.batches:
                duel = Duel(engine, driver, args, batch)
                rows.append(await duel.run(case, args.rounds, **cases[case]))
    return rows


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=32, help="random tokens of a prompt, beside its image")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--threads", type=int, help="of torch; default: torch's own choice")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    rows = asyncio.run(measure(args))
    setup = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "rounds": args.rounds,
    }
    if args.json:
        print(json.dumps({**setup, "rows": [asdict(row) for row in rows]}))
        return
    print(", ".join(f"{name} {value}" for name, value in setup.items()))
    print("batch  speed (quartiles)    cpu   step   tok/s  bare ms  engine ms  TTFT ms  prefill  case")
    for row in rows:
        print(
            f"{row.batch:5d}  {row.speed:5.2f} ({row.speed_low:.2f}–{row.speed_high:.2f})"
            f"   {row.cpu:5.2f}  {row.step:5.2f}  {row.tokens_per_s:6.0f}  {row.bare_ms:7.1f}  {row.engine_ms:9.1f}"
            f"  {row.ttft_ms:7.1f}  {row.prefill_share:7.0%}  {row.case}"
        )


if __name__ == "__main__":
    main()
