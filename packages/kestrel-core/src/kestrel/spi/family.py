"""Model families: recognise a checkpoint, describe it, build its drivers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from kestrel.config import RuntimeConfig
from kestrel.spi.driver import SinglePassDriver, StepDriver, TokenDriver
from kestrel.spi.prompt import PromptFormat

if TYPE_CHECKING:
    import torch

    from kestrel.spi.backend import OpCall, OpQuery

__all__ = [
    "BuildContext",
    "Built",
    "CatalogEntry",
    "Match",
    "ModelCard",
    "ModelFamily",
    "ModelInfo",
    "OpTableLike",
    "TensorInfo",
    "TextTokenizer",
    "TinyCheckpoint",
    "WeightReader",
]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor as its safetensors header declares it; ``dtype`` in safetensors' spelling ("BF16", "F32", …)."""

    shape: tuple[int, ...]
    dtype: str
    file: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """What is known of a checkpoint before any tensor is read.

    ``config``: parsed config.json (empty when there is none). ``files``: name to size in bytes. ``tensors``: from
    the safetensors headers. ``path``: the directory or single file.
    """

    model_id: str
    path: Path
    config: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, int] = field(default_factory=dict)
    tensors: Mapping[str, TensorInfo] = field(default_factory=dict)
    revision: str | None = None

    @property
    def directory(self) -> Path:
        """The directory that holds the checkpoint's files."""
        return self.path if self.path.is_dir() else self.path.parent


@dataclass(frozen=True, slots=True)
class Match:
    """A family recognises a checkpoint; the highest ``score`` wins, a tie is an error naming both families."""

    score: int = 1
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What ``kestrel show`` prints and the engine reports of a model. ``defaults``: settings per skill."""

    family: str
    architecture: str
    skills: tuple[str, ...]
    num_parameters: int
    max_context: int
    defaults: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    dtype: str = ""
    licence: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogEntry:
    """A name that users may type. ``source`` is ``scheme:reference`` ("hf:owner/repo", "file:/abs/path").

    ``embedded`` entries need no network; the first of them is the default model. ``note`` is shown when it is used.
    """

    name: str
    source: str
    revision: str | None = None
    embedded: bool = False
    note: str = ""


class TextTokenizer(Protocol):
    """Text to ids and back. ``encode`` never yields control ids, whatever the text spells."""

    vocab_size: int

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``, nothing added."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``: no clean-up, control tokens skipped, invalid UTF-8 as U+FFFD."""

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes that a token adds (empty for control tokens)."""

    def token_id(self, token: str) -> int | None:
        """The id of a token by its exact name (control tokens included), or None."""


class WeightReader(Protocol):
    """The checkpoint's tensors by name, memory-mapped."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor of the checkpoint."""

    def get(self, name: str) -> torch.Tensor:
        """Tensor ``name`` on the CPU, in the file's dtype. LoadError when it cannot be read."""

    def names(self) -> Iterator[str]:
        """Every tensor name."""


class OpTableLike(Protocol):
    """Ops resolved for one model on one device."""

    @property
    def kv_dtype(self) -> str:
        """The dtype of keys and values in pages, as torch names it, or "auto": the model's."""

    @property
    def prefill_dtype(self) -> str:
        """The dtype that encoders and prefill multiply in, as torch names it, or "auto": the model's."""

    def resolve(self, query: OpQuery) -> OpCall:
        """The callable that serves ``query``."""

    def find(self, query: OpQuery) -> OpCall | None:
        """The callable of a provider other than the reference, or None: the caller then computes from parts."""

    def pack(self, query: OpQuery, weight: torch.Tensor) -> torch.Tensor:
        """``weight`` as the provider of ``query`` wants it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildContext:
    """What ``ModelFamily.build`` works with."""

    device: torch.device
    dtype: torch.dtype
    ops: OpTableLike
    weights: WeightReader
    tokenizer: Callable[[], TextTokenizer]
    config: RuntimeConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """A loaded model. ``passes`` share ``main``'s modules. ``prompt`` is optional for drivers without prompts."""

    main: TokenDriver | StepDriver
    prompt: PromptFormat | None = None
    passes: Mapping[str, SinglePassDriver] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyCheckpoint:
    """A tiny random checkpoint of the family, for conformance tests. ``write(dir, seed)`` makes Hub layout files.

    ``write`` must give a top-2 logit margin above 1e-3 on ``kestrel.testing``'s prompts, so that greedy ids are
    comparable across batch shapes.
    """

    write: Callable[[Path, int], None]
    skills: tuple[str, ...] = ()


class ModelFamily(ABC):
    """A model plugin. The module that defines it imports no torch; heavy imports go inside ``build``."""

    name: str

    @abstractmethod
    def match(self, card: ModelCard) -> Match | None:
        """Whether this family can build ``card``."""

    @abstractmethod
    def describe(self, card: ModelCard) -> ModelInfo:
        """Facts of ``card``, from its config and headers alone."""

    @abstractmethod
    def build(self, card: ModelCard, ctx: BuildContext) -> Built:
        """The loaded model. Raises LoadError when checkpoint and model disagree."""

    def tokenizer(self, card: ModelCard) -> str | None:
        """Where the tokenizer of ``card`` comes from (``scheme:reference``), or None: the card's own directory.

        For snapshots that ship without the right one; a ``tokenizer_path`` of the user wins over both.
        """
        return None

    def catalog(self) -> Sequence[CatalogEntry]:
        """Names that users may type for models of this family."""
        return ()

    def tiny(self) -> TinyCheckpoint | None:
        """A tiny random checkpoint for conformance tests."""
        return None
