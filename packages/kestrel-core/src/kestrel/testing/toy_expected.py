"""What a lane must produce with ``ToyHybrid``, by its oracle: greedy decoding of the whole sequence at every step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kestrel.testing.toy_hybrid import ToyHybrid
from kestrel.types import Layout

__all__ = ["Expected", "TooCloseError"]

MARGIN = 1e-3


class TooCloseError(Exception):
    """The best two logits are closer than float32 and another batch shape may tell apart."""


class Expected:
    """Greedy outputs of one toy, remembered between questions."""

    def __init__(self, driver: ToyHybrid) -> None:
        self._driver = driver
        self._known: dict[object, torch.Tensor] = {}

    def ids(self, layout: Layout, max_tokens: int, stop: Sequence[int] = ()) -> list[int]:
        """The ids that follow ``layout``; TooCloseError where float32 may choose otherwise."""
        out: list[int] = []
        while len(out) < max_tokens and not (out and out[-1] in stop):
            logits = self.logits(layout, out)[-1]
            best = logits.topk(2).values
            if best[0] - best[1] <= MARGIN:
                raise TooCloseError(
                    f"the best two logits differ by {best[0] - best[1]:.1e}; choose another prompt"
                )
            out.append(int(logits.argmax()))
        return out

    def logits(
        self, layout: Layout, generated: Sequence[int] = (), bins: Sequence[tuple[int, ...]] = ()
    ) -> torch.Tensor:
        """Logits [n, V] of the prompt followed by ``generated`` ids with ``bins`` (none: zeros)."""
        digests = tuple(item.digest for item in layout.media)
        key = (layout.tokens, layout.aux, layout.spans, layout.bidirectional, layout.positions, digests)
        whole = (key, tuple(generated), tuple(bins))
        if whole not in self._known:
            self._known[whole] = self._logits(layout, list(generated), list(bins))
        return self._known[whole]

    def _logits(self, layout: Layout, generated: list[int], bins: list[tuple[int, ...]]) -> torch.Tensor:
        length = len(layout) + len(generated)
        prompt_bins = list(layout.aux) or [(0, 0)] * len(layout)
        offset = layout.decode_offset[0] if layout.decode_offset else 0
        places = list(layout.positions[0]) if layout.positions else list(range(len(layout)))
        spanned = {span.item for span in layout.spans}
        return self._driver.oracle(
            [*layout.tokens, *generated],
            bins=prompt_bins + (bins or [(0, 0)] * len(generated)),
            media=[(span.start, layout.media[span.item]) for span in layout.spans],
            cross=next((item for i, item in enumerate(layout.media) if i not in spanned), None),
            ranges=layout.bidirectional,
            positions=[*places, *(at + offset for at in range(len(layout), length))],
        )
