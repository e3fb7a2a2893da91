"""What ``kestrel bench`` measures: tokens per second through the engine, with prompts of their own in every request."""

from __future__ import annotations

import asyncio
import statistics
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from kestrel.cli import output, session, tables
from kestrel.cli.options import ModelOptions
from kestrel.errors import InvalidRequestError

if TYPE_CHECKING:
    from kestrel.engine import InferenceEngine
    from kestrel.types import EngineResult

__all__ = ["Plan", "Speed", "measure", "measure_engine"]

BATCHES = (1, 8)
WORDS = "the red circle is left of a small blue square above one tall green bar in some grey noise".split()


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much to measure: lengths in tokens (the prompt's is approximate), rounds per batch size."""

    prompt_tokens: int = 128
    new_tokens: int = 64
    rounds: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Medians over the rounds. Rates are tokens per second of the whole batch."""

    batch: int
    input_tokens: int
    output_tokens: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    ttft_ms: float


async def measure(model: ModelOptions, plan: Plan, *, json: bool) -> None:
    """Measure a model and print a table, or one JSON object."""
    async with session.opened(model) as engine:
        name = engine.models[0]
        with session.progress_bars() as report:
            speeds = await measure_engine(engine, plan, report)
    rows = [asdict(speed) for speed in speeds]
    if json:
        output.print_json({"model": name, "device": model.device, "dtype": model.dtype, "speeds": rows})
        return
    if output.is_terminal(sys.stdout):
        output.print_text(name)
    tables.print_rows(rows, tuple(rows[0]), json=False)


async def measure_engine(
    engine: InferenceEngine, plan: Plan, report: session.Report = session.no_report
) -> list[Speed]:
    """The default model's speed at each batch size, after a warm-up round. InvalidRequestError if it writes no text."""
    model = engine.model()
    if not model.supports("generate"):
        raise InvalidRequestError(
            f"{model.model_id} continues no text, so it has no tokens per second; it has: {', '.join(model.skills)}"
        )
    repeats = await _words_for(engine, plan)
    total = len(BATCHES) * (plan.rounds + 1)
    speeds = []
    for at, batch in enumerate(BATCHES):
        rounds = []
        for number in range(plan.rounds + 1):
            results = await _round(engine, plan, batch, f"{batch}.{number}", repeats)
            rounds.append(_speed(results))
            report("measuring", at * (plan.rounds + 1) + number + 1, total)
        speeds.append(_median(rounds[1:]))  # the first round warms up
    return speeds


async def _words_for(engine: InferenceEngine, plan: Plan) -> int:
    """How many words make a prompt of about the planned length, by one short trial."""
    trial = await engine.generate(_prompt("trial", 32), settings={"max_tokens": 1})
    return max(1, round(plan.prompt_tokens * 32 / max(1, trial.metrics.input_tokens)))


async def _round(
    engine: InferenceEngine, plan: Plan, batch: int, mark: str, repeats: int
) -> list[EngineResult]:
    settings = {"max_tokens": plan.new_tokens, "ignore_eos": True, "temperature": 0.0}
    prompts = [_prompt(f"{mark}.{number}", repeats) for number in range(batch)]
    return await asyncio.gather(*(engine.generate(prompt, settings=settings) for prompt in prompts))


def _prompt(mark: str, repeats: int) -> str:
    """A text whose start differs from every other's, so that no prompt is answered from the prefix cache."""
    return mark + " " + " ".join(WORDS[i % len(WORDS)] for i in range(repeats))


def _speed(results: list[EngineResult]) -> Speed:
    metrics = [result.metrics for result in results]
    computed = sum(m.input_tokens - m.cached_tokens for m in metrics)
    prefill_ms = max(m.prefill_time_ms for m in metrics)
    decode_ms = max(m.decode_time_ms for m in metrics)
    return Speed(
        batch=len(results),
        input_tokens=round(statistics.mean(m.input_tokens for m in metrics)),
        output_tokens=round(statistics.mean(m.output_tokens for m in metrics)),
        prefill_tokens_per_s=_rate(computed, prefill_ms),
        decode_tokens_per_s=_rate(sum(m.output_tokens - 1 for m in metrics), decode_ms),
        ttft_ms=statistics.median(m.ttft_ms for m in metrics),
    )


def _rate(count: int, time_ms: float) -> float:
    return count * 1000.0 / time_ms if time_ms > 0 else 0.0


def _median(rounds: list[Speed]) -> Speed:
    fields: dict[str, Any] = {
        name: statistics.median(getattr(r, name) for r in rounds) for name in asdict(rounds[0])
    }
    return Speed(**{name: round(v) if name.startswith(("batch", "input", "output")) else round(v, 1)
                    for name, v in fields.items()})  # fmt: skip
