"""Sizes, control ids and prompt templates of a Moondream checkpoint, read once from its card.

Missing keys take the values of the published 2B model. Nothing here reads a tensor.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from kestrel.errors import LoadError
from kestrel.spi import ModelCard

__all__ = ["MoondreamConfig", "RegionConfig", "Templates", "TextConfig", "TokenizerConfig", "VisionConfig"]

log = logging.getLogger(__name__)

T = TypeVar("T")
SECTIONS = ("text", "vision", "region", "tokenizer")
# Keys of published configs that say nothing which the tensors or the other keys do not.
IGNORED = frozenset({"prefix_attn", "group_size", "moe", "tau_attn"})


@dataclass(frozen=True, slots=True, kw_only=True)
class TextConfig:
    """The text decoder. Rotary embedding turns the first half of each head."""

    dim: int = 2048
    ff_dim: int = 8192
    n_layers: int = 24
    vocab_size: int = 51200
    max_context: int = 2048
    n_heads: int = 32
    n_kv_heads: int = 32
    rope_theta: float = 10_000.0

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.dim // self.n_heads

    @property
    def rot_dim(self) -> int:
        """Dimensions of a head that rotary embedding turns."""
        return self.head_dim // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """The vision encoder and its crops. ``overlap_margin`` is in patches."""

    enc_dim: int = 1152
    enc_patch_size: int = 14
    enc_n_layers: int = 27
    enc_ff_dim: int = 4304
    enc_n_heads: int = 16
    crop_size: int = 378
    max_crops: int = 12
    overlap_margin: int = 4
    proj_inner_dim: int = 8192
    proj_out_dim: int = 2048
    in_channels: int = 3

    @property
    def grid(self) -> int:
        """Patches along one side of a crop."""
        return self.crop_size // self.enc_patch_size

    @property
    def num_positions(self) -> int:
        """Sequence positions that one image fills."""
        return self.grid * self.grid


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionConfig:
    """Coordinates and sizes. ``size_out_dim`` holds the bins of width and height, one after the other."""

    dim: int = 2048
    coord_feat_dim: int = 256
    coord_out_dim: int = 1024
    size_feat_dim: int = 512
    size_out_dim: int = 2048
    inner_dim: int = 8192

    @property
    def size_bins(self) -> int:
        """Bins of a width, and of a height."""
        return self.size_out_dim // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Templates:
    """Prompt ids around the user's text, per skill; None where the model lacks the skill."""

    caption: Mapping[str, tuple[int, ...]] | None = field(
        default_factory=lambda: {
            "short": (1, 32708, 2, 12492, 3),
            "normal": (1, 32708, 2, 6382, 3),
            "long": (1, 32708, 2, 4059, 3),
        }
    )
    query: tuple[tuple[int, ...], tuple[int, ...]] | None = ((1, 15381, 2), (3,))
    detect: tuple[tuple[int, ...], tuple[int, ...]] | None = ((1, 7235, 476, 2), (3,))
    point: tuple[tuple[int, ...], tuple[int, ...]] | None = ((1, 2581, 2), (3,))


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerConfig:
    """Control ids and templates."""

    bos_id: int = 0
    eos_id: int = 0
    answer_id: int = 3
    thinking_id: int = 4
    coord_id: int = 5
    size_id: int = 6
    start_ground_points_id: int = 7
    end_ground_id: int = 9
    templates: Templates = field(default_factory=Templates)

    @property
    def answer_opener(self) -> tuple[int, ...]:
        """Ids between a query's suffix and its answer, and between the id that ends reasoning and the answer.

        The published Moondream 2 code adds the answer id once more although the suffix ends in it already.
        """
        return (self.answer_id,)

    @property
    def control_ids(self) -> tuple[int, ...]:
        """The ids that this config names on their own."""
        return tuple(getattr(self, f.name) for f in fields(self) if f.name != "templates")


@dataclass(frozen=True, slots=True, kw_only=True)
class MoondreamConfig:
    """Everything about a checkpoint but its tensors. Raises LoadError when the parts contradict each other."""

    text: TextConfig = field(default_factory=TextConfig)
    vision: VisionConfig = field(default_factory=VisionConfig)
    region: RegionConfig = field(default_factory=RegionConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)

    def __post_init__(self) -> None:
        text, vision, region = self.text, self.vision, self.region
        highest = max(self.tokenizer.control_ids)
        for holds, what in (
            (text.dim % text.n_heads == 0, f"text.dim {text.dim} is no multiple of n_heads {text.n_heads}"),
            (text.rot_dim % 2 == 0, f"half of a text head of {text.head_dim} cannot be rotated in pairs"),
            (text.n_heads % text.n_kv_heads == 0, f"{text.n_heads} heads over {text.n_kv_heads} of keys"),
            (
                vision.crop_size % vision.enc_patch_size == 0,
                "vision.crop_size is no multiple of enc_patch_size",
            ),
            (vision.enc_dim % vision.enc_n_heads == 0, "vision.enc_dim is no multiple of enc_n_heads"),
            (2 * vision.overlap_margin < vision.grid, "vision.overlap_margin leaves nothing of a crop"),
            (vision.in_channels == 3, f"vision.in_channels is {vision.in_channels}; images have 3"),
            (vision.proj_out_dim == text.dim, f"vision.proj_out_dim {vision.proj_out_dim} is not text.dim"),
            (region.dim == text.dim, f"region.dim {region.dim} is not text.dim {text.dim}"),
            (
                region.coord_feat_dim % 2 == 0 and region.size_feat_dim % 2 == 0,
                "region features must be even",
            ),
            (region.size_out_dim % 2 == 0, "region.size_out_dim must hold as many widths as heights"),
            (highest < text.vocab_size, f"id {highest} is outside the vocabulary of {text.vocab_size}"),
        ):
            _require(holds, what)

    @classmethod
    def from_card(cls, card: ModelCard) -> MoondreamConfig:
        """The config of ``card``: from its config.json, else of the published variant that its tensors show."""
        return cls.from_mapping(card.config) if card.config else _published(card)

    @classmethod
    def from_mapping(cls, config: Mapping[str, Any]) -> MoondreamConfig:
        """From a parsed config.json; the sections lie at its top level or under ``config``."""
        inner = config.get("config")
        parts = {name: config.get(name) or {} for name in SECTIONS}
        if isinstance(inner, Mapping):
            parts |= {name: inner[name] for name in SECTIONS if inner.get(name)}
        widths = {"dim": parts["text"].get("dim", TextConfig().dim)}
        vision, region = dict(parts["vision"]), dict(parts["region"])
        vision.setdefault("proj_out_dim", widths["dim"])
        region.setdefault("dim", widths["dim"])
        text = dict(parts["text"])
        text.setdefault("n_kv_heads", text.get("n_heads", TextConfig().n_kv_heads))
        tokenizer = dict(parts["tokenizer"])
        tokenizer["templates"] = _templates(tokenizer.get("templates"))
        return cls(
            text=_section(TextConfig, "text", text),
            vision=_section(VisionConfig, "vision", vision),
            region=_section(RegionConfig, "region", region),
            tokenizer=_section(TokenizerConfig, "tokenizer", tokenizer),
        )


def _published(card: ModelCard) -> MoondreamConfig:
    widths = [
        info.shape[-1]
        for name, info in card.tensors.items()
        if name.endswith(("text.wte", "embd.wte.weight"))
    ]
    match widths:
        case [2048]:
            return MoondreamConfig()
        case [1024]:
            return MoondreamConfig.from_mapping(
                {
                    "text": {"dim": 1024, "ff_dim": 4096, "n_heads": 16},
                    "vision": {"enc_dim": 720, "enc_ff_dim": 2690, "enc_n_heads": 10},
                }
            )
    raise LoadError(
        f"{card.model_id}: there is no config.json and a token embedding of width {widths} belongs to no published "
        "Moondream (2048: 2B, 1024: 0.5B). Put the checkpoint's config.json beside the weights."
    )


def _section(kind: type[T], name: str, values: Mapping[str, Any]) -> T:
    known = {f.name for f in fields(kind)}  # type: ignore[arg-type]
    for key in sorted(values.keys() - known - IGNORED):
        log.warning("config.json: %s.%s is not a setting of Moondream; it is left out", name, key)
    taken = {key: value for key, value in values.items() if key in known and value is not None}
    for key, value in taken.items():
        if key not in ("templates", "rope_theta"):
            least = 0 if kind is TokenizerConfig or key == "overlap_margin" else 1
            is_count = isinstance(value, int) and not isinstance(value, bool) and value >= least
            _require(is_count, f"{name}.{key} is {value!r}, not a whole number from {least}")
    return kind(**taken)


def _templates(given: Mapping[str, Any] | None) -> Templates:
    """Templates as config.json spells them, over the published ones; null takes the skill away."""
    if given is None:
        return Templates()
    values: dict[str, Any] = {}
    for skill in given.keys() & {f.name for f in fields(Templates)}:
        entry = given[skill]
        if entry is None:
            values[skill] = None
        elif skill == "caption":
            values[skill] = {length: _ids(ids) for length, ids in entry.items()}
        else:
            values[skill] = (_ids(entry["prefix"]), _ids(entry["suffix"]))
    return Templates(**values)


def _ids(values: Iterable[Any]) -> tuple[int, ...]:
    ids = tuple(values)
    _require(
        all(isinstance(i, int) and i >= 0 for i in ids), f"a template holds {ids}, which are not token ids"
    )
    return ids


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise LoadError(f"config.json does not describe a Moondream: {what}. Correct the file.")
