"""Fills ``MoondreamModel`` from a checkpoint of either layout; 4-bit linears become floats."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType

import torch

from kestrel.errors import LoadError
from kestrel.layers import pack_weights
from kestrel.loading import load_weights
from kestrel.spi import TensorInfo, WeightReader
from kestrel_moondream.model import MoondreamModel
from kestrel_moondream.names import PACKED, parameter_name

__all__ = ["PackedWeights", "load", "unpack_int4"]

GROUP = 128  # weights that share one scale in the published 4-bit checkpoint


def load(model: MoondreamModel, reader: WeightReader, *, device: torch.device, dtype: torch.dtype) -> None:
    """Fill ``model`` from a checkpoint of either layout, and lay the weights out as the providers of its ops want them.

    LoadError unless every tensor has its place and its shape.
    """
    is_packed = any(name.endswith(PACKED[0]) for name in reader.tensors)
    is_original = any(name.startswith("region_model.") for name in reader.tensors)
    load_weights(
        model,
        PackedWeights(reader) if is_packed else reader,
        device=device,
        dtype=dtype,
        rename=parameter_name,
        transforms={"region.*_features": torch.t} if is_original else {},  # stored as [out, in] there
    )
    pack_weights(model)


class PackedWeights:
    """A ``WeightReader`` over ``reader`` in which each 4-bit linear appears as one floating-point ``….weight``."""

    def __init__(self, reader: WeightReader) -> None:
        self._reader = reader
        self._tensors = MappingProxyType(dict(_unpacked(reader.tensors)))

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._tensors

    def names(self) -> Iterator[str]:
        return iter(self._tensors)

    def get(self, name: str) -> torch.Tensor:
        packed, scale, zero = (name.removesuffix(".weight") + part for part in PACKED)
        if packed not in self._reader.tensors:
            return self._reader.get(name)
        parts = (self._reader.get(packed), self._reader.get(scale), self._reader.get(zero))
        return unpack_int4(*parts, self._tensors[name].shape)


def unpack_int4(
    packed: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor, shape: tuple[int, ...]
) -> torch.Tensor:
    """The weight [out, in] of a 4-bit linear, in ``scale``'s dtype.

    Row r of ``packed`` [G / 2, 128] holds group r in its high nibbles and group G / 2 + r in its low ones; the
    value of a nibble q is (q − zero point) · scale of its group. Groups run along the weight row by row.
    """
    nibbles = torch.cat([packed >> 4, packed & 0xF]).to(scale.dtype)
    return ((nibbles - zero_point) * scale).reshape(shape)


def _unpacked(tensors: Mapping[str, TensorInfo]) -> Iterator[tuple[str, TensorInfo]]:
    for name, info in tensors.items():
        if name.endswith(PACKED[0]):
            yield _packed_linear(name.removesuffix(PACKED[0]), tensors)
        elif not name.endswith(PACKED[1:]):
            yield name, info


def _packed_linear(linear: str, tensors: Mapping[str, TensorInfo]) -> tuple[str, TensorInfo]:
    needed = [linear + part for part in (*PACKED, ".bias")]
    missing = [name for name in needed if name not in tensors]
    if missing:
        raise LoadError(
            f"4-bit linear {linear!r} lacks {', '.join(missing)}; fetch the checkpoint again", missing=missing
        )
    groups, width = tensors[linear + PACKED[0]].shape
    rows = tensors[linear + ".bias"].shape[0]
    if width != GROUP or (groups * 2 * GROUP) % rows:
        raise LoadError(
            f"4-bit linear {linear!r} is packed as [{groups}, {width}] for {rows} outputs; groups of {GROUP} are "
            "expected. Only the published 4-bit layout is supported.",
            misshapen=[linear + PACKED[0]],
        )
    scale = tensors[linear + PACKED[1]]
    return linear + ".weight", replace(scale, shape=(rows, groups * 2 * GROUP // rows))
