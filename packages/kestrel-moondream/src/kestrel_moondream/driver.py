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
    PagedKV,
    TextTokenizer,
    TokenDriver,
    TokenSpec,
)
from kestrel.types import Layout, Prepared, Segment
from kestrel_moondream.config import MoondreamConfig
from kestrel_moondream.model import MoondreamModel
from kestrel_moondream.prepare import BOX, IMAGE, POINT, prepare_image, prepare_spatial
from kestrel_moondream.text import STATE

__all__ = ["MoondreamDriver", "spec_of"]


def spec_of(config: MoondreamConfig) -> TokenSpec:
    """What a checkpoint of ``config`` needs and makes."""
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
            MediaSpec(kind=IMAGE, max_cost=max(16, config.vision.max_crops + 1)),
            MediaSpec(kind=POINT, max_cost=256),
            MediaSpec(kind=BOX, max_cost=256),
        ),
    )


class MoondreamDriver(TokenDriver):
    """A loaded Moondream 2."""

    def __init__(
        self, config: MoondreamConfig, model: MoondreamModel, tokenizer: TextTokenizer, device: torch.device
    ) -> None:
        self.spec = spec_of(config)
        self.tokenizer = tokenizer
        self.config = config
        self.model = model
        self.device = device

    def prepare(self, item: MediaItem, settings: Mapping[str, Any]) -> Prepared:
        if isinstance(item, ImageItem) and item.kind == IMAGE:
            return prepare_image(item, self.config.vision, settings)
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
        """Of an image its global crop, then, laid out by its tiling, the local ones if it has any: shapes say all that
        the encoder has to know. Of spatial references the numbers of all."""
        if kind != IMAGE:
            return [[item.tensors["values"].to(torch.float32) for item in packed]]
        inputs: list[list[torch.Tensor]] = []
        for item in packed:
            crops = item.tensors["crops"]
            inputs.append([crops[:1]])
            if len(crops) > 1:
                inputs.append([crops[1:].unflatten(0, item.meta["tiling"])])
        return inputs

    def features(self, kind: str, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        if kind == IMAGE:
            return self.model.vision(*_crops(inputs)).flatten(0, 1)
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


def _crops(inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[tuple[int, int]]]:
    """The crops of all images and each image's tiling, of what ``pack`` made of them."""
    tilings: list[tuple[int, int]] = []
    for x in inputs:
        if x.dim() == 4:
            tilings.append((1, 1))
        else:
            tilings[-1] = (x.shape[0], x.shape[1])
    return torch.cat([x if x.dim() == 4 else x.flatten(0, 1) for x in inputs]), tilings
