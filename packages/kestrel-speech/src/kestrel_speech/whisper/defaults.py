"""Default settings of ``transcribe``, as the original decodes. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["DEFAULTS"]

DEFAULTS: Mapping[str, Any] = {
    "temperature": (0.0, 0.2, 0.4, 0.6, 0.8, 1.0),
    "top_p": 1.0,
    "best_of": 5,
    "max_tokens": 444,
    "compression_ratio_threshold": 2.4,
    "logprob_threshold": -1.0,
    "no_speech_threshold": 0.6,
}
