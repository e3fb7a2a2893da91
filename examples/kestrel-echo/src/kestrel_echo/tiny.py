"""Writes a random checkpoint in Hub layout."""

import json

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from kestrel.ops import resolve_ops
from kestrel_echo.model import EchoModel

SIZES = {"vocab_size": 258, "hidden_size": 32, "num_heads": 4, "mlp_size": 64, "max_positions": 256}
CONFIG = {"model_type": "echo", **SIZES}


def write(directory, seed):
    """Fill ``directory`` with config.json, tokenizer.json and seeded weights."""
    generator = torch.Generator().manual_seed(seed)
    shapes = EchoModel(CONFIG, resolve_ops(), page_size=16, dtype=torch.float32).state_dict()
    tensors = {name: torch.randn(shape.shape, generator=generator) for name, shape in shapes.items()}
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(CONFIG))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<start>", "<end>"])
    tokenizer.save(str(directory / "tokenizer.json"))
