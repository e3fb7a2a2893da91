"""Shared by every test here: cards without files, and a tokenizer whose ids are easy to write down."""

import sys
from pathlib import Path

import pytest

from kestrel.spi import ModelCard, TensorInfo

sys.path.insert(0, str(Path(__file__).parent))  # the oracle and the layouts, which tests share


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    """Tiny tensors are slower on several threads."""
    import torch

    torch.set_num_threads(1)


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
        infos = {
            name: TensorInfo(tuple(shape), "BF16", "model.safetensors") for name, shape in shapes.items()
        }
        return ModelCard(
            model_id=model_id, path=path or tmp_path, config=config or {}, tensors=infos, revision=revision
        )

    return make


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory):
    """A tiny random checkpoint in the Hugging Face layout."""
    from kestrel_moondream.tiny import write_tiny

    directory = tmp_path_factory.mktemp("tiny")
    write_tiny(directory, seed=0)
    return directory


@pytest.fixture(scope="session")
def load():
    """A function that builds a checkpoint directory (or file) the way the engine does, on the CPU."""
    import torch

    from kestrel.config import RuntimeConfig
    from kestrel.loading import SafetensorsReader, load_tokenizer, read_card
    from kestrel.ops import resolve_ops
    from kestrel.spi import BuildContext
    from kestrel_moondream import MoondreamFamily

    def build(path, dtype=torch.float32, **config):
        card = read_card("a/model", path)
        given = RuntimeConfig(model_path=path, **config)
        ctx = BuildContext(
            device=torch.device("cpu"),
            dtype=dtype,
            ops=resolve_ops(),
            weights=SafetensorsReader.of(card),
            tokenizer=lambda: load_tokenizer(given.tokenizer_path or card.directory),
            config=given,
        )
        return MoondreamFamily().build(card, ctx)

    return build


@pytest.fixture(scope="session")
def built(load, tiny_dir):
    """The tiny checkpoint, built."""
    return load(tiny_dir)


@pytest.fixture(scope="session")
def oracle(tiny_dir):
    """The float64 oracle over the tiny checkpoint."""
    import json

    from moondream_oracle import Oracle
    from safetensors.numpy import load_file

    tensors = load_file(tiny_dir / "model.safetensors")
    sizes = json.loads((tiny_dir / "config.json").read_text())["config"]
    return Oracle({name.removeprefix("model."): t.astype("float64") for name, t in tensors.items()}, sizes)
