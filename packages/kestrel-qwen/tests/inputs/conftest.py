"""The config and tokenizer of prompts whose media have real sizes."""

import pytest
from qwen_configs import config_of


class LetterTokenizer:
    """Text ids are 100 + the UTF-8 byte; two control ids."""

    vocab_size = 400

    def encode(self, text):
        return [100 + byte for byte in text.encode()]

    def decode(self, ids):
        return bytes(i - 100 for i in ids if i >= 100).decode(errors="replace")

    def token_bytes(self, token_id):
        return bytes([token_id - 100]) if token_id >= 100 else b""

    def token_id(self, token):
        return {"<|im_start|>": 1, "<|im_end|>": 2}.get(token)


@pytest.fixture(scope="session")
def letters():
    return LetterTokenizer()


@pytest.fixture(scope="session")
def config():
    """Image id 3, video id 4, markers 5 and 6; patches of 16 pixels, merged 2 × 2."""
    return config_of((3, 4, 5, 6), vocab_size=400)
