"""The Moondream family of models for Kestrel."""

from kestrel_moondream.config import MoondreamConfig
from kestrel_moondream.family import MoondreamFamily

__all__ = ["MoondreamConfig", "MoondreamFamily"]
