"""Shared by every test here: cards without files, and a tokenizer whose ids are easy to write down."""

import sys
from pathlib import Path

import pytest
from kestrel.spi import ModelCard, TensorInfo

sys.path.insert(0, str(Path(__file__).parent))  # the oracle and the layouts, which tests share


class SpelledTokenizer:
    """A ``TextTokenizer`` whose text ids are 1000 + the code point; control ids cannot come from text."""

    vocab_size = 51200

    def encode(self, text: str) -> list[int]:
        return [1000 + ord(c) for c in text]

    def decode(self, ids) -> str:
        return "".join(chr(i - 1000) for i in ids if i >= 1000)

    def token_bytes(self, token_id: int) -> bytes:
        return chr(token_id - 1000).encode() if token_id >= 1000 else b""

    def token_id(self, token: str) -> int | None:
        return 1000 + ord(token) if len(token) == 1 else None


@pytest.fixture
def spelled() -> SpelledTokenizer:
    return SpelledTokenizer()


@pytest.fixture
def card_of(tmp_path):
    """A function that makes cards from tensor names (or name to shape) and a config."""

    def make(tensors=(), config=None, model_id="a/model", revision=None, path=None):
        shapes = tensors if isinstance(tensors, dict) else dict.fromkeys(tensors, (1,))
        infos = {name: TensorInfo(tuple(shape), "BF16", "model.safetensors") for name, shape in shapes.items()}
        return ModelCard(
            model_id=model_id, path=path or tmp_path, config=config or {}, tensors=infos, revision=revision
        )

    return make
