"""A whole engine around a model that costs nothing: for tests of what lies between a user and a model.

``ToyFamily`` loads checkpoints that ``write_toy`` makes; ``toy_host`` is the plugin host that knows it. A checkpoint
names its driver: "talk" (says the alphabet, whatever was asked), "hybrid" (``ToyHybrid``: every kind of state, answers
that depend on the whole prompt) or "step" (``ToyStep``). ``ToyControls`` slow them down, hold them up and break them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from kestrel.loading import load_weights
from kestrel.plugins import PluginHost
from kestrel.skills import builtin_skills
from kestrel.spi import (
    VERSION,
    BuildContext,
    Built,
    Call,
    Composition,
    Decoding,
    Match,
    ModelCard,
    ModelFamily,
    ModelInfo,
    RequestRecord,
    SinglePassDriver,
    Skill,
    Static,
    TinyCheckpoint,
    TokenSet,
    hookimpl,
)
from kestrel.testing.controlled import ALPHABET, DRIVERS, IMAGE_POSITIONS, ToyControls
from kestrel.testing.fakes import ByteTokenizer, EchoPromptFormat

__all__ = ["ALPHABET", "IMAGE_POSITIONS", "ToyControls", "ToyFamily", "ToyPrompts", "toy_host", "write_toy"]


class ToyPrompts(EchoPromptFormat):
    """Prompts that spell calls out; ``compositions`` by skill, whose names are skills of the model too."""

    def __init__(
        self,
        tokenizer: ByteTokenizer,
        compositions: Mapping[str, Composition],
        defaults: Mapping[str, Any] | None = None,
        skills: Sequence[str] = (),
    ) -> None:
        super().__init__(tokenizer, defaults)
        self.skills = self.skills | {*compositions, *skills}
        self._compositions = dict(compositions)
        control = [i for i in range(256, tokenizer.vocab_size) if i != self._id("<eos>")]
        self._no_control = Static(allowed=TokenSet.of(control).but())

    def decoding(self, skill: str, call: Call) -> Decoding:
        return replace(super().decoding(skill, call), rules=(self._no_control,))

    def validate(self, skill: str, call: Call) -> None:
        self.require(skill)

    def run(self, skill: str) -> Composition | None:
        return self._compositions.get(skill)


class _Weights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 3)
        self.second = nn.Linear(3, 2)


class ToyFamily(ModelFamily):
    """Checkpoints whose config.json says ``"model_type": "toy"``. ``controls`` has those of each model by id.

    ``compositions``, ``skills`` (further names) and ``passes`` are what its models can do beyond the built-in skills.
    """

    name = "toy"

    def __init__(
        self,
        *,
        compositions: Mapping[str, Composition] | None = None,
        skills: Sequence[str] = (),
        passes: Mapping[str, SinglePassDriver] | None = None,
        defaults: Mapping[str, Any] | None = None,
    ) -> None:
        self.compositions = dict(compositions or {})
        self.more_skills = tuple(skills)
        self.passes = dict(passes or {})
        self.defaults = dict(defaults or {"temperature": 0.0})
        self.controls: dict[str, ToyControls] = {}
        self.num_built = 0

    def match(self, card: ModelCard) -> Match | None:
        return Match() if card.config.get("model_type") == "toy" else None

    def describe(self, card: ModelCard) -> ModelInfo:
        return ModelInfo(
            family=self.name,
            architecture=f"toy that can {card.config['driver']}",
            skills=tuple(sorted(self._prompts().skills)),
            num_parameters=sum(math.prod(tensor.shape) for tensor in card.tensors.values()),
            max_context=int(card.config["max_positions"]),
        )

    def build(self, card: ModelCard, ctx: BuildContext) -> Built:
        with torch.device("meta"):
            weights = _Weights()
        load_weights(weights, ctx.weights, device=ctx.device, dtype=ctx.dtype)
        self.num_built += 1
        controls = self.controls.setdefault(card.model_id, ToyControls())
        driver = DRIVERS[card.config["driver"]](ByteTokenizer(), controls, card.config["max_positions"])
        return Built(main=driver, prompt=self._prompts(), passes=self.passes)

    def tiny(self) -> TinyCheckpoint:
        def write(directory: Path, seed: int) -> None:
            write_toy(directory, driver="hybrid", seed=seed)

        return TinyCheckpoint(write=write)

    def _prompts(self) -> ToyPrompts:
        return ToyPrompts(ByteTokenizer(), self.compositions, self.defaults, self.more_skills)


def write_toy(
    directory: Path, *, driver: str = "talk", max_positions: int = 1024, seed: int = 0, shards: int = 1
) -> Path:
    """``directory``, made and filled with a toy checkpoint in Hub layout, in one file or two."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {"model_type": "toy", "driver": driver, "max_positions": max_positions}
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    generator = torch.Generator().manual_seed(seed)
    shapes = {name: tensor.shape for name, tensor in _Weights().state_dict().items()}
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    if shards == 1:
        save_file(tensors, directory / "model.safetensors")
        return directory
    for at, part in enumerate(("first", "second"), start=1):
        some = {name: tensor for name, tensor in tensors.items() if name.startswith(part)}
        save_file(some, directory / f"model-{at:05}-of-00002.safetensors")
    return directory


def toy_host(
    family: ToyFamily,
    *,
    skills: Sequence[Skill] = (),
    observe: Callable[[RequestRecord], None] | None = None,
) -> PluginHost:
    """A host that knows ``family``, the built-in skills and ``skills``; ``observe`` gets every ended request."""

    @hookimpl
    def kestrel_model_families() -> list[ModelFamily]:
        return [family]

    @hookimpl
    def kestrel_skills() -> list[Skill]:
        return list(skills)

    @hookimpl
    def kestrel_request_finished(record: RequestRecord) -> None:
        if observe is not None:
            observe(record)

    plugin = SimpleNamespace(
        KESTREL_SPI_VERSION=VERSION,
        kestrel_model_families=kestrel_model_families,
        kestrel_skills=kestrel_skills,
        kestrel_request_finished=kestrel_request_finished,
    )
    return PluginHost.from_modules({"toy": plugin}, skills=builtin_skills())
