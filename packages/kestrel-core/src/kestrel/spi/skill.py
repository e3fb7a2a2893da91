"""Skills: named capabilities with validation, a request, a reader and a result shape."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from kestrel.config import Settings
from kestrel.spi.decoding import Decoding
from kestrel.spi.media import MediaItem
from kestrel.types import FinishReason, Metrics, Prepared, Segment, StreamChunk, Token

if TYPE_CHECKING:
    from kestrel.spi.family import TextTokenizer
    from kestrel.spi.prompt import PromptFormat

__all__ = ["Call", "Completion", "Infer", "Reader", "Request", "RequestRecord", "Skill"]

R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A validated call of one skill.

    ``values``: the skill's own inputs (question, object, length, messages, …), validated and normalised.
    ``media``: media by role, in order, as the user gave them ("image", "audio", "spatial", …); the engine decodes
    and prepares them into ``prepared`` (same order) before ``request`` is asked. ``settings`` are complete.
    """

    skill: str
    values: Mapping[str, Any] = field(default_factory=dict)
    media: tuple[tuple[str, Any], ...] = ()
    prepared: tuple[Prepared, ...] = ()
    settings: Settings = field(default_factory=Settings)
    reasoning: bool = False

    def with_prepared(self, prepared: Sequence[Prepared]) -> Call:
        """This call with its media prepared."""
        return replace(self, prepared=tuple(prepared))

    def of_kind(self, kind: str) -> tuple[Prepared, ...]:
        """The prepared items of one kind, in order."""
        return tuple(item for item in self.prepared if item.kind == kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One schedulable unit of work. ``reader`` makes a fresh reader per output.

    ``probes``: ``(position, ids)`` pairs: the unmasked log-probabilities of ``ids`` after prompt position
    ``position``; a prefix hit never reaches past the first probe.
    """

    segments: tuple[Segment, ...]
    decoding: Decoding
    settings: Settings
    reader: Callable[[], Reader] | None = None
    probes: tuple[tuple[int, tuple[int, ...]], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One output of one request. ``tokens`` include a sampled stop id. ``probes``: one tuple of natural-log
    probabilities per probe. ``output``: what a step model returned, or the reader's result when there was one.
    ``warnings`` are for the user: what a composition met while it read its inputs."""

    tokens: tuple[Token, ...] = ()
    finish_reason: FinishReason = "stop"
    probes: tuple[tuple[float, ...], ...] = ()
    output: Any = None
    metrics: Metrics = field(default_factory=Metrics)
    seed: int = 0
    media: tuple[Mapping[str, Any], ...] = ()
    frames: tuple[int, ...] = ()
    durations: tuple[int, ...] = ()
    warnings: tuple[str, ...] = ()


class Reader(ABC):
    """Turns one output's tokens into stream chunks, and at the end into the skill's result.

    A call that is not streamed goes through the same reader.
    """

    @abstractmethod
    def feed(self, token: Token) -> list[StreamChunk]:
        """What the user sees of ``token``. A final stop id is not fed."""

    @abstractmethod
    def finish(self, finish_reason: FinishReason) -> tuple[list[StreamChunk], dict[str, Any]]:
        """The last chunks and the result. Raises ModelOutputError when there is no honest result."""


class Infer(ABC):
    """What ``Skill.run`` and a family's composition work with. Children inherit deadline, priority and cancellation."""

    tokenizer: TextTokenizer | None
    prompt: PromptFormat | None

    @property
    def is_watched(self) -> bool:
        """Somebody may be shown what is emitted; where not, it need not be made."""
        return True

    @abstractmethod
    async def __call__(self, request: Request) -> list[Completion]:
        """Run ``request``; one completion per ``n``."""

    async def made(self, make: Callable[[], Request]) -> list[Completion]:
        """Run the request that ``make`` gives on a pool thread."""
        return await self(await self.cpu(make))

    @abstractmethod
    def stream(self, request: Request) -> AsyncIterator[Token]:
        """The tokens of ``request`` (``n`` = 1) as they are committed; a sampled stop id included."""

    @abstractmethod
    async def prepare(self, item: MediaItem) -> Prepared:
        """``item`` prepared by the driver on a pool thread."""

    @abstractmethod
    async def run_pass(
        self, name: str, inputs: Sequence[Mapping[str, Any]], media: Sequence[Prepared] = ()
    ) -> list[Any]:
        """Run one of the family's passes over ``inputs``; ``media`` is encoded (or found in the cache) first."""

    @abstractmethod
    async def cpu(self, fn: Callable[[], R]) -> R:
        """``fn()`` on a pool thread."""

    @abstractmethod
    def emit(self, chunk: StreamChunk) -> None:
        """Show ``chunk`` to whoever streams this call; nothing when nobody does."""


class Skill(ABC):
    """A named capability. ``description`` is one line for ``kestrel show``."""

    name: str
    description: str = ""

    @abstractmethod
    def parse(self, inputs: Mapping[str, Any], settings: Settings) -> Call:
        """A validated call. Unknown or missing inputs raise InvalidRequestError naming the valid ones.

        ``settings`` are already checked against ``setting_names`` and filled with defaults.
        """

    @abstractmethod
    def request(self, call: Call, prompt: PromptFormat, tokenizer: TextTokenizer) -> Request:
        """The request of a call whose media are prepared."""

    def setting_names(self) -> frozenset[str] | None:
        """Settings that this skill takes, or None for all."""
        return None

    def settings(self, given: Mapping[str, Any] | Settings | None, defaults: Mapping[str, Any]) -> Settings:
        """Complete settings of a call. A skill with settings of its own overrides this and fills ``extra``."""
        return Settings.from_mapping(given, defaults=defaults, allowed=self.setting_names(), skill=self.name)

    @property
    def is_one_request(self) -> bool:
        """Whether a call is the one request that ``request`` makes; no, where a skill runs calls in its own way."""
        return type(self).run is Skill.run

    async def run(
        self, call: Call, infer: Infer, prompt: PromptFormat, tokenizer: TextTokenizer
    ) -> list[Completion]:
        """Run the call: by default one request, made on a pool thread; completions carry the readers' results."""
        return await infer.made(lambda: self.request(call, prompt, tokenizer))


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """What observers (``kestrel_request_finished``) learn of a finished, failed or aborted request: no prompt text."""

    request_id: str
    model_id: str
    skill: str
    status: str
    error_type: str | None
    finish_reason: FinishReason | None
    metrics: Metrics
    num_media: int = 0
    streamed: bool = False
