"""The verbs of one model: what users call, on a handle or (for the default model) on the engine itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal, overload

from kestrel.config import Settings
from kestrel.engine.streams import EngineStream
from kestrel.types import EngineResult

__all__ = ["GivenSettings", "Objects", "SpatialRefs", "Verbs", "given_inputs"]

GivenSettings = Mapping[str, Any] | Settings | None
SpatialRefs = Sequence[Sequence[float]] | None
Objects = str | Sequence[str]


class Verbs(ABC):
    """The built-in skills as methods. Each returns an ``EngineResult``, or with ``stream=True`` an ``EngineStream``.

    Every verb raises InvalidRequestError (or InvalidMediaError) for what the caller got wrong, CapacityError,
    EngineBusyError, RequestTimeoutError, ModelFaultError, ModelOutputError or EngineStoppedError.
    """

    @abstractmethod
    async def run(
        self, skill: str, inputs: Mapping[str, Any], settings: GivenSettings = None
    ) -> EngineResult:
        """Run any skill, a plugin's included, by name."""

    @abstractmethod
    async def start_stream(
        self, skill: str, inputs: Mapping[str, Any], settings: GivenSettings = None
    ) -> EngineStream:
        """Stream any skill by name."""

    async def _do(
        self, skill: str, stream: bool, settings: GivenSettings, inputs: Mapping[str, Any]
    ) -> EngineResult | EngineStream:
        given = given_inputs(inputs)
        if stream:
            return await self.start_stream(skill, given, settings)
        return await self.run(skill, given, settings)

    @overload
    async def query(
        self,
        image: Any = None,
        question: str | None = None,
        reasoning: bool | None = None,
        spatial_refs: SpatialRefs = None,
        stream: Literal[False] = False,
        settings: GivenSettings = None,
        *,
        video: Any = None,
    ) -> EngineResult: ...

    @overload
    async def query(
        self,
        image: Any = None,
        question: str | None = None,
        reasoning: bool | None = None,
        spatial_refs: SpatialRefs = None,
        *,
        stream: Literal[True],
        settings: GivenSettings = None,
        video: Any = None,
    ) -> EngineStream: ...

    async def query(
        self,
        image: Any = None,
        question: str | None = None,
        reasoning: bool | None = None,
        spatial_refs: SpatialRefs = None,
        stream: bool = False,
        settings: GivenSettings = None,
        *,
        video: Any = None,
    ) -> EngineResult | EngineStream:
        """Answer ``question`` about ``image`` (one, a list, or none) or ``video``: output ``{"answer"}``.

        With ``reasoning`` on, ``"reasoning"`` holds its text and grounding.
        """
        return await self._do(
            "query",
            stream,
            settings,
            {
                "image": image,
                "question": question,
                "spatial_refs": spatial_refs,
                "video": video,
                "reasoning": reasoning,
            },
        )

    @overload
    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        reasoning: bool | None = None,
        stream: Literal[False] = False,
        settings: GivenSettings = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> EngineResult: ...

    @overload
    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        reasoning: bool | None = None,
        *,
        stream: Literal[True],
        settings: GivenSettings = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> EngineStream: ...

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        reasoning: bool | None = None,
        stream: bool = False,
        settings: GivenSettings = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> EngineResult | EngineStream:
        """The next message of an OpenAI-style conversation: output ``{"message", "finish_reason"}``."""
        return await self._do(
            "chat", stream, settings, {"messages": messages, "tools": tools, "reasoning": reasoning}
        )

    @overload
    async def generate(
        self, prompt: Any, stream: Literal[False] = False, settings: GivenSettings = None
    ) -> EngineResult: ...

    @overload
    async def generate(
        self, prompt: Any, *, stream: Literal[True], settings: GivenSettings = None
    ) -> EngineStream: ...

    async def generate(
        self, prompt: Any, stream: bool = False, settings: GivenSettings = None
    ) -> EngineResult | EngineStream:
        """Continue ``prompt`` (a string, or parts) as it is, no template: output ``{"text", "token_ids"}``."""
        return await self._do("generate", stream, settings, {"prompt": prompt})

    @overload
    async def caption(
        self,
        image: Any,
        length: Literal["short", "normal", "long"] = "normal",
        stream: Literal[False] = False,
        settings: GivenSettings = None,
    ) -> EngineResult: ...

    @overload
    async def caption(
        self,
        image: Any,
        length: Literal["short", "normal", "long"] = "normal",
        *,
        stream: Literal[True],
        settings: GivenSettings = None,
    ) -> EngineStream: ...

    async def caption(
        self,
        image: Any,
        length: Literal["short", "normal", "long"] = "normal",
        stream: bool = False,
        settings: GivenSettings = None,
    ) -> EngineResult | EngineStream:
        """Describe ``image``: output ``{"caption"}``."""
        return await self._do("caption", stream, settings, {"image": image, "length": length})

    @overload
    async def point(
        self,
        image: Any,
        object: Objects,
        spatial_refs: SpatialRefs = None,
        stream: Literal[False] = False,
        settings: GivenSettings = None,
    ) -> EngineResult: ...

    @overload
    async def point(
        self,
        image: Any,
        object: Objects,
        spatial_refs: SpatialRefs = None,
        *,
        stream: Literal[True],
        settings: GivenSettings = None,
    ) -> EngineStream: ...

    async def point(
        self,
        image: Any,
        object: Objects,
        spatial_refs: SpatialRefs = None,
        stream: bool = False,
        settings: GivenSettings = None,
    ) -> EngineResult | EngineStream:
        """Where each ``object`` is: output ``{"points": [{"x", "y"}]}``, 0–1 of the upright original."""
        return await self._do(
            "point", stream, settings, {"image": image, "object": object, "spatial_refs": spatial_refs}
        )

    @overload
    async def detect(
        self, image: Any, object: Objects, stream: Literal[False] = False, settings: GivenSettings = None
    ) -> EngineResult: ...

    @overload
    async def detect(
        self, image: Any, object: Objects, *, stream: Literal[True], settings: GivenSettings = None
    ) -> EngineStream: ...

    async def detect(
        self, image: Any, object: Objects, stream: bool = False, settings: GivenSettings = None
    ) -> EngineResult | EngineStream:
        """Boxes around each ``object``: output ``{"objects": [{"x_min", "y_min", "x_max", "y_max"}]}``."""
        return await self._do("detect", stream, settings, {"image": image, "object": object})

    @overload
    async def segment(
        self,
        image: Any,
        object: Objects,
        spatial_refs: SpatialRefs = None,
        stream: Literal[False] = False,
        settings: GivenSettings = None,
    ) -> EngineResult: ...

    @overload
    async def segment(
        self,
        image: Any,
        object: Objects,
        spatial_refs: SpatialRefs = None,
        *,
        stream: Literal[True],
        settings: GivenSettings = None,
    ) -> EngineStream: ...

    async def segment(
        self,
        image: Any,
        object: Objects,
        spatial_refs: SpatialRefs = None,
        stream: bool = False,
        settings: GivenSettings = None,
    ) -> EngineResult | EngineStream:
        """Outlines of each ``object``: output ``{"segments": [{"svg_path", "bbox", …}]}``."""
        return await self._do(
            "segment", stream, settings, {"image": image, "object": object, "spatial_refs": spatial_refs}
        )

    async def transcribe(
        self,
        audio: Any,
        timestamps: str = "segment",
        stream: bool = False,
        settings: GivenSettings = None,
        **options: Any,
    ) -> EngineResult | EngineStream:
        """The words of ``audio``: output ``{"text", "language", "duration_seconds", "segments"}``."""
        inputs = {"audio": audio, "timestamps": timestamps} | options
        return await self._do("transcribe", stream, settings, inputs)


def given_inputs(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs that were given; ``reasoning`` stays, since its None means the family's default."""
    return {name: value for name, value in inputs.items() if value is not None or name == "reasoning"}
