"""Tensors of a checkpoint by name, memory-mapped file by file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from kestrel.errors import LoadError
from kestrel.hub import inside
from kestrel.spi import ModelCard, TensorInfo

if TYPE_CHECKING:
    import torch

__all__ = ["SafetensorsReader"]


class SafetensorsReader:
    """A ``WeightReader`` over safetensors files. A file is opened when its first tensor is asked for.

    A ``with`` block closes the files at its end; tensors given out stay valid.
    """

    def __init__(self, directory: Path, tensors: Mapping[str, TensorInfo]) -> None:
        self._directory = directory
        self._tensors = dict(tensors)
        self._open: dict[str, Any] = {}

    @classmethod
    def of(cls, card: ModelCard) -> SafetensorsReader:
        """The reader of ``card``'s tensors."""
        return cls(card.directory, card.tensors)

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor, as the headers declare it."""
        return MappingProxyType(self._tensors)

    def names(self) -> Iterator[str]:
        """Every tensor name."""
        return iter(self._tensors)

    def get(self, name: str) -> torch.Tensor:
        """Tensor ``name`` on the CPU in the file's dtype. It maps the file: copy it before the file may change.

        Raises LoadError for an unknown name and for a file that cannot be read.
        """
        info = self._tensors.get(name)
        if info is None:
            raise LoadError(f"the checkpoint in {self._directory} has no tensor {name!r}", missing=[name])
        path = inside(self._directory, info.file)
        try:
            tensor: torch.Tensor = self._file(path).get_tensor(name)
        except _read_errors() as error:
            raise LoadError(
                f"cannot read tensor {name!r} of {path}: {error}. Download the file again"
            ) from error
        return tensor

    def __enter__(self) -> SafetensorsReader:
        return self

    def __exit__(self, *exception: object) -> None:
        self._open.clear()

    def _file(self, path: Path) -> Any:
        from safetensors import safe_open

        if path.name not in self._open:
            self._open[path.name] = safe_open(str(path), framework="pt", device="cpu")
        return self._open[path.name]


def _read_errors() -> tuple[type[Exception], ...]:
    from safetensors import SafetensorError

    return (SafetensorError, OSError, ValueError, RuntimeError)
