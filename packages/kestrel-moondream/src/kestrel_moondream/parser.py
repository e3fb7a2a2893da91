"""Generated ids as pieces of a result: reasoning with its grounding, points, boxes. Bins become floats here."""

from __future__ import annotations

from collections.abc import Sequence

from kestrel.spi import Found, GroundClose, GroundOpen, GroundPoint, Parser, Piece, Say
from kestrel.types import Token
from kestrel_moondream.config import RegionConfig, TokenizerConfig

__all__ = ["BoxParser", "Coordinates", "PointParser", "ReasoningParser"]


class Coordinates:
    """Values of aux bins. A bin of 0 means that there is none; bin b + 1 is the model's bin b."""

    def __init__(self, region: RegionConfig) -> None:
        self._coord_bins = region.coord_out_dim
        self._size_bins = region.size_bins

    def coordinate(self, token: Token) -> float:
        """The coordinate, 0–1, of a coordinate token."""
        return (token.aux[0] - 1) / self._coord_bins

    def size(self, token: Token) -> tuple[float, float]:
        """Width and height, 0–1, of a size token."""
        width, height = (2 ** ((b - 1) / (self._size_bins - 1) * 10 - 10) for b in token.aux[1:3])
        return width, height


class PointParser(Parser):
    """Every two coordinate tokens are a point."""

    def __init__(self, ids: TokenizerConfig, coordinates: Coordinates) -> None:
        self._ids = ids
        self._coordinates = coordinates
        self._x: float | None = None

    def feed(self, token: Token) -> Sequence[Piece]:
        if token.id != self._ids.coord_id or not token.aux:
            return ()
        value = self._coordinates.coordinate(token)
        if self._x is None:
            self._x = value
            return ()
        x, self._x = self._x, None
        return (Found({"x": x, "y": value}),)


class BoxParser(Parser):
    """Two coordinate tokens (the centre) and a size token are a box, clamped to the image."""

    def __init__(self, ids: TokenizerConfig, coordinates: Coordinates) -> None:
        self._ids = ids
        self._coordinates = coordinates
        self._centre: list[float] = []

    def feed(self, token: Token) -> Sequence[Piece]:
        if token.id == self._ids.coord_id and token.aux:
            self._centre.append(self._coordinates.coordinate(token))
        if token.id != self._ids.size_id or not token.aux or len(self._centre) < 2:
            return ()
        (x, y), self._centre = self._centre[-2:], []
        width, height = self._coordinates.size(token)
        sides = {
            "x_min": x - width / 2,
            "y_min": y - height / 2,
            "x_max": x + width / 2,
            "y_max": y + height / 2,
        }
        return (Found({name: min(1.0, max(0.0, side)) for name, side in sides.items()}),)


class ReasoningParser(Parser):
    """Reasoning until the answer id, then the opener, then the answer.

    Inside a grounded span coordinate tokens pair up as points; coordinates elsewhere belong to nothing.
    """

    def __init__(self, ids: TokenizerConfig, coordinates: Coordinates) -> None:
        self._ids = ids
        self._coordinates = coordinates
        self._openers_left: int | None = None  # None while reasoning
        self._grounded = False
        self._x: float | None = None

    def feed(self, token: Token) -> Sequence[Piece]:
        if self._openers_left is None:
            return self._reason(token)
        if self._openers_left and token.id == self._ids.answer_id:
            self._openers_left -= 1
            return ()
        self._openers_left = 0
        return (Say((token.id,)),)

    def finish(self, finish_reason: str) -> Sequence[Piece]:
        return self._close()

    def _reason(self, token: Token) -> Sequence[Piece]:
        ids = self._ids
        if token.id == ids.answer_id:
            self._openers_left = len(ids.answer_opener)
            return self._close()
        if token.id == ids.start_ground_points_id:
            closed = self._close()
            self._grounded = True
            return (*closed, GroundOpen())
        if token.id == ids.end_ground_id:
            return self._close()
        if token.id == ids.coord_id:
            return self._point(token)
        return (Say((token.id,), "reasoning"),)

    def _point(self, token: Token) -> Sequence[Piece]:
        if not self._grounded or not token.aux:
            return ()
        value = self._coordinates.coordinate(token)
        if self._x is None:
            self._x = value
            return ()
        x, self._x = self._x, None
        return (GroundPoint(x, value),)

    def _close(self) -> tuple[Piece, ...]:
        was_open, self._grounded, self._x = self._grounded, False, None
        return (GroundClose(),) if was_open else ()
