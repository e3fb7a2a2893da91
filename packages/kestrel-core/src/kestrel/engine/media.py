"""A call's media on their way to a driver: decoded within limits, prepared on the pool, accounted while held."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kestrel.config import Settings
from kestrel.engine.pool import CpuPool
from kestrel.errors import InvalidRequestError
from kestrel.media import Decode, MediaBudget, MediaHold, MediaLimits, load_video, normalise_image
from kestrel.spi import (
    AudioItem,
    FloatsItem,
    FrameSampling,
    ImageItem,
    MediaItem,
    MediaSpec,
    StepDriver,
    TokenDriver,
    VideoItem,
)
from kestrel.types import Prepared

__all__ = ["MediaIntake", "PreparedMedia"]

_SPATIAL_KINDS = {2: "point", 4: "box"}


@dataclass(frozen=True, slots=True)
class PreparedMedia:
    """A decoded and prepared item, accepted wherever an image is by the model that prepared it."""

    model_id: str
    prepared: Prepared
    warnings: tuple[str, ...] = ()


class MediaIntake:
    """Decodes and prepares media for one model; ``budget`` bounds the decoded bytes held at a time, engine-wide.
    ``decode``: where encoded pictures are decoded; None: on the pool's threads."""

    def __init__(
        self,
        model_id: str,
        driver: TokenDriver | StepDriver,
        limits: MediaLimits,
        budget: MediaBudget,
        pool: CpuPool,
        decode: Decode | None = None,
    ) -> None:
        self._model_id = model_id
        self._driver = driver
        self._limits = limits
        self.budget = budget
        self._pool = pool
        self._decode = decode

    def check(self, media: Sequence[tuple[str, Any]]) -> None:
        """InvalidRequestError when the model does not take these kinds, or not so many of them."""
        counts: dict[str, int] = {}
        for role, raw in media:
            kind = _kind(role, raw)
            counts[kind] = counts.get(kind, 0) + 1
        for kind, count in counts.items():
            spec = self._spec(kind)
            if spec.max_items is not None and count > spec.max_items:
                raise InvalidRequestError(
                    f"{self._model_id} takes at most {spec.max_items} {kind} per request; {count} were given. "
                    "Leave some out"
                )

    def _spec(self, kind: str) -> MediaSpec:
        specs: tuple[MediaSpec, ...] = self._driver.spec.media
        for spec in specs:
            if spec.kind == kind:
                return spec
        kinds = ", ".join(spec.kind for spec in specs) or "no media"
        raise InvalidRequestError(f"{self._model_id} takes {kinds}; it was given {kind!r}")

    async def prepare_all(
        self, media: Sequence[tuple[str, Any]], settings: Settings, hold: MediaHold, turn: float
    ) -> tuple[tuple[Prepared, ...], tuple[str, ...]]:
        """The items prepared, in order, and the warnings of decoding them. ``hold`` grows by what they occupy;
        ``turn``: when their call came in, for the pool."""
        self.check(media)
        jobs = [self._held(role, raw, settings, hold, turn) for role, raw in media]
        done = await _gather(jobs)
        return tuple(item.prepared for item in done), tuple(w for item in done for w in item.warnings)

    async def prepare(self, role: str, raw: Any, settings: Settings, turn: float) -> PreparedMedia:
        """One item prepared on the pool. InvalidMediaError, or EngineBusyError when decoded media fill the memory."""
        if isinstance(raw, PreparedMedia):
            return self._own(raw)
        options = _media_settings(settings)
        return await self._pool.run(lambda: self._prepare_now(role, raw, options), turn)

    def prepare_here(self, role: str, raw: Any, settings: Settings, hold: MediaHold) -> PreparedMedia:
        """As ``prepare``, on this thread, which is one of the pool; ``hold`` grows by what the item occupies."""
        if isinstance(raw, PreparedMedia):
            return self._own(raw)
        item = self._prepare_now(role, raw, _media_settings(settings))
        hold.grow(_size(item))
        return item

    async def prepare_item(self, item: MediaItem, settings: Settings, turn: float) -> Prepared:
        """An item that is already decoded, prepared on the pool."""
        options = _media_settings(settings)
        return await self._pool.run(lambda: self._by_driver(item, options), turn)

    async def _held(
        self, role: str, raw: Any, settings: Settings, hold: MediaHold, turn: float
    ) -> PreparedMedia:
        item = await self.prepare(role, raw, settings, turn)
        if not isinstance(raw, PreparedMedia):  # those are their owner's
            hold.grow(_size(item))
        return item

    def _own(self, given: PreparedMedia) -> PreparedMedia:
        if given.model_id != self._model_id:
            raise InvalidRequestError(
                f"this media was prepared for {given.model_id!r}; prepare it again for {self._model_id!r}"
            )
        return given

    def _prepare_now(self, role: str, raw: Any, settings: Mapping[str, Any]) -> PreparedMedia:
        if isinstance(raw, ImageItem | VideoItem | AudioItem | FloatsItem):
            return PreparedMedia(self._model_id, self._by_driver(raw, settings))
        if role == "spatial":
            item = FloatsItem(values=tuple(raw), kind=_kind(role, raw))
            return PreparedMedia(self._model_id, self._by_driver(item, settings))
        if role == "video":
            return self._prepare_video(raw, settings)
        if role != "image":
            raise InvalidRequestError(f"media of kind {role!r} cannot be decoded yet; images and videos can")
        with (
            self.budget.hold() as hold
        ):  # of the decoded picture; its prepared form is smaller and kept longer
            image = normalise_image(raw, self._limits, reserve=hold.grow, decode=self._decode)
            item_meta = {"width": image.pixels.shape[1], "height": image.pixels.shape[0]}
            prepared = self._by_driver(ImageItem(pixels=image.pixels, meta=item_meta), settings)
        return PreparedMedia(self._model_id, prepared, image.warnings)

    def _by_driver(self, item: MediaItem, settings: Mapping[str, Any]) -> Prepared:
        prepared = self._driver.prepare(item, settings)
        if not isinstance(prepared, Prepared):
            raise TypeError(f"prepare gave a {type(prepared).__name__}, not a Prepared")
        return prepared

    def _prepare_video(self, raw: Any, settings: Mapping[str, Any]) -> PreparedMedia:
        sampling = self._spec("video").sampling or FrameSampling()
        asked = {name: settings[name] for name in ("fps", "max_frames") if name in settings}
        with self.budget.hold() as hold:  # of the decoded frames
            video = load_video(raw, self._limits, replace(sampling, **asked), reserve=hold.grow)
            prepared = self._by_driver(video.item, settings)
        return PreparedMedia(self._model_id, prepared, video.warnings)


def _size(item: PreparedMedia) -> int:
    return sum(tensor.nbytes for tensor in item.prepared.tensors.values())


def _kind(role: str, raw: Any) -> str:
    if isinstance(raw, PreparedMedia):
        return raw.prepared.kind
    return _SPATIAL_KINDS[len(raw)] if role == "spatial" else role


def _media_settings(settings: Settings) -> dict[str, Any]:
    names = ("min_pixels", "max_pixels", "fps", "max_frames")
    return {name: value for name in names if (value := getattr(settings, name)) is not None}


async def _gather(jobs: Sequence[Any]) -> list[PreparedMedia]:
    """All results in order; the first failure cancels the rest and is raised."""
    if len(jobs) == 1:
        return [await jobs[0]]
    tasks: list[asyncio.Task[PreparedMedia]] = [asyncio.ensure_future(job) for job in jobs]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        raise
