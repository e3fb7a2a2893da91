"""A tiny random checkpoint of the family, in Hub layout: float32 weights, a byte-level tokenizer, configs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from kestrel_qwen.config import QwenConfig
from kestrel_qwen.released import released_shapes

__all__ = ["CONTROL", "TINY_CONFIG", "TINY_MOE", "random_weights", "write_sides", "write_tiny"]

CONTROL = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
    "<|video_pad|>", "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>",
    "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>", "<|box_end|>",
]  # fmt: skip
TEXT: dict[str, Any] = {
    "model_type": "qwen3_5_text", "vocab_size": 288, "hidden_size": 64, "intermediate_size": 96, "hidden_act": "silu",
    "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-6,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4, "full_attention_interval": 3, "max_position_embeddings": 2048, "eos_token_id": 0,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10_000_000, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}  # fmt: skip
VISION: dict[str, Any] = {
    "model_type": "qwen3_5", "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "in_channels": 3,
    "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 64,
    "num_position_embeddings": 36, "hidden_act": "gelu_pytorch_tanh", "deepstack_visual_indexes": [],
}  # fmt: skip
TINY_CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "text_config": TEXT,
    "vision_config": VISION, "tie_word_embeddings": False, "image_token_id": CONTROL.index("<|image_pad|>"),
    "video_token_id": CONTROL.index("<|video_pad|>"), "vision_start_token_id": CONTROL.index("<|vision_start|>"),
    "vision_end_token_id": CONTROL.index("<|vision_end|>"),
}  # fmt: skip
_EXPERTS = {
    "model_type": "qwen3_5_moe_text", "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 28,
}  # fmt: skip
TINY_MOE: dict[str, Any] = TINY_CONFIG | {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "model_type": "qwen3_5_moe",
    "text_config": {k: v for k, v in TEXT.items() if k != "intermediate_size"} | _EXPERTS,
}
SIZES = {"shortest_edge": 256, "longest_edge": 2048}  # pixels: 4 to 32 positions of 64
SPREAD = 8.0  # of logits, so that the best two of them are rarely close


def write_tiny(directory: Path, seed: int, config: dict[str, Any] | None = None) -> None:
    """A checkpoint of ``config`` (default: ``TINY_CONFIG``), with all that lies beside published weights."""
    config = TINY_CONFIG if config is None else config
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    save_file(random_weights(QwenConfig.from_hf(config), seed), directory / "model.safetensors")
    write_sides(directory)


def write_sides(directory: Path) -> None:
    """The files beside config and weights: tokenizer, preprocessors, generation."""
    sides: dict[str, dict[str, Any]] = {
        "generation_config.json": {"eos_token_id": [CONTROL.index("<|im_end|>"), 0]},
        "preprocessor_config.json": {"size": SIZES, "image_mean": [0.5] * 3, "image_std": [0.5] * 3},
        "video_preprocessor_config.json": {"size": SIZES, "fps": 2, "min_frames": 4, "max_frames": 16},
    }
    for name, values in sides.items():
        (directory / name).write_text(json.dumps(values, indent=2), encoding="utf-8")
    _tokenizer().save(str(directory / "tokenizer.json"))


def random_weights(config: QwenConfig, seed: int) -> dict[str, torch.Tensor]:
    """A float32 tensor for every name of the released layout, drawn on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    return {name: _random(name, shape, generator) for name, shape in released_shapes(config).items()}


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    values = torch.randn(shape, generator=generator, device="cpu")
    if name.endswith("A_log"):
        return values - 1.0  # decays of e^-0.3 or so: what was read a hundred tokens ago still shows
    if len(shape) == 1:
        is_factor = name.endswith(
            ("linear_attn.norm.weight", "norm1.weight", "norm2.weight", "merger.norm.weight")
        )
        return values * 0.1 + (1.0 if is_factor else 0.0)
    inputs = shape[1:] if name.endswith(".weight") else shape[-1:]
    gain = SPREAD if name == "lm_head.weight" else 1.5
    return values * gain / torch.Size(inputs).numel() ** 0.5


def _tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*CONTROL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in CONTROL])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
