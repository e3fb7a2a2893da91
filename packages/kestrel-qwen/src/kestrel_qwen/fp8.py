"""Block FP8 checkpoints: each tensor of 8-bit floats counts times one scale per block of rows and columns.

Which of them stay as they are, and all others as floats.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType

import torch

from kestrel.errors import LoadError
from kestrel.layers import serves_scaled
from kestrel.spi import OpTableLike, TensorInfo, WeightReader
from kestrel_qwen.config import QwenConfig

__all__ = [
    "EIGHT_BITS",
    "PUBLISHED_BLOCK",
    "BlockFloats",
    "dequantised",
    "is_kept",
    "keeps_blocks",
    "quantised",
]

log = logging.getLogger(__name__)
SCALE = "_scale_inv"  # what a tensor's scales are called: its own name and this
EIGHT_BITS = ("F8_E4M3", "F8_E5M2")
PUBLISHED_BLOCK = (128, 128)
# The products of a decoder's layers that have a layer for 8-bit floats, with the scales of each.
_KEPT = re.compile(
    r"(?:self_attn\.[qkvo]_proj\.weight|linear_attn\.(?:in_proj_qkv|in_proj_z|out_proj)\.weight"
    r"|mlp\.(?:shared_expert\.|experts\.\d+\.)?(?:gate|up|down)_proj\.weight"
    r"|mlp\.experts\.(?:gate_up|down)_proj)(?:_scale_inv)?$"
)


def is_kept(name: str) -> bool:
    """Whether a checkpoint's tensor is one that may stay in 8 bits, or the scales of one."""
    return not name.startswith("mtp.") and _KEPT.search(name) is not None


def keeps_blocks(
    config: QwenConfig, tensors: Mapping[str, TensorInfo], ops: OpTableLike, dtype: torch.dtype, wanted: str
) -> bool:
    """Whether the decoder's 8-bit weights stay as they are, which is logged. ``wanted``: ``RuntimeConfig.fp8_weights``.

    Raises LoadError when they shall be kept and cannot be.
    """
    eight = [name for name, info in tensors.items() if info.dtype in EIGHT_BITS]
    if not eight:
        return False
    problem = _problem(config, tensors)
    if problem is not None and wanted == "keep":
        raise LoadError(
            f"fp8_weights='keep' was asked for, but {problem}. Set fp8_weights to 'auto' or 'widen'"
        )
    if problem is None and wanted == "auto" and not serves_scaled(ops, dtype, config.text.hidden_size):
        problem = "no kernel backend here multiplies by blocks of 8-bit floats"
    if problem is None and wanted != "widen":
        log.info("%d FP8 tensors stay in 8 bits", sum(map(is_kept, eight)))
        return True
    log.info(
        "%d FP8 tensors are used as 16 or 32 bit floats: %s",
        len(eight), problem or "fp8_weights is 'widen'",
    )  # fmt: skip
    return False


def _problem(config: QwenConfig, tensors: Mapping[str, TensorInfo]) -> str | None:
    """Why a checkpoint's weights cannot stay in 8 bits."""
    block = config.quantised_block or PUBLISHED_BLOCK
    if block != PUBLISHED_BLOCK:
        return f"its scales are of blocks of {block[0]} × {block[1]}, not {PUBLISHED_BLOCK[0]} × {PUBLISHED_BLOCK[1]}"
    for name, info in tensors.items():
        if not is_kept(name) or name.endswith(SCALE):
            continue
        if info.dtype != "F8_E4M3":
            return f"{name!r} is {info.dtype}, and others are 8-bit floats"
        rows = info.shape[-2] // (2 if name.endswith("gate_up_proj") else 1)
        if rows % block[0]:
            return f"{name!r} has {rows} rows, no multiple of {block[0]}"
    return None


class BlockFloats:
    """A ``WeightReader`` over ``reader`` in which 8-bit tensors and their scales appear as one float tensor each, but
    those of the names ``kept``."""

    def __init__(
        self, reader: WeightReader, block: tuple[int, int], kept: Collection[str] = frozenset()
    ) -> None:
        self._reader, self._block = reader, block
        eight = {n for n, info in reader.tensors.items() if info.dtype in EIGHT_BITS}
        self._packed = eight - set(kept)
        scales = {name + SCALE for name in eight}
        if absent := sorted(scales - reader.tensors.keys()):
            raise LoadError(
                f"{len(absent)} FP8 tensors have no scales; {absent[0]!r} is one that is missing. "
                "Download the checkpoint again",
                missing=absent,
            )
        used = {name + SCALE for name in self._packed}
        seen = {name: info for name, info in reader.tensors.items() if name not in used}
        floats = {name: replace(seen[name], dtype="F32") for name in self._packed}
        self._tensors = MappingProxyType(seen | floats)

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


def quantised(
    weight: torch.Tensor, block: tuple[int, int] = PUBLISHED_BLOCK
) -> tuple[torch.Tensor, torch.Tensor]:
    """``weight`` [N, K] as e4m3 floats, and the scales of its blocks: the largest number of each becomes the largest
    that e4m3 has."""
    rows, columns = weight.shape
    down, right = (-(-n // b) for n, b in zip(weight.shape, block, strict=True))
    padded = torch.nn.functional.pad(
        weight.float(), (0, right * block[1] - columns, 0, down * block[0] - rows)
    )
    blocks = padded.view(down, block[0], right, block[1])
    scale = blocks.abs().amax((1, 3)).clamp(min=1e-12) / torch.finfo(torch.float8_e4m3fn).max
    eight = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
    return eight.view(down * block[0], right * block[1])[:rows, :columns].contiguous(), scale
