"""What a token lane can take, checked at the door, on the caller's thread."""

from __future__ import annotations

from dataclasses import dataclass

from kestrel.errors import CapacityError, InvalidRequestError, PluginError
from kestrel.lanes.work import Work
from kestrel.spi.driver import TokenSpec
from kestrel.state import StateCache
from kestrel.types import Layout

__all__ = ["LaneConfig", "LaneLimits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneConfig:
    """Sizes of a token lane.

    ``max_len`` bounds prompt and output together. ``head_start``: output positions reserved at admission, so that a
    sequence does not ask for pages at once. ``deterministic``: launches of a fixed number of rows, one prefill chunk
    at a time, so that a result does not depend on who else runs.
    """

    max_rows: int = 64
    max_batched_tokens: int = 2048
    max_len: int = 2**20
    steps_in_flight: int = 1
    max_queue: int = 4096
    prefix_cache: bool = True
    head_start: int = 32
    deterministic: bool = False


class LaneLimits:
    """Refuses what can never run. Thread-safe: it only reads sizes that never change."""

    def __init__(self, spec: TokenSpec, cache: StateCache, config: LaneConfig, feature_rows: int) -> None:
        self._spec, self._cache = spec, cache
        self._budget, self._feature_rows = config.max_batched_tokens, feature_rows
        self.max_len = min(config.max_len, spec.max_positions)
        self.pool_len = _largest(cache, self.max_len)

    def output_limit(self, work: Work) -> int:
        """The most tokens that ``work`` may produce: its ``max_tokens``, or to the end of context and pool.

        Raises CapacityError when prompt and output can never fit, InvalidRequestError for media the model does not
        take.
        """
        prompt, wanted = len(work.layout), work.params.max_tokens
        if not prompt:
            raise InvalidRequestError("the prompt is empty; give at least one token")
        room = self.max_len - prompt
        if room < 1:
            raise CapacityError(
                f"the prompt has {prompt} tokens; the context of {self.max_len} fits at most {self.max_len - 1}. "
                "Shorten the prompt, or raise max_model_len where the model allows it."
            )
        limit = room if wanted is None else min(room, wanted)
        if wanted is None and prompt < self.pool_len:
            limit = min(limit, self.pool_len - prompt)
        reason = self._cache.fits(prompt + limit)
        if reason is not None:
            raise CapacityError(
                f"a request of {prompt} prompt tokens and up to {limit} output tokens can never fit: {reason}. "
                "Lower max_tokens, shorten the prompt, or raise kv_cache_bytes."
            )
        self._check_media(work)
        return limit

    def check_layout(self, layout: Layout) -> None:
        """Refuse a prompt that would break a launch, and with it the prompts beside it. Looks at every position, so
        not for the event loop.

        Raises InvalidRequestError for ids outside the vocabulary, PluginError for what only a family can get wrong.
        """
        spec, size = self._spec, len(layout)
        if layout.tokens and not (min(layout.tokens) >= 0 and max(layout.tokens) < spec.vocab_size):
            outside = next(i for i in layout.tokens if not 0 <= i < spec.vocab_size)
            raise InvalidRequestError(
                f"the prompt holds token {outside}, outside this model's vocabulary; "
                f"use ids from 0 to {spec.vocab_size - 1}"
            )
        rows, offsets, media = layout.positions, layout.decode_offset, layout.media
        bins = [output.cardinality for output in spec.aux for _ in range(output.width)]
        ends = [0, *(span.end for span in layout.spans)]
        wants = {
            f"{len(bins)} aux bins of their range per position": not layout.aux
            or (len(layout.aux) == size and all(_fit(found, bins) for found in layout.aux)),
            f"{spec.position_rows} rows of {size} positions": not rows
            or (len(rows) == spec.position_rows and all(len(row) == size for row in rows)),
            f"{spec.position_rows} decode offsets": not offsets or len(offsets) == spec.position_rows,
            "spans in order inside the prompt, each as long as its item": all(
                at <= span.start < span.end <= size
                and 0 <= span.item < len(media)
                and span.end - span.start == media[span.item].num_positions
                for at, span in zip(ends, layout.spans, strict=False)
            ),
            "ranges inside the prompt": all(0 <= a < b <= size for a, b in layout.bidirectional),
        }
        wrong = [want for want, holds in wants.items() if not holds]
        if wrong:
            raise PluginError(
                f"the model's family laid a prompt of {size} positions out without {' and '.join(wrong)}; "
                "this request alone is lost, and its family has a bug"
            )

    def _check_media(self, work: Work) -> None:
        layout = work.layout
        for start, end in layout.bidirectional:
            if end - start > self._budget:
                raise CapacityError(
                    f"the prompt has a bidirectional range of {end - start} positions, which run together; "
                    f"max_batched_tokens is {self._budget}. Raise it."
                )
        for span in layout.spans:
            if span.end - span.start > self._feature_rows:
                raise CapacityError(
                    f"a media item fills {span.end - span.start} positions; the feature pool holds "
                    f"{self._feature_rows}. Give a smaller item (max_pixels, max_frames)."
                )
        cross = 0
        for item in layout.media:
            cross += self._spec.media_spec(item.kind).into == "cross"
        if cross > 1:
            raise InvalidRequestError(
                f"the prompt has {cross} items for cross attention; the model takes one"
            )
        for at, ids in work.probes:
            if not 0 <= at < len(layout) or not all(0 <= i < self._spec.vocab_size for i in ids):
                raise InvalidRequestError(
                    f"a probe of {len(ids)} ids at position {at} leaves the prompt of {len(layout)} or the vocabulary"
                )


def _fit(bins: tuple[int, ...], cardinalities: list[int]) -> bool:
    return len(bins) == len(cardinalities) and all(
        0 <= b < c for b, c in zip(bins, cardinalities, strict=True)
    )


def _largest(cache: StateCache, upper: int) -> int:
    """The most positions, up to ``upper``, that one sequence alone can have."""
    low, high = 0, upper
    while low < high:
        middle = (low + high + 1) // 2
        if cache.fits(middle) is None:
            low = middle
        else:
            high = middle - 1
    return low
