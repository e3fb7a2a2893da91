"""What a token lane can take, checked at the door, on the caller's thread."""

from __future__ import annotations

from dataclasses import dataclass

from kestrel.errors import CapacityError, InvalidRequestError
from kestrel.lanes.work import Work
from kestrel.spi.driver import TokenSpec
from kestrel.state import StateCache

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
