"""What the ``kestrel`` entry point loads: the Qwen family. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from kestrel.spi import ModelFamily, hookimpl
from kestrel_qwen.family import QwenFamily

KESTREL_SPI_VERSION = 1


@hookimpl
def kestrel_model_families() -> Sequence[ModelFamily]:
    """The one family of this package."""
    return (QwenFamily(),)
