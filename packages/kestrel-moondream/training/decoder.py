"""A plain greedy decoder over the training module: query, caption, point and detect for one picture at a time.

It follows Moondream 2's loops and keeps the keys and values of the picture for further questions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image
from tokenizers import Tokenizer
from torch import Tensor

from . import pieces as pc
from .crops import picture_crops
from .model import NanoModel, TextBlock, bin_size, rotary

MAX_TOKENS, MAX_OBJECTS = 96, 50
Past = list[tuple[Tensor, Tensor]]


class GreedyDecoder:
    """``answerer`` of ``evaluate``: returns the dictionaries that the engine's verbs return."""

    def __init__(self, model: NanoModel, tokenizer: Tokenizer) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.dtype = model.text.wte.dtype
        self.image: Image.Image | None = None
        self.image_past: Past = []
        self.past: Past = []
        self.position = 0

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def _skill(self, name: str) -> list[int]:
        return [pc.SKILL_OPEN, *self._ids(name), pc.SKILL_CLOSE]

    def _forward(self, x: Tensor, past: Past | None, start: int, *, is_causal: bool) -> tuple[Tensor, Past]:
        c = self.model.config
        positions = torch.arange(start, start + x.shape[1])
        cos, sin = rotary(positions, c.dim // c.n_heads, c.rope_theta)
        grown: Past = []
        for i, block in enumerate(self.model.text.blocks):
            assert isinstance(block, TextBlock)
            x, kept = block.step(x, cos, sin, past[i] if past else None, is_causal)
            grown.append(kept)
        return x, grown

    def _open(self, image: Image.Image) -> None:
        if self.image is not image:
            crops, tiles = picture_crops(image, self.model.config)
            prefix = self.model.prefix(crops.to(self.dtype), tiles)
            _, self.image_past = self._forward(prefix, None, 0, is_causal=False)
            self.image = image
        self.past, self.position = self.image_past, self.model.config.prefix

    def _feed(self, x: Tensor) -> Tensor:
        """Hidden state of the last of the embeddings [1, T, C]."""
        hidden, self.past = self._forward(x.to(self.dtype), self.past, self.position, is_causal=True)
        self.position += x.shape[1]
        return hidden[:, -1:]

    def _feed_ids(self, ids: Sequence[int]) -> Tensor:
        return self._feed(self.model.text.wte[list(ids)][None])

    def _generate(self, hidden: Tensor) -> str:
        ids: list[int] = []
        while len(ids) < MAX_TOKENS:
            logits = self.model.logits(hidden)[0, 0]
            if ids:
                logits[pc.ANSWER] = float("-inf")
            token = int(logits.argmax())
            if token == pc.EOS:
                break
            ids.append(token)
            hidden = self._feed_ids([token])
        return str(self.tokenizer.decode(ids))

    def _coord(self, hidden: Tensor) -> float:
        logits = self.model.region.coord_decoder(hidden)[0, 0]
        return float(logits.argmax()) / len(logits)

    def _feed_coord(self, value: float) -> Tensor:
        return self._feed(
            self.model.region.encode_coord(torch.tensor([[[value]]], dtype=self.dtype).float()).to(self.dtype)
        )

    def _size(self, hidden: Tensor) -> tuple[float, float]:
        logits = self.model.region.size_decoder(hidden)[0, 0].unflatten(0, (2, -1))
        width, height = bin_size(logits.argmax(1), logits.shape[1]).tolist()
        return width, height

    def _feed_size(self, size: tuple[float, float]) -> Tensor:
        return self._feed(self.model.region.encode_size(torch.tensor([[size]])).to(self.dtype))

    def _spatial(self, refs: Sequence[Sequence[float]]) -> Tensor:
        parts = []
        for ref in refs:
            box = [*ref, *ref] if len(ref) == 2 else list(ref)
            values = [(box[0] + box[2]) / 2, (box[1] + box[3]) / 2]
            parts += [self.model.region.encode_coord(torch.tensor([[[v]]])) for v in values]
            if len(ref) == 4:
                parts.append(
                    self.model.region.encode_size(torch.tensor([[[box[2] - box[0], box[3] - box[1]]]]))
                )
        return torch.cat(parts, 1) if parts else torch.zeros(1, 0, self.model.config.dim)

    @torch.inference_mode()
    def query(
        self, image: Image.Image, question: str, spatial_refs: Sequence[Sequence[float]] = ()
    ) -> dict[str, Any]:
        self._open(image)
        wte = self.model.text.wte
        ids = [*self._ids(question), pc.ANSWER, pc.ANSWER]
        x = torch.cat(
            [wte[self._skill("query")][None].float(), self._spatial(spatial_refs), wte[ids][None].float()], 1
        )
        return {"answer": self._generate(self._feed(x))}

    @torch.inference_mode()
    def reason(self, image: Image.Image, question: str) -> dict[str, Any]:
        """An answer after grounded reasoning: the reasoning's text, its points, and the answer."""
        self._open(image)
        hidden = self._feed_ids([*self._skill("query"), *self._ids(question), pc.ANSWER, pc.THINK])
        ids: list[int] = []
        values: list[float] = []
        for _ in range(MAX_TOKENS):
            logits = self.model.logits(hidden)[0, 0]
            if ids:
                logits[[pc.EOS, pc.SIZE]] = float("-inf")
            token = int(logits.argmax())
            if token == pc.ANSWER:
                break
            ids.append(token)
            if token == pc.COORD:
                values.append(self._coord(hidden))
                hidden = self._feed_coord(values[-1])
            else:
                hidden = self._feed_ids([token])
        text = self.tokenizer.decode([i for i in ids if i > 20])
        answer = self._generate(self._feed_ids([pc.ANSWER, pc.ANSWER]))
        points = list(zip(values[::2], values[1::2], strict=False))
        return {"reasoning": {"text": text, "points": points}, "answer": answer}

    @torch.inference_mode()
    def caption(self, image: Image.Image, length: str = "normal") -> dict[str, Any]:
        self._open(image)
        ids = [*self._skill("describe"), *self._ids(length), pc.ANSWER]
        return {"caption": self._generate(self._feed_ids(ids))}

    def _located(self, image: Image.Image, skill: str, name: str) -> list[list[float]]:
        self._open(image)
        hidden = self._feed_ids([*self._skill(skill), *self._ids(f" {name}"), pc.ANSWER])
        found: list[list[float]] = []
        while len(found) < MAX_OBJECTS:
            logits = self.model.logits(hidden)[0, 0]
            if logits[pc.EOS] >= logits[pc.COORD]:
                break
            x = self._coord(hidden)
            hidden = self._feed_coord(x)
            y = self._coord(hidden)
            hidden = self._feed_coord(y)
            found.append([x, y])
            if skill == "detect":
                size = self._size(hidden)
                hidden = self._feed_size(size)
                found[-1] += size
        return found

    @torch.inference_mode()
    def point(self, image: Image.Image, name: str) -> dict[str, Any]:
        return {"points": [{"x": x, "y": y} for x, y in self._located(image, "point", name)]}

    @torch.inference_mode()
    def detect(self, image: Image.Image, name: str) -> dict[str, Any]:
        boxes = []
        for x, y, w, h in self._located(image, "detect", name):
            corners = (x - w / 2, y - h / 2, x + w / 2, y + h / 2)
            boxes.append(
                dict(
                    zip(
                        ("x_min", "y_min", "x_max", "y_max"),
                        (min(1, max(0, v)) for v in corners),
                        strict=True,
                    )
                )
            )
        return {"objects": boxes}
