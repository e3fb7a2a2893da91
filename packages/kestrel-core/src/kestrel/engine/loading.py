"""From a ``RuntimeConfig`` to what is known of its checkpoint before any tensor is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from kestrel.config import Environment, RuntimeConfig
from kestrel.errors import InvalidRequestError, KestrelError, LoadError
from kestrel.hub import resolve_model
from kestrel.loading import read_card
from kestrel.plugins import PluginHost
from kestrel.spi import ModelCard, ModelFamily, ModelInfo

__all__ = ["Blueprint", "ProgressReport", "survey"]

ProgressReport = Callable[[str, int, int], None]
"""Called from worker threads as ``progress(stage, done, total)``; "download NAME" and "load" count bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blueprint:
    """A checkpoint and the family that builds it."""

    config: RuntimeConfig
    card: ModelCard
    family: ModelFamily
    info: ModelInfo
    tokenizer_path: Path
    note: str = ""


def survey(config: RuntimeConfig, host: PluginHost, progress: ProgressReport | None = None) -> Blueprint:
    """Where the model is, what it is, and whose it is. Downloads if needed; reads headers only.

    Raises UnknownModelError, LoadError or PluginError, InvalidRequestError for a setting that the model cannot have.
    """
    if config.adapters:
        raise InvalidRequestError("adapters are not supported yet; leave the setting adapters out")
    offline = config.offline or Environment.read().offline
    located = resolve_model(config, host, offline=offline, progress=progress)
    card = read_card(located.model_id, located.path, revision=located.revision)
    family = host.match(card)
    if config.tokenizer_path is not None:
        tokenizer_path = Path(config.tokenizer_path)
    elif (elsewhere := family.tokenizer(card)) is not None:
        wanted = replace(config, model=elsewhere, model_path=None, revision=None)
        tokenizer_path = resolve_model(wanted, host, offline=offline, progress=progress).path
    else:
        tokenizer_path = card.directory
    info = _described(family, card)
    if config.max_model_len is not None and config.max_model_len > info.max_context:
        raise InvalidRequestError(
            f"max_model_len is {config.max_model_len}; {card.model_id} has a context of {info.max_context}. Lower it."
        )
    return Blueprint(
        config=config,
        card=card,
        family=family,
        info=info,
        tokenizer_path=tokenizer_path,
        note=located.note,
    )


def _described(family: ModelFamily, card: ModelCard) -> ModelInfo:
    try:
        info = family.describe(card)
        if not isinstance(info, ModelInfo):
            raise TypeError(f"describe gave a {type(info).__name__}, not a ModelInfo")
        return info
    except KestrelError:
        raise
    except Exception as error:  # a family is a plugin: what it trips over is a config it cannot read
        raise LoadError(
            f"family {family.name!r} cannot describe {card.model_id!r}: {type(error).__name__}: {error}. "
            "Its config.json may be damaged or of a kind that the family does not know"
        ) from error
