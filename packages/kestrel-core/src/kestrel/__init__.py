"""Kestrel: an in-process, asynchronous inference engine for multimodal models."""
