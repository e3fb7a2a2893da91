"""Checkpoint files become named tensors, and named tensors become modules: every name accounted for, no pickle."""

from kestrel.loading.card import read_card
from kestrel.loading.reader import SafetensorsReader
from kestrel.loading.tokenizer import HubTokenizer, load_tokenizer
from kestrel.loading.weights import load_weights

__all__ = ["HubTokenizer", "SafetensorsReader", "load_tokenizer", "load_weights", "read_card"]
