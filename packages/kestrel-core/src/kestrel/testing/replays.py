"""What a driver answers when its decode steps are replayed from captured programs, through a whole lane on the CPU."""

from __future__ import annotations

from collections.abc import Sequence

from kestrel.spi import Decoding, TokenDriver
from kestrel.testing.bench import Bench
from kestrel.testing.graphs import ReplayGraphs
from kestrel.types import Layout, Token

__all__ = ["replayed"]

ROWS, PAGE_SIZE = 2, 16


def replayed(
    driver: TokenDriver, layouts: Sequence[Layout], decodings: Sequence[Decoding], max_tokens: int
) -> list[list[Token]]:
    """The greedy tokens after each of ``layouts``, two at a time. AssertionError where a request fails, or where a
    replay would not do what was captured (see ``ReplayGraphs``)."""
    if not layouts:
        return []
    longest = max(map(len, layouts)) + max_tokens + 1
    features = sum(item.num_positions for layout in layouts for item in layout.media)
    bench = Bench(
        driver,
        max_rows=ROWS,
        page_size=PAGE_SIZE,
        pages=(ROWS + 1) * (-(-longest // PAGE_SIZE) + 4),
        budget=longest,
        max_len=longest,
        depth=2,
        feature_rows=max(1, features),
        entries=ROWS,
        prefix_cache=False,
        graphs=ReplayGraphs(),
    )
    works = [
        bench.submit(layout, decoding=decoding, max_tokens=max_tokens)
        for layout, decoding in zip(layouts, decodings, strict=True)
    ]
    bench.run()
    for work_id in works:
        error = bench.outcomes[work_id].error
        if error is not None:
            raise AssertionError(f"a request fails when decode is captured: {error}") from error
    return [bench.outcomes[work_id].tokens for work_id in works]
