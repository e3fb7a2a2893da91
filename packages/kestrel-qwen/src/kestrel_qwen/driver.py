"""Qwen 3.5 as the token lane runs it: what it declares, how media and prompts become tensors, the forward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kestrel.errors import InvalidRequestError
from kestrel.layers import merge_media
from kestrel.spi import (
    Batch,
    FrameSampling,
    ImageItem,
    MediaItem,
    MediaSpec,
    TextTokenizer,
    TokenDriver,
    TokenSpec,
    VideoItem,
)
from kestrel.types import Layout, Prepared, Segment
from kestrel_qwen.config import QwenConfig
from kestrel_qwen.images import prepare_image
from kestrel_qwen.layout import build_layout
from kestrel_qwen.model import QwenModel
from kestrel_qwen.processor import VideoConfig
from kestrel_qwen.slices import IMAGE, VIDEO
from kestrel_qwen.text import states_of
from kestrel_qwen.video import prepare_video

__all__ = ["QwenDriver", "spec_of"]

# Of one prompt: more are refused before any is decoded. 256 pictures of the least size fill 16 384 positions.
MAX_IMAGES, MAX_VIDEOS = 256, 16
MAX_COST = 64  # units of 1024 patches in one encoder launch; a larger picture has a launch of its own


def spec_of(config: QwenConfig, tokenizer: TextTokenizer, recurrent_dtype: str) -> TokenSpec:
    """What a checkpoint of ``config`` needs and makes."""
    text = config.text
    return TokenSpec(
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        max_positions=text.max_positions,
        eos_ids=config.eos_ids | _turn_ends(tokenizer),
        position_rows=3,
        states=states_of(text, recurrent_dtype),
        media=() if config.vision is None else _media_of(config.videos),
    )


def _media_of(videos: VideoConfig) -> tuple[MediaSpec, ...]:
    sampling = FrameSampling(fps=videos.fps, min_frames=videos.min_frames, max_frames=videos.max_frames)
    return (
        MediaSpec(kind=IMAGE, max_items=MAX_IMAGES, max_cost=MAX_COST),
        MediaSpec(kind=VIDEO, max_items=MAX_VIDEOS, max_cost=MAX_COST, sampling=sampling),
    )


class QwenDriver(TokenDriver):
    """A loaded Qwen 3.5 or 3.6."""

    def __init__(
        self,
        config: QwenConfig,
        model: QwenModel,
        tokenizer: TextTokenizer,
        device: torch.device,
        recurrent_dtype: str = "float32",
    ) -> None:
        self.spec = spec_of(config, tokenizer, recurrent_dtype)
        self.tokenizer = tokenizer
        self.config = config
        self.model = model
        self.device = device
        images = config.images
        self._mean_1C1, self._std_1C1 = (
            torch.tensor(x, device=device).view(1, -1, 1) for x in (images.mean, images.std)
        )

    def prepare(self, item: MediaItem, settings: Mapping[str, Any]) -> Prepared:
        if self.config.vision is None:
            raise InvalidRequestError(
                f"this Qwen is a text-only model; it was given {item.kind!r}. Leave it out"
            )
        if isinstance(item, ImageItem):
            return prepare_image(item, settings, self.config)
        if isinstance(item, VideoItem):
            return prepare_video(item, settings, self.config)
        raise InvalidRequestError(f"Qwen takes images and videos; it was given {item.kind!r}")

    def layout(self, segments: Sequence[Segment]) -> Layout:
        return build_layout(segments, self.tokenizer, self.config)

    def pack(self, kind: str, packed: Sequence[Prepared]) -> Sequence[Sequence[torch.Tensor]]:
        """An input per picture, its patches laid out by its grid: shapes say all that the tower has to know."""
        inputs: list[list[torch.Tensor]] = []
        for item in packed:
            start = 0
            for slices, rows, columns in item.tensors["grid"].tolist():
                end = start + slices * rows * columns
                patches = item.tensors["patches"][start:end]
                inputs.append([patches.unflatten(0, (slices, rows, columns))])
                start = end
        return inputs

    def features(self, kind: str, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        tower = self.model.visual
        assert tower is not None, "a text-only model declares no media"
        patches = torch.cat([self._scaled(patches.flatten(0, 2)) for patches in inputs])
        return tower(patches, [(x.shape[0], x.shape[1], x.shape[2]) for x in inputs])

    def embed(self, batch: Batch) -> torch.Tensor:
        return merge_media(self.model.language_model.embed_tokens(batch.ids_T), batch)

    def forward(self, batch: Batch, x_TC: torch.Tensor) -> torch.Tensor:
        return self.model.language_model(x_TC, batch)

    def logits(self, h_NC: torch.Tensor) -> torch.Tensor:
        return self.model.logits(h_NC)

    def _scaled(self, patches: torch.Tensor) -> torch.Tensor:
        """Bytes as the tower was trained on them; floats are taken as they are."""
        if patches.is_floating_point():
            return patches
        mean, std = self._mean_1C1, self._std_1C1
        return ((patches.unflatten(1, (mean.shape[1], -1)).float() / 255 - mean) / std).flatten(1)


def _turn_ends(tokenizer: TextTokenizer) -> frozenset[int]:
    """The ids that end a turn and a text: a config.json alone may name the latter only."""
    ids = (tokenizer.token_id(token) for token in ("<|im_end|>", "<|endoftext|>"))
    return frozenset(i for i in ids if i is not None)
