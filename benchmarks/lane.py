"""Host time per step of the token lane: everything but forward and sampling, which are timed and taken off.

    python benchmarks/lane.py [--steps 2000] [--rows 1 8 64]

A driver without maths (256 ids, greedy), prompts of 51 to 66 tokens, one thread. Then the time to take in
and admit 10,000 queued requests, and half as many. Times are CPU time of the lane's thread: other jobs of the machine
do not count.
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
clock = time.thread_time
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
        start = clock()
        x = super().embed(batch)
        self._watch.spent += clock() - start
        return x

    def forward(self, batch: Batch, x_TC: torch.Tensor) -> torch.Tensor:
        start = clock()
        h = super().forward(batch, x_TC)
        self._watch.spent += clock() - start
        return h

    def logits(self, h_NC: torch.Tensor) -> torch.Tensor:
        start = clock()
        out = super().logits(h_NC)
        self._watch.spent += clock() - start
        return out


class TimedSampler(Sampler):
    """The sampler, timed."""

    watch: Watch

    def needs_of(self, rows_host: Sequence[int]) -> int:
        start = clock()
        needs = super().needs_of(rows_host)
        self.watch.spent += clock() - start
        return needs

    def sample_as(
        self,
        logits_NV: torch.Tensor,
        needs: int,
        rows: torch.Tensor,
        h_NC: torch.Tensor | None = None,
        aux_fn: AuxFn | None = None,
    ) -> Sampled:
        start = clock()
        out = super().sample_as(logits_NV, needs, rows, h_NC, aux_fn)
        self.watch.spent += clock() - start
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
        start = clock()
        lane.tick()
        times.append((clock() - start - watch.spent) * 1e6)
    return statistics.median(times), statistics.fmean(times)


def churn(rows: int, depth: int, works: int) -> float:
    """Mean microseconds per step while sequences of 32 tokens come and go."""
    watch = Watch()
    lane = make_lane(rows, depth, watch, pages=rows * 12)
    for i in range(works):
        lane.submit(make_work(lane, i + 1, 16 + i % 33))
    start, ticks = clock(), 1
    while lane.tick():
        ticks += 1
    return (clock() - start - watch.spent) / ticks * 1e6


def queue(works: int) -> tuple[float, float, float]:
    """Seconds to submit, to take in, and to run ``works`` one-token requests."""
    watch = Watch()
    lane = make_lane(64, 1, watch, pages=2048)
    made = [make_work(lane, i + 1, 1) for i in range(works)]
    start = clock()
    for work in made:
        lane.submit(work)
    submitted = clock()
    lane.tick()
    taken = clock()
    while lane.tick():
        pass
    return submitted - start, taken - submitted, clock() - taken - watch.spent


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
    for works in (args.queued // 2, args.queued):
        submit, take, run = queue(works)
        print(
            f"queue   {works} works: submit {submit:.3f} s, first tick {take:.3f} s, the rest {run:.3f} s, "
            f"{(submit + take + run) / works * 1e6:.0f} us each"
        )


if __name__ == "__main__":
    main()
