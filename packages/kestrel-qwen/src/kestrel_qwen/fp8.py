"""Block FP8 checkpoints as floats: each tensor of 8-bit floats times one scale per block of rows and columns."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType

import torch

from kestrel.errors import LoadError
from kestrel.spi import TensorInfo, WeightReader

__all__ = ["BlockFloats", "dequantised"]

log = logging.getLogger(__name__)
SCALE = "_scale_inv"  # what a tensor's scales are called: its own name and this
EIGHT_BITS = ("F8_E4M3", "F8_E5M2")


class BlockFloats:
    """A ``WeightReader`` over ``reader`` in which 8-bit tensors and their scales appear as one float tensor each."""

    def __init__(self, reader: WeightReader, block: tuple[int, int]) -> None:
        self._reader, self._block = reader, block
        self._packed = {n for n, info in reader.tensors.items() if info.dtype in EIGHT_BITS}
        scales = {name + SCALE for name in self._packed}
        if absent := sorted(scales - reader.tensors.keys()):
            raise LoadError(
                f"{len(absent)} FP8 tensors have no scales; {absent[0]!r} is one that is missing. "
                "Download the checkpoint again",
                missing=absent,
            )
        kept = {name: info for name, info in reader.tensors.items() if name not in scales}
        floats = {name: replace(kept[name], dtype="F32") for name in self._packed}
        self._tensors = MappingProxyType(kept | floats)
        log.info(
            "%d FP8 tensors are used as 16 or 32 bit floats: no kernel here multiplies by blocks of %d × %d",
            len(self._packed), *block,
        )  # fmt: skip

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._tensors

    def names(self) -> Iterator[str]:
        return iter(self._tensors)

    def get(self, name: str) -> torch.Tensor:
        if name not in self._packed:
            return self._reader.get(name)
        weight, scale = self._reader.get(name), self._reader.get(name + SCALE)
        wanted = (
            *weight.shape[:-2],
            *(-(-n // b) for n, b in zip(weight.shape[-2:], self._block, strict=True)),
        )
        if weight.ndim < 2 or tuple(scale.shape) != wanted:
            raise LoadError(
                f"{name + SCALE!r} is {list(scale.shape)}; {list(weight.shape)} in blocks of {list(self._block)} needs "
                f"{list(wanted)}. Config and weights may be of different checkpoints",
                misshapen=[name + SCALE],
            )
        return dequantised(weight, scale, self._block)


def dequantised(weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """``weight`` [..., N, K] of 8-bit floats as float32: times ``scale`` [..., N / rows, K / columns], rounded up."""
    rows, columns = weight.shape[-2:]
    each = scale.float().repeat_interleave(block[0], -2).repeat_interleave(block[1], -1)
    return weight.float() * each[..., :rows, :columns]
