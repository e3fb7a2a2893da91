"""Moondream as the token lane runs it: what it declares, how media and prompts become tensors, the forward pass.

Coordinates and sizes are aux bins of the control ids 5 and 6: decoded from the hidden state that produced the token,
embedded by value when the token is fed back.

Letters: T tokens, N rows, C hidden, V vocabulary, W aux width, R rows of media features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from kestrel.errors import InvalidRequestError
from kestrel.layers import merge_media
from kestrel.spi import (
    AuxOutput,
    Batch,
    FloatsItem,
    ImageItem,
    MediaItem,
    MediaSpec,
    OpCall,
    PagedKV,
    TextTokenizer,
    TokenDriver,
    TokenSpec,
)
from kestrel.types import Layout, Prepared, Segment
from kestrel_moondream.config import MoondreamConfig
from kestrel_moondream.model import MoondreamModel
from kestrel_moondream.pictures import crops_of, inputs_of
from kestrel_moondream.prepare import BOX, IMAGE, POINT, prepare_image, prepare_spatial
from kestrel_moondream.text import STATE

__all__ = ["MoondreamDriver", "spec_of"]


PICTURES_AT_ONCE = 4  # of one encoder launch on an accelerator, the largest; a CPU is full with one


def spec_of(config: MoondreamConfig, pictures: int = 1) -> TokenSpec:
    """What a checkpoint of ``config`` needs and makes; ``pictures`` are encoded together."""
    text, region, ids = config.text, config.region, config.tokenizer
    return TokenSpec(
        vocab_size=text.vocab_size,
        hidden_size=text.dim,
        max_positions=text.max_context,
        eos_ids=frozenset({ids.eos_id}),
        states=(PagedKV(name=STATE, layers=text.n_layers, kv_heads=text.n_kv_heads, head_dim=text.head_dim),),
        aux=(
            AuxOutput(name="coord", token_id=ids.coord_id, cardinality=region.coord_out_dim + 1),
            AuxOutput(name="size", token_id=ids.size_id, cardinality=region.size_bins + 1, width=2),
        ),
        media=(
            MediaSpec(kind=IMAGE, max_cost=max(16, pictures * (config.vision.max_crops + 1))),
            MediaSpec(kind=POINT, max_cost=256),
            MediaSpec(kind=BOX, max_cost=256),
        ),
    )


class MoondreamDriver(TokenDriver):
    """A loaded Moondream 2. ``resize``: ``ops.resize_crops`` of a device that cuts pictures itself; None: the host
    does."""

    def __init__(
        self,
        config: MoondreamConfig,
        model: MoondreamModel,
        tokenizer: TextTokenizer,
        device: torch.device,
        resize: OpCall | None = None,
    ) -> None:
        self.spec = spec_of(config, 1 if device.type == "cpu" else PICTURES_AT_ONCE)
        self.tokenizer = tokenizer
        self.config = config
        self.model = model
        self.device = device
        self._resize = resize

    def prepare(self, item: MediaItem, settings: Mapping[str, Any]) -> Prepared:
        if isinstance(item, ImageItem) and item.kind == IMAGE:
            by_device, pins = self._resize is not None, self.device.type == "cuda"
            return prepare_image(item, self.config.vision, settings, by_device=by_device, pins=pins)
        if isinstance(item, FloatsItem) and item.kind in (POINT, BOX):
            return prepare_spatial(item)
        raise InvalidRequestError(
            f"Moondream takes images and spatial references; it was given {item.kind!r}"
        )

    def layout(self, segments: Sequence[Segment]) -> Layout:
        """As the default, with every image a bidirectional range; BOS joins the range of an image right behind it."""
        layout = super().layout(segments)
        ranges = []
        for span in layout.spans:
            if layout.media[span.item].kind == IMAGE:
                after_bos = span.start == 1 and layout.tokens[0] == self.config.tokenizer.bos_id
                ranges.append((0 if after_bos else span.start, span.end))
        return replace(layout, bidirectional=tuple(ranges))

    def pack(self, kind: str, packed: Sequence[Prepared]) -> Sequence[Sequence[torch.Tensor]]:
        """Of images what ``pictures.inputs_of`` says, of spatial references the numbers of all."""
        if kind != IMAGE:
            return [[item.tensors["values"].to(torch.float32) for item in packed]]
        return [part for item in packed for part in inputs_of(item)]

    def features(self, kind: str, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        if kind == IMAGE:
            crops, tilings = crops_of(inputs, self.config.vision.crop_size, self._resize)
            return self.model.vision(crops, tilings).flatten(0, 1)
        (values,) = inputs
        region = self.model.region
        features = region.encode_coordinates(values[:, :1])
        if kind == POINT:
            return features
        is_size = (torch.arange(len(values), device=self.device) % 3 == 2)[:, None]
        return torch.where(is_size, region.encode_sizes(values), features)

    def embed(self, batch: Batch) -> torch.Tensor:
        ids, tokens = batch.ids_T, self.config.tokenizer
        x_TC = self.model.text.embed(ids)
        if batch.has_aux:
            is_coord_T, is_size_T = ids == tokens.coord_id, ids == tokens.size_id
            x_TC = self.model.region.embed_bins(x_TC, is_coord_T, is_size_T, batch.aux_TW)
        return merge_media(x_TC, batch)

    def forward(self, batch: Batch, x_TC: torch.Tensor) -> torch.Tensor:
        return self.model.text(x_TC, batch)

    def logits(self, h_NC: torch.Tensor) -> torch.Tensor:
        return self.model.text.logits(h_NC)

    def aux_logits(self, h_NC: torch.Tensor, ids_N: torch.Tensor) -> torch.Tensor:
        return self.model.region.bin_logits(h_NC)
