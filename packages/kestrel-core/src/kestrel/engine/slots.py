"""One model of an engine, loaded or not."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from enum import Enum

import torch

from kestrel.config import RuntimeConfig
from kestrel.engine.loaded import LoadedModel
from kestrel.engine.loading import Blueprint
from kestrel.spi import ModelInfo

__all__ = ["Phase", "Slot"]


class Phase(Enum):
    """Where a model is."""

    UNLOADED = "unloaded"
    READY = "ready"
    STOPPED = "stopped"


@dataclass(slots=True, eq=False, kw_only=True)
class Slot:
    """A model's place in the engine. ``num_users``: calls that have or await it. ``model`` is None unless READY.

    ``loading`` is the task that loads it, for all who wait for it.
    """

    config: RuntimeConfig
    blueprint: Blueprint
    device: torch.device
    phase: Phase = Phase.UNLOADED
    model: LoadedModel | None = None
    loading: asyncio.Task[None] | None = None
    num_users: int = 0
    used_at: float = 0.0
    idle_timer: asyncio.TimerHandle | None = None

    @property
    def model_id(self) -> str:
        """The id that users type."""
        return self.blueprint.card.model_id

    @property
    def info(self) -> ModelInfo:
        """What the family says of the checkpoint."""
        return self.blueprint.info

    @property
    def skills(self) -> tuple[str, ...]:
        """Skills of the model."""
        return self.blueprint.info.skills

    def stop_clock(self) -> None:
        """Forget the time at which an idle model would be unloaded."""
        if self.idle_timer is not None:
            self.idle_timer.cancel()
            self.idle_timer = None
