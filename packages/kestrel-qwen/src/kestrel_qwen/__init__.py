"""The Qwen 3.5 and 3.6 family of models for Kestrel."""

from kestrel_qwen.config import QwenConfig

__all__ = ["QwenConfig"]
