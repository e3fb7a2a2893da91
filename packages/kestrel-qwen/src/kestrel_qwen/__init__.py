"""The Qwen 3.5 and 3.6 family of models for Kestrel."""

from kestrel_qwen.config import QwenConfig
from kestrel_qwen.family import QwenFamily

__all__ = ["QwenConfig", "QwenFamily"]
