"""A tiny random checkpoint of the family, in Hub layout: float32 weights, a byte-level tokenizer, a config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from kestrel.ops import resolve_ops
from kestrel_moondream.config import MoondreamConfig
from kestrel_moondream.model import MoondreamModel

__all__ = ["TINY_CONFIG", "random_weights", "write_tiny"]

CONTROL = ["<|endoftext|>", *(f"<|md_reserved_{i}|>" for i in range(20))]
TINY_CONFIG: dict[str, Any] = {
    "text": {
        "dim": 64, "ff_dim": 128, "n_layers": 3, "vocab_size": len(CONTROL) + 256, "max_context": 512,
        "n_heads": 4, "n_kv_heads": 2,
    },
    "vision": {
        "enc_dim": 32, "enc_patch_size": 4, "enc_n_layers": 2, "enc_ff_dim": 64, "enc_n_heads": 4, "crop_size": 28,
        "max_crops": 12, "overlap_margin": 1, "proj_inner_dim": 96, "proj_out_dim": 64,
    },
    "region": {
        "dim": 64, "coord_feat_dim": 16, "coord_out_dim": 32, "size_feat_dim": 16, "size_out_dim": 128, "inner_dim": 96,
    },
    "tokenizer": {
        "templates": {
            "caption": {"short": [1, 10, 2, 11, 3], "normal": [1, 10, 2, 12, 3], "long": [1, 10, 2, 13, 3]},
            "query": {"prefix": [1, 14, 2], "suffix": [3]},
            "detect": {"prefix": [1, 15, 16, 2], "suffix": [3]},
            "point": {"prefix": [1, 17, 2], "suffix": [3]},
        }
    },
}  # fmt: skip
SPREAD = 8.0  # of logits, so that the best two of them are rarely close
CONTROL_LEAD = 8.0  # so that control ids appear in random outputs
GAINS = {"lm_head": SPREAD, "decoder.fc2": SPREAD, "text.blocks.": 2.0, "proj_mlp.fc2": 2.0}


def write_tiny(directory: Path, seed: int) -> None:
    """config.json, model.safetensors and tokenizer.json of a tiny Moondream 2."""
    directory.mkdir(parents=True, exist_ok=True)
    card = {"model_type": "moondream1", "config": TINY_CONFIG}
    (directory / "config.json").write_text(json.dumps(card, indent=2), encoding="utf-8")
    weights = random_weights(MoondreamConfig.from_mapping(TINY_CONFIG), seed)
    save_file({f"model.{name}": tensor for name, tensor in weights.items()}, directory / "model.safetensors")
    _tokenizer().save(str(directory / "tokenizer.json"))


def random_weights(config: MoondreamConfig, seed: int) -> dict[str, torch.Tensor]:
    """A float32 tensor for every parameter of the model, drawn on the CPU."""
    with torch.device("meta"):
        model = MoondreamModel(config, resolve_ops(), torch.float32, page_size=16)
    generator = torch.Generator().manual_seed(seed)
    return {name: _random(name, tensor.shape, generator) for name, tensor in model.state_dict().items()}


def _random(name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    values = torch.randn(shape, generator=generator, device="cpu")
    if "ln" in name.rsplit(".", 2)[-2]:
        return values * 0.1 + (1.0 if name.endswith(".weight") else 0.0)
    if name == "text.lm_head.bias":
        values[: len(CONTROL) // 2] += CONTROL_LEAD
        return values
    if name.endswith(".bias"):
        return values * 0.1
    if name.endswith("_features"):
        return values
    if name == "text.wte":
        return values * 0.3  # small beside what attention adds, so that outputs depend on the whole prompt
    gain = next((gain for part, gain in GAINS.items() if part in name), 1.0)
    return values * gain / shape[-1] ** 0.5


def _tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*CONTROL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in CONTROL])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
