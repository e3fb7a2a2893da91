"""Toy drivers that tests slow down, hold up and break while an engine runs them."""

from __future__ import annotations

import hashlib
import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from kestrel.spi import AudioItem, Batch, FloatsItem, ImageItem, MediaItem, MediaSpec
from kestrel.testing.fakes import ByteTokenizer
from kestrel.testing.toys import FakeTokenDriver, ToyHybrid, ToyStep
from kestrel.types import Prepared

__all__ = ["ALPHABET", "DRIVERS", "IMAGE_POSITIONS", "ToyControls"]

ALPHABET = "abcdefghijklmnopqrstuvwxyz"
IMAGE_POSITIONS = 4
_MEDIA = tuple(MediaSpec(kind=kind) for kind in ("image", "point", "box"))


@dataclass(slots=True)
class ToyControls:
    """What tests do to a toy while it runs. Launches wait for ``gate``, last ``delay_s``, and raise ``failure``;
    preparing media waits for ``prepare_gate``. Counts say what happened."""

    delay_s: float = 0.0
    failure: Exception | None = None
    encoder_failure: Exception | None = None
    launches: int = 0
    encoded: int = 0
    prepared: int = 0
    gate: threading.Event = field(default_factory=threading.Event)
    prepare_gate: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.gate.set()
        self.prepare_gate.set()

    def launch(self) -> None:
        """A forward pass begins."""
        self.launches += 1
        self.gate.wait()
        time.sleep(self.delay_s)
        if self.failure is not None:
            raise self.failure

    def encode(self, count: int) -> None:
        """An encoder launch begins."""
        self.encoded += count
        if self.encoder_failure is not None:
            raise self.encoder_failure

    def prepare(self) -> None:
        """An item is being prepared."""
        self.prepare_gate.wait()
        self.prepared += 1


class _Talk(FakeTokenDriver):
    def __init__(self, tokenizer: ByteTokenizer, controls: ToyControls, max_positions: int) -> None:
        end = tokenizer.token_id("<eos>")
        assert end is not None
        letters = [*ALPHABET.encode(), end]
        after = dict(itertools.pairwise(letters))
        super().__init__(
            tokenizer.vocab_size, max_positions=max_positions, follows=lambda i: after.get(i, letters[0])
        )
        self.spec = replace(self.spec, media=_MEDIA, eos_ids=frozenset({end}))
        self.tokenizer, self._controls = tokenizer, controls

    def prepare(self, item: MediaItem, settings: Mapping[str, Any]) -> Prepared:
        return _prepared(item, self._controls)

    def encode(self, kind: str, packed: Sequence[Prepared]) -> torch.Tensor:
        self._controls.encode(len(packed))
        return torch.zeros(sum(item.num_positions for item in packed), self.spec.hidden_size)

    def forward(self, batch: Batch, x_TC: torch.Tensor) -> torch.Tensor:
        self._controls.launch()
        return super().forward(batch, x_TC)


class _Hybrid(ToyHybrid):
    def __init__(self, tokenizer: ByteTokenizer, controls: ToyControls, max_positions: int) -> None:
        super().__init__(vocab_size=tokenizer.vocab_size, max_positions=max_positions)
        self.spec = replace(self.spec, media=_MEDIA)
        self.tokenizer, self._controls = tokenizer, controls

    def prepare(self, item: MediaItem, settings: Mapping[str, Any]) -> Prepared:
        return _prepared(item, self._controls)

    def encode(self, kind: str, packed: Sequence[Prepared]) -> torch.Tensor:
        self._controls.encode(len(packed))
        return super().encode(kind, packed)

    def forward(self, batch: Batch, x_TC: torch.Tensor) -> torch.Tensor:
        self._controls.launch()
        return super().forward(batch, x_TC)


class _Step(ToyStep):
    def __init__(self, tokenizer: ByteTokenizer, controls: ToyControls, max_positions: int) -> None:
        super().__init__(max_units=max_positions)
        self.tokenizer, self._controls = tokenizer, controls

    def prepare(self, item: MediaItem, settings: Mapping[str, Any]) -> Prepared:
        return _prepared(item, self._controls)

    def step(self, states: Sequence[Any]) -> list[Any]:
        self._controls.launch()
        return super().step(states)


DRIVERS: Mapping[str, Callable[[ByteTokenizer, ToyControls, int], _Talk | _Hybrid | _Step]] = {
    "talk": _Talk,
    "hybrid": _Hybrid,
    "step": _Step,
}


def _prepared(item: MediaItem, controls: ToyControls) -> Prepared:
    """Rows of three numbers: four bands of a picture, the samples of a clip, or the numbers of a reference."""
    controls.prepare()
    match item:
        case ImageItem(pixels=pixels):
            rows = np.linspace(0, len(pixels) - 1, IMAGE_POSITIONS).astype(int)
            numbers = pixels[rows].mean(axis=1) / 255
        case AudioItem(samples=samples):
            numbers = np.stack([samples, samples, samples], axis=1)
        case FloatsItem(values=values):
            numbers = np.array([[*values, 0.0][:3]])
        case _:
            raise AssertionError(f"the toy takes no {item.kind}")
    x = torch.from_numpy(np.ascontiguousarray(numbers, dtype=np.float32))
    digest = hashlib.sha256(f"{item.kind} {numbers.shape}".encode() + x.numpy().tobytes()).digest()
    return Prepared(
        kind=item.kind,
        digest=digest,
        num_positions=len(x),
        tensors={"x": x},
        meta={"rows": len(x), **item.meta},
    )
