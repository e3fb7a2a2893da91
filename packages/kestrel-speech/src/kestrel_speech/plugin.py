"""What the ``kestrel`` entry point loads: the speech families. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from kestrel.spi import ModelFamily, hookimpl
from kestrel_speech.whisper.family import WhisperFamily

KESTREL_SPI_VERSION = 1


@hookimpl
def kestrel_model_families() -> Sequence[ModelFamily]:
    """The families of this package."""
    return (WhisperFamily(),)
