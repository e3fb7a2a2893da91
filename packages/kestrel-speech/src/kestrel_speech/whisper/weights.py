"""Fills ``WhisperModel`` from a checkpoint of either layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType

import torch

from kestrel.layers import pack_weights
from kestrel.loading import load_weights
from kestrel.spi import TensorInfo, WeightReader
from kestrel_speech.whisper.model import WhisperModel
from kestrel_speech.whisper.names import KEY_BIAS, KEY_WEIGHT, parameter_name

__all__ = ["TIED", "BiasedKeys", "load"]

TIED = {"proj_out.weight": "decoder.embed_tokens.weight"}


def load(model: WhisperModel, reader: WeightReader, *, device: torch.device, dtype: torch.dtype) -> None:
    """Fill ``model``. LoadError unless every tensor has its place and its shape."""
    load_weights(
        model,
        BiasedKeys(reader),
        device=device,
        dtype=dtype,
        rename=parameter_name,
        tied=TIED,
    )
    pack_weights(model)


class BiasedKeys:
    """A ``WeightReader`` over ``reader`` in which the keys' projections have the bias 0, like queries and values."""

    def __init__(self, reader: WeightReader) -> None:
        self._reader = reader
        added = {}
        for name, info in reader.tensors.items():
            if key := KEY_WEIGHT.fullmatch(name):
                added[key["stem"] + ".bias"] = replace(info, shape=info.shape[:1])
        self._added = {name: info for name, info in added.items() if name not in reader.tensors}
        self._tensors = MappingProxyType({**reader.tensors, **self._added})

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._tensors

    def names(self) -> Iterator[str]:
        return iter(self._tensors)

    def get(self, name: str) -> torch.Tensor:
        if name in self._added:
            assert KEY_BIAS.fullmatch(name), name
            return torch.zeros(self._added[name].shape)
        return self._reader.get(name)
