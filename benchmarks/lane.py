"""Host time per step of the token lane: everything but forward and sampling, which are timed and taken off.

    python benchmarks/lane.py [--steps 2000] [--rows 1 8 64]

A driver without maths (256 ids, greedy), prompts of 51 to 66 tokens, one thread. Then the time to take in
and admit 10,000 queued requests.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence

import torch

from kestrel.config import Settings
from kestrel.lanes import Event, LaneConfig, TokenLane, Work
from kestrel.sampling import Sampled, Sampler, SamplingParams
from kestrel.sampling.sampler import AuxFn
from kestrel.spi.batch import Batch
from kestrel.spi.decoding import Decoding
from kestrel.state import KeyRun, PoolSizes, StateCache
from kestrel.testing.toys import FakeTokenDriver
from kestrel.types import Layout

CPU = torch.device("cpu")
PROMPT = tuple(range(3, 67))


class Watch:
    """Seconds spent in what is not the lane's."""

    def __init__(self) -> None:
        self.spent = 0.0


class TimedDriver(FakeTokenDriver):
    """The fake, timed."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def embed(self, batch: Batch) -> torch.Tensor:
        start = time.perf_counter()
        x = super().embed(batch)
        self._watch.spent += time.perf_counter() - start
        return x

    def forward(self, batch: Batch, x_TC: torch.Tensor) -> torch.Tensor:
        start = time.perf_counter()
        h = super().forward(batch, x_TC)
        self._watch.spent += time.perf_counter() - start
        return h

    def logits(self, h_NC: torch.Tensor) -> torch.Tensor:
        start = time.perf_counter()
        out = super().logits(h_NC)
        self._watch.spent += time.perf_counter() - start
        return out


class TimedSampler(Sampler):
    """The sampler, timed."""

    watch: Watch

    def sample(
        self,
        logits_NV: torch.Tensor,
        rows_host: Sequence[int],
        rows: torch.Tensor,
        h_NC: torch.Tensor | None = None,
        aux_fn: AuxFn | None = None,
    ) -> Sampled:
        start = time.perf_counter()
        out = super().sample(logits_NV, rows_host, rows, h_NC, aux_fn)
        self.watch.spent += time.perf_counter() - start
        return out


def make_lane(rows: int, depth: int, watch: Watch, *, pages: int) -> TokenLane:
    """A lane over the fake with ``rows`` rows."""
    driver = TimedDriver(watch)
    sampler = TimedSampler(driver.spec, rows, CPU)
    sampler.watch = watch
    cache = StateCache(
        driver.spec,
        device=CPU,
        dtype=torch.float32,
        page_size=16,
        sizes=PoolSizes(pages=pages),
        max_ahead=4096,
    )
    config = LaneConfig(max_rows=rows, steps_in_flight=depth, max_queue=1_000_000, max_len=8192)
    return TokenLane(
        driver, cache=cache, sampler=sampler, features=None, config=config, device=CPU, sink=drop
    )


def drop(events: list[Event]) -> None:
    """A sink that keeps nothing."""


def make_work(lane: TokenLane, work_id: int, max_tokens: int) -> Work:
    """A greedy work with a prompt of its own."""
    decoding = Decoding()
    layout = Layout(tokens=(work_id % 256, work_id // 256 % 256, *PROMPT[work_id % 16 :]))
    settings = Settings(max_tokens=max_tokens, temperature=0.0)
    return Work(
        id=work_id,
        layout=layout,
        keys=KeyRun.of(layout, lane.interner),
        params=SamplingParams.resolve(settings, decoding, lane.driver.spec),
        decoding=decoding,
        seed=1,
        submitted=time.monotonic(),
    )


def steady(rows: int, depth: int, steps: int) -> tuple[float, float]:
    """Median and mean microseconds per decode step of an unchanged cohort."""
    watch = Watch()
    lane = make_lane(rows, depth, watch, pages=rows * (steps // 16 + 40))
    for i in range(rows):
        lane.submit(make_work(lane, i + 1, steps + 100))
    for _ in range(60):
        lane.tick()
    times = []
    for _ in range(steps):
        watch.spent = 0.0
        start = time.perf_counter()
        lane.tick()
        times.append((time.perf_counter() - start - watch.spent) * 1e6)
    return statistics.median(times), statistics.fmean(times)


def churn(rows: int, depth: int, works: int) -> float:
    """Mean microseconds per step while sequences of 32 tokens come and go."""
    watch = Watch()
    lane = make_lane(rows, depth, watch, pages=rows * 12)
    for i in range(works):
        lane.submit(make_work(lane, i + 1, 16 + i % 33))
    start, ticks = time.perf_counter(), 1
    while lane.tick():
        ticks += 1
    return (time.perf_counter() - start - watch.spent) / ticks * 1e6


def queue(works: int) -> tuple[float, float, float]:
    """Seconds to submit, to take in, and to run ``works`` one-token requests."""
    watch = Watch()
    lane = make_lane(64, 1, watch, pages=2048)
    made = [make_work(lane, i + 1, 1) for i in range(works)]
    start = time.perf_counter()
    for work in made:
        lane.submit(work)
    submitted = time.perf_counter()
    lane.tick()
    taken = time.perf_counter()
    while lane.tick():
        pass
    return submitted - start, taken - submitted, time.perf_counter() - taken - watch.spent


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--queued", type=int, default=10_000)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for depth in (1, 2):
        for rows in args.rows:
            median, mean = steady(rows, depth, args.steps)
            print(
                f"steady  rows {rows:3d}  in flight {depth}: median {median:6.1f} us  mean {mean:6.1f} us per step"
            )
        busiest = max(args.rows)
        print(
            f"churn   rows {busiest:3d}  in flight {depth}: mean {churn(busiest, depth, 20 * busiest):6.1f} us per step"
        )
    submit, take, run = queue(args.queued)
    print(
        f"queue   {args.queued} works: submit {submit:.3f} s, first tick {take:.3f} s, the rest {run:.3f} s"
    )


if __name__ == "__main__":
    main()
