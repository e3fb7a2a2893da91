"""What point, detect and segment share: one request per object asked for, results merged in their order."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from kestrel.config import Settings
from kestrel.errors import InvalidRequestError, PluginError
from kestrel.skills.acceptors import ObjectLimit
from kestrel.skills.inputs import check_names, is_list, one_image, spatial_refs, text
from kestrel.skills.readers import ObjectReader
from kestrel.skills.text import LIMITS, MEDIA, SAMPLING
from kestrel.spi.prompt import Parser
from kestrel.spi.skill import Call, Completion, Infer, Request, Skill
from kestrel.types import FinishReason

if TYPE_CHECKING:
    from kestrel.spi.family import TextTokenizer
    from kestrel.spi.prompt import PromptFormat

__all__ = ["ObjectSkill"]

MAX_OBJECTS = 50  # design: the default of every spatial skill
MAX_NAMES = 64


class ObjectSkill(Skill):
    """A skill that finds objects by name. ``key`` names its result; ``with_places``: it takes spatial references.

    ``Call.values``: ``object``, one name. When a list was given, ``objects`` holds all of it and each result carries
    its ``label``. Media: one image, then spatial references.
    """

    key: ClassVar[str]
    with_places: ClassVar[bool] = True

    def parse(self, inputs: Mapping[str, Any], settings: Settings) -> Call:
        names = ("image", "object", "spatial_refs") if self.with_places else ("image", "object")
        check_names(self.name, inputs, names)
        media = (*one_image(self.name, inputs.get("image")), *spatial_refs(inputs.get("spatial_refs")))
        values = _names(inputs.get("object"))
        return Call(skill=self.name, values=values, media=media, settings=settings)

    def request(self, call: Call, prompt: PromptFormat, tokenizer: TextTokenizer) -> Request:
        limit = call.settings.max_objects or MAX_OBJECTS
        label = call.values["object"] if "objects" in call.values else None

        def parser() -> Parser:
            found = prompt.parser(self.name, call)
            if found is None:
                raise PluginError(f"the model's family lists {self.name} and gives no parser for it; it must")
            return found

        decoding = prompt.decoding(self.name, call)
        return Request(
            segments=tuple(prompt.segments(self.name, call)),
            decoding=replace(decoding, acceptors=(lambda: ObjectLimit(parser(), limit), *decoding.acceptors)),
            settings=call.settings,
            reader=lambda: ObjectReader(parser(), self.key, limit, label),
        )

    def setting_names(self) -> frozenset[str]:
        return SAMPLING | LIMITS | MEDIA | {"max_objects"}

    async def run(
        self, call: Call, infer: Infer, prompt: PromptFormat, tokenizer: TextTokenizer
    ) -> list[Completion]:
        names: Sequence[str] = call.values.get("objects", (call.values["object"],))
        calls = [replace(call, values={**call.values, "object": name}) for name in names]
        requests = await infer.cpu(lambda: [self.request(one, prompt, tokenizer) for one in calls])
        per_name = await _all_of(infer, requests)
        return [_merged(self.key, choice) for choice in zip(*per_name, strict=True)]


def _names(value: Any) -> dict[str, Any]:
    if not is_list(value):
        return {"object": text("object", value)}
    if not 0 < len(value) <= MAX_NAMES:
        raise InvalidRequestError(f"object lists {len(value)} names; give 1 to {MAX_NAMES}")
    names = tuple(text(f"object[{place}]", name) for place, name in enumerate(value))
    if len(set(names)) < len(names):
        raise InvalidRequestError(f"object lists a name twice: {list(names)}; give each once")
    return {"object": names[0], "objects": names}


async def _all_of(infer: Infer, requests: Sequence[Request]) -> list[list[Completion]]:
    """Completions of all requests, run together; when one fails, the rest are cancelled."""
    tasks = [asyncio.ensure_future(infer(request)) for request in requests]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _merged(key: str, parts: Sequence[Completion]) -> Completion:
    """One output of several names: objects in the order of the names, tokens one after the other."""
    if len(parts) == 1:
        return parts[0]
    reasons = {part.finish_reason for part in parts}
    reason: FinishReason = (
        "cancelled" if "cancelled" in reasons else "length" if "length" in reasons else "stop"
    )
    return replace(
        parts[0],
        tokens=tuple(token for part in parts for token in part.tokens),
        finish_reason=reason,
        output={key: [found for part in parts for found in part.output[key]]},
    )
