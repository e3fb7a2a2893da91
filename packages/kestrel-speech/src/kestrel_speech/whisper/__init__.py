"""Whisper: an encoder–decoder that transcribes and translates windows of 30 seconds."""
