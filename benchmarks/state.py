"""Host cost of the state cache: ``python benchmarks/state.py``. No device work is in what is timed but two tiny copies.

Prints a table: prefix match of a 4,096-token prompt in a tree of 10,000 nodes (aim: below 200 µs), opening, reserving,
committing and closing, steady decode, and 10,000 requests admitted one by one and held at once.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table

from kestrel.spi.driver import TokenSpec
from kestrel.spi.states import PagedKV, Recurrent, StatePart, StateSpec, WindowKV
from kestrel.state import KeyRun, PoolSizes, StateCache
from kestrel.state.match import match
from kestrel.types import Layout

PAGE_SIZE = 16
PROMPT = 4096
NODES = 10_000
REQUESTS = 10_000

FULL = PagedKV(name="full", layers=1, kv_heads=1, head_dim=1)
WINDOW = WindowKV(name="window", layers=1, kv_heads=1, head_dim=1, window=1024)
RECURRENT = Recurrent(name="recurrent", layers=1, parts=(StatePart(name="s", shape=(1,)),))


def new_cache(*states: StateSpec, pages: int = 2 * NODES + REQUESTS) -> StateCache:
    """A cache with ample pools and minimal tensors."""
    return StateCache(
        TokenSpec(vocab_size=1 << 16, hidden_size=1, max_positions=1 << 20, states=states),
        device=torch.device("cpu"),
        dtype=torch.float32,
        page_size=PAGE_SIZE,
        sizes=PoolSizes(pages=pages, window_pages={1024: pages}, live_slots=64, checkpoint_slots=256),
        max_ahead=4096,
    )


def prompt(first: int, length: int = PROMPT) -> Layout:
    """A prompt that shares nothing with one of another ``first``."""
    return Layout(tokens=(first, *range(1, length)))


def fill(cache: StateCache) -> None:
    """Cache prompts until the tree holds ``NODES`` nodes."""
    first = 0
    while cache.stats().nodes < NODES:
        keys = KeyRun.of(prompt(first), cache.interner)
        lease = cache.open(keys, reserve=PROMPT)
        assert lease is not None, "the pools are too small for this benchmark"
        lease.stores(0, PROMPT)
        lease.commit(PROMPT)
        lease.close()
        first += 1


def micros(action: Callable[[], object], repeats: int = 300) -> tuple[float, float]:
    """Median and 99th percentile of ``action``, in microseconds."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter_ns()
        action()
        times.append((time.perf_counter_ns() - start) / 1000)
    times.sort()
    return statistics.median(times), times[int(len(times) * 0.99)]


def prefix_match(table: Table, name: str, *states: StateSpec) -> None:
    """Rows for matching, and for opening and closing, a fully cached prompt."""
    cache = new_cache(*states)
    fill(cache)
    keys = KeyRun.of(Layout(tokens=(*prompt(1).tokens, 9)), cache.interner)
    tree = cache._pools.tree
    assert tree is not None
    found = match(tree, keys, PROMPT)
    assert found.end >= PROMPT - PAGE_SIZE, f"only {found.end} positions are cached"
    add(table, f"match 4k prompt, 10k nodes: {name}", *micros(lambda: match(tree, keys, PROMPT)))

    def reopen() -> None:
        lease = cache.open(keys, reserve=PROMPT + 64)
        assert lease is not None
        lease.close()

    add(table, f"open + reserve + close, 4k cached: {name}", *micros(reopen))


def steady_decode(table: Table, name: str, *states: StateSpec) -> None:
    """A row for one sequence's share of a decode step: key, reserve, pin, commit, unpin."""
    cache = new_cache(*states)
    keys = KeyRun.of(prompt(1), cache.interner)
    lease = cache.open(keys, reserve=PROMPT)
    assert lease is not None
    lease.commit(PROMPT)

    def step() -> None:
        end = lease.computed + 1
        keys.append(5)
        lease.reserve(end)
        lease.stores(end - 1, end)
        lease.pin()
        lease.unpin()
        lease.commit(end)

    add(table, f"decode step of one sequence: {name}", *micros(step, 20_000))
    lease.close()


def admissions(table: Table) -> None:
    """Rows per request for 10,000 one after the other, and for 10,000 held at once."""
    cache = new_cache(FULL)
    runs = [KeyRun.of(prompt(i, 40), cache.interner) for i in range(REQUESTS)]
    for part in (runs[:1000], runs):
        start = time.perf_counter()
        for keys in part:
            lease = cache.open(keys, reserve=41)
            assert lease is not None
            lease.commit(40)
            lease.finish(exact=True)
        each = (time.perf_counter() - start) / len(part) * 1e6
        add(table, f"{len(part):,} requests of 40 tokens, one by one: each", each, each)
    cache = new_cache(FULL, pages=REQUESTS * 3)
    start = time.perf_counter()
    leases = [cache.open(keys, reserve=41) for keys in runs]
    for lease in leases:
        assert lease is not None
        lease.close()
    each = (time.perf_counter() - start) / REQUESTS * 1e6
    add(table, f"{REQUESTS:,} requests held at once: each", each, each)


def add(table: Table, what: str, median: float, tail: float) -> None:
    """A row of the table."""
    table.add_row(what, f"{median:,.1f}", f"{tail:,.1f}")


def main() -> None:
    """Run everything and print the table."""
    torch.set_num_threads(1)
    table = Table("what", "median µs", "p99 µs", title="state cache, host time")
    layout = prompt(1)
    cache = new_cache(FULL)
    add(table, "keys of a 4k prompt (pool thread)", *micros(lambda: KeyRun.of(layout, cache.interner)))
    for name, states in (
        ("full", (FULL,)),
        ("full + window", (FULL, WINDOW)),
        ("full + recurrent", (FULL, RECURRENT)),
    ):
        prefix_match(table, name, *states)
        steady_decode(table, name, *states)
    admissions(table)
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
