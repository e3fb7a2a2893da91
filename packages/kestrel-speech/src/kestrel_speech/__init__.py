"""Speech-to-text families of models for Kestrel."""

from kestrel_speech.whisper.family import WhisperFamily

__all__ = ["WhisperFamily"]
