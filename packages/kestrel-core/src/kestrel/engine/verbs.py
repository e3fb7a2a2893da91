"""The verbs of one model: what users call, on a handle or (for the default model) on the engine itself.

Written once for both kinds of engine: with ``await`` a verb returns a coroutine, without it the thing itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Generic, Literal, TypeVar, overload

from kestrel.config import Settings

__all__ = ["GivenSettings", "Objects", "SpatialRefs", "Verbs"]

R = TypeVar("R")
S = TypeVar("S")

GivenSettings = Mapping[str, Any] | Settings | None
SpatialRefs = Sequence[Sequence[float]] | None
Objects = str | Sequence[str]


class Verbs(ABC, Generic[R, S]):
    """The built-in skills as methods. Each gives an ``EngineResult`` (R), or with ``stream=True`` a stream (S).

    Every verb raises InvalidRequestError (or InvalidMediaError) for what the caller got wrong, CapacityError,
    EngineBusyError, RequestTimeoutError, ModelFaultError, ModelOutputError or EngineStoppedError. An input that is
    None counts as not given.
    """

    @abstractmethod
    def run(self, skill: str, inputs: Mapping[str, Any], settings: GivenSettings = None) -> R:
        """The result of any skill, a plugin's included, by name."""

    @abstractmethod
    def start_stream(self, skill: str, inputs: Mapping[str, Any], settings: GivenSettings = None) -> S:
        """A stream of any skill by name."""

    def stream(self, skill: str, settings: GivenSettings = None, **inputs: Any) -> S:
        """A stream of any skill by name, its inputs as keywords."""
        return self.start_stream(skill, inputs, settings)

    def _do(self, skill: str, stream: bool, settings: GivenSettings, inputs: Mapping[str, Any]) -> R | S:
        if stream:
            return self.start_stream(skill, inputs, settings)
        return self.run(skill, inputs, settings)

    @overload
    def query(
        self,
        image: Any = None,
        question: str | None = None,
        reasoning: bool | None = None,
        spatial_refs: SpatialRefs = None,
        stream: Literal[False] = False,
        settings: GivenSettings = None,
        *,
        video: Any = None,
    ) -> R: ...

    @overload
    def query(
        self,
        image: Any = None,
        question: str | None = None,
        reasoning: bool | None = None,
        spatial_refs: SpatialRefs = None,
        *,
        stream: Literal[True],
        settings: GivenSettings = None,
        video: Any = None,
    ) -> S: ...

    def query(
        self,
        image: Any = None,
        question: str | None = None,
        reasoning: bool | None = None,
        spatial_refs: SpatialRefs = None,
        stream: bool = False,
        settings: GivenSettings = None,
        *,
        video: Any = None,
    ) -> R | S:
        """Answer ``question`` about ``image`` (one, a list, or none) or ``video``: output ``{"answer"}``.

        With ``reasoning`` on, ``"reasoning"`` holds its text and grounding.
        """
        return self._do(
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
    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        reasoning: bool | None = None,
        stream: Literal[False] = False,
        settings: GivenSettings = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> R: ...

    @overload
    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        reasoning: bool | None = None,
        *,
        stream: Literal[True],
        settings: GivenSettings = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> S: ...

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        reasoning: bool | None = None,
        stream: bool = False,
        settings: GivenSettings = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> R | S:
        """The next message of an OpenAI-style conversation: output ``{"message", "finish_reason"}``."""
        return self._do(
            "chat", stream, settings, {"messages": messages, "tools": tools, "reasoning": reasoning}
        )

    @overload
    def generate(self, prompt: Any, stream: Literal[False] = False, settings: GivenSettings = None) -> R: ...

    @overload
    def generate(self, prompt: Any, *, stream: Literal[True], settings: GivenSettings = None) -> S: ...

    def generate(self, prompt: Any, stream: bool = False, settings: GivenSettings = None) -> R | S:
        """Continue ``prompt`` (a string, or parts) as it is, no template: output ``{"text", "token_ids"}``."""
        return self._do("generate", stream, settings, {"prompt": prompt})

    @overload
    def caption(
        self,
        image: Any,
        length: Literal["short", "normal", "long"] = "normal",
        stream: Literal[False] = False,
        settings: GivenSettings = None,
    ) -> R: ...

    @overload
    def caption(
        self,
        image: Any,
        length: Literal["short", "normal", "long"] = "normal",
        *,
        stream: Literal[True],
        settings: GivenSettings = None,
    ) -> S: ...

    def caption(
        self,
        image: Any,
        length: Literal["short", "normal", "long"] = "normal",
        stream: bool = False,
        settings: GivenSettings = None,
    ) -> R | S:
        """Describe ``image``: output ``{"caption"}``."""
        return self._do("caption", stream, settings, {"image": image, "length": length})

    @overload
    def point(
        self,
        image: Any,
        object: Objects,
        spatial_refs: SpatialRefs = None,
        stream: Literal[False] = False,
        settings: GivenSettings = None,
    ) -> R: ...

    @overload
    def point(
        self,
        image: Any,
        object: Objects,
        spatial_refs: SpatialRefs = None,
        *,
        stream: Literal[True],
        settings: GivenSettings = None,
    ) -> S: ...

    def point(
        self,
        image: Any,
        object: Objects,
        spatial_refs: SpatialRefs = None,
        stream: bool = False,
        settings: GivenSettings = None,
    ) -> R | S:
        """Where each ``object`` is: output ``{"points": [{"x", "y"}]}``, 0–1 of the upright original."""
        return self._do(
            "point", stream, settings, {"image": image, "object": object, "spatial_refs": spatial_refs}
        )

    @overload
    def detect(
        self, image: Any, object: Objects, stream: Literal[False] = False, settings: GivenSettings = None
    ) -> R: ...

    @overload
    def detect(
        self, image: Any, object: Objects, *, stream: Literal[True], settings: GivenSettings = None
    ) -> S: ...

    def detect(
        self, image: Any, object: Objects, stream: bool = False, settings: GivenSettings = None
    ) -> R | S:
        """Boxes around each ``object``: output ``{"objects": [{"x_min", "y_min", "x_max", "y_max"}]}``."""
        return self._do("detect", stream, settings, {"image": image, "object": object})

    @overload
    def segment(
        self,
        image: Any,
        object: Objects,
        spatial_refs: SpatialRefs = None,
        stream: Literal[False] = False,
        settings: GivenSettings = None,
    ) -> R: ...

    @overload
    def segment(
        self,
        image: Any,
        object: Objects,
        spatial_refs: SpatialRefs = None,
        *,
        stream: Literal[True],
        settings: GivenSettings = None,
    ) -> S: ...

    def segment(
        self,
        image: Any,
        object: Objects,
        spatial_refs: SpatialRefs = None,
        stream: bool = False,
        settings: GivenSettings = None,
    ) -> R | S:
        """Outlines of each ``object``: output ``{"segments": [{"svg_path", "bbox", …}]}``."""
        return self._do(
            "segment", stream, settings, {"image": image, "object": object, "spatial_refs": spatial_refs}
        )

    @overload
    def transcribe(
        self,
        audio: Any,
        timestamps: str = "segment",
        stream: Literal[False] = False,
        settings: GivenSettings = None,
        **options: Any,
    ) -> R: ...

    @overload
    def transcribe(
        self,
        audio: Any,
        timestamps: str = "segment",
        *,
        stream: Literal[True],
        settings: GivenSettings = None,
        **options: Any,
    ) -> S: ...

    def transcribe(
        self,
        audio: Any,
        timestamps: str = "segment",
        stream: bool = False,
        settings: GivenSettings = None,
        **options: Any,
    ) -> R | S:
        """The words of ``audio``: output ``{"text", "language", "duration_seconds", "segments"}``."""
        inputs = {"audio": audio, "timestamps": timestamps} | options
        return self._do("transcribe", stream, settings, inputs)
