"""Completions of a call as its ``EngineResult``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kestrel.engine.scope import CallScope
from kestrel.spi import Call, Completion
from kestrel.types import EngineResult, TokenLogprobs

__all__ = ["composed", "engine_result"]

_CERTAIN = TokenLogprobs(logprob=0.0)  # a forced token: nothing else could follow


def composed(made: Mapping[str, Any] | Completion, call: Call, scope: CallScope) -> Completion:
    """What a family's composition made as one completion. A mere output ended as its requests did, taken together."""
    if isinstance(made, Completion):
        return made
    return Completion(
        output=dict(made),
        finish_reason=scope.finish_reason(),
        seed=scope.seed,
        media=tuple(item.meta for item in call.prepared),
    )


def engine_result(
    completions: Sequence[Completion], scope: CallScope, warnings: tuple[str, ...]
) -> EngineResult:
    """The result of a call with these outputs."""
    first = completions[0]
    return EngineResult(
        output=first.output,
        outputs=tuple(completion.output for completion in completions),
        finish_reason=first.finish_reason,
        metrics=scope.total(),
        request_id=scope.request_id,
        seed=scope.seed,
        model_id=scope.model_id,
        tokens=tuple(token.id for token in first.tokens),
        logprobs=tuple(t.logprobs or _CERTAIN for t in first.tokens) if scope.settings.logprobs else None,
        media=first.media,
        warnings=(*warnings, *(w for completion in completions for w in completion.warnings)),
    )
