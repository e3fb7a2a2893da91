"""The Moondream family of models for Kestrel."""
