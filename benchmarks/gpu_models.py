"""Checkpoints of random weights at published sizes, in Hub layout, for ``gpu.py``. Drawn on the GPU, written once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from kestrel.ops import resolve_ops
from kestrel_moondream.config import MoondreamConfig
from kestrel_moondream.model import MoondreamModel
from kestrel_moondream.tiny import _tokenizer as moondream_tokenizer
from kestrel_qwen.config import QwenConfig
from kestrel_qwen.fp8 import is_kept, quantised
from kestrel_qwen.released import released_shapes
from kestrel_qwen.tiny import write_sides

__all__ = ["WHISPER_EOT", "eight_bit_weights", "write_moondream", "write_qwen", "write_whisper"]

# hidden, layers, feed-forward (0: experts), heads, key heads, linear value heads, tied
QWEN = {
    "0.8B": (1024, 24, 3584, 8, 2, 16, True),
    "2B": (2048, 24, 6144, 8, 2, 16, True),
    "4B": (2560, 32, 9216, 16, 4, 32, True),
    "9B": (4096, 32, 12288, 16, 4, 32, False),
    "35B-A3B": (2048, 40, 0, 16, 2, 32, False),
}
WHISPER = {  # width, encoder layers, decoder layers, heads, mel bins
    "large-v3-turbo": (1280, 32, 4, 20, 128),
    "large-v3": (1280, 32, 32, 20, 128),
}
WHISPER_EOT = 256


def write_qwen(directory: Path, size: str, device: torch.device, *, fp8: bool = False) -> None:
    """Qwen 3.5 of ``size`` without its vision tower, bfloat16 or block FP8; its tokenizer has one token per byte."""
    config = _qwen_config(size)
    blocks = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    given = {"quantization_config": blocks} if fp8 else {}
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config | given), encoding="utf-8")
    _save(directory, released_shapes(QwenConfig.from_hf(config)), device, fp8=fp8)
    write_sides(directory)


def eight_bit_weights(size: str) -> int:
    """How many weights of a dense Qwen of ``size`` are 8-bit floats in an FP8 checkpoint."""
    shapes = released_shapes(QwenConfig.from_hf(_qwen_config(size)))
    return sum(torch.Size(shape).numel() for name, shape in shapes.items() if is_kept(name))


def _qwen_config(size: str) -> dict[str, Any]:
    hidden, layers, wide, heads, kv_heads, value_heads, tied = QWEN[size]
    experts = {
        "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    }  # fmt: skip
    return {
        "model_type": "qwen3_5_text" if wide else "qwen3_5_moe_text", "vocab_size": 248_320, "hidden_size": hidden,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 256,
        "rms_norm_eps": 1e-6, "max_position_embeddings": 262_144, "linear_num_key_heads": 16,
        "linear_num_value_heads": value_heads, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4, "full_attention_interval": 4, "hidden_act": "silu", "eos_token_id": 0,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 10_000_000, "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10], "mrope_interleaved": True,
        },
        "tie_word_embeddings": tied,
        **({"intermediate_size": wide} if wide else experts),
    }  # fmt: skip


def write_moondream(directory: Path, device: torch.device) -> None:
    """Moondream 2 at its published size, bfloat16."""
    config = MoondreamConfig()
    with torch.device("meta"):
        model = MoondreamModel(config, resolve_ops(), torch.bfloat16, page_size=16)
    directory.mkdir(parents=True, exist_ok=True)
    card = {"model_type": "moondream1", "config": {"text": {}, "vision": {}, "region": {}, "tokenizer": {}}}
    (directory / "config.json").write_text(json.dumps(card), encoding="utf-8")
    shapes = {f"model.{name}": tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    _save(directory, shapes, device)
    moondream_tokenizer().save(str(directory / "tokenizer.json"))


def write_whisper(directory: Path, size: str, device: torch.device) -> None:
    """Whisper of ``size``, bfloat16, with a token per byte and all control tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    dim, encoder, decoder, heads, mels = WHISPER[size]
    config = WhisperConfig(
        vocab_size=51_866, num_mel_bins=mels, d_model=dim, encoder_layers=encoder, decoder_layers=decoder,
        encoder_attention_heads=heads, decoder_attention_heads=heads, encoder_ffn_dim=4 * dim,
        decoder_ffn_dim=4 * dim, bos_token_id=WHISPER_EOT, eos_token_id=WHISPER_EOT, pad_token_id=WHISPER_EOT,
        decoder_start_token_id=WHISPER_EOT + 1,
    )  # fmt: skip
    with torch.device("meta"):
        state = WhisperForConditionalGeneration(config).state_dict()
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config.to_dict()), encoding="utf-8")
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items() if name != "proj_out.weight"}
    _save(directory, shapes, device)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    control = [
        "<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|translate|>", "<|transcribe|>",
        "<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>",
        *(f"<|{0.02 * i:.2f}|>" for i in range(1501)),
    ]  # fmt: skip
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    generation = {
        "is_multilingual": True,
        "alignment_heads": [[2, 4], [2, 11]],
        "lang_to_id": {f"<|{code}|>": tokenizer.token_to_id(f"<|{code}|>") for code in ("en", "de")},
        "suppress_tokens": [],
        "begin_suppress_tokens": [],
    }
    (directory / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")


def _save(
    directory: Path, shapes: Mapping[str, tuple[int, ...]], device: torch.device, *, fp8: bool = False
) -> None:
    torch.manual_seed(0)
    tensors: dict[str, Any] = {}
    for name, shape in shapes.items():
        values = torch.randn(shape, dtype=torch.bfloat16, device=device)
        if len(shape) > 1:
            values *= 1.0 / torch.Size(shape[1:]).numel() ** 0.5
        elif name.endswith("A_log"):
            values -= 1.0
        elif "norm" in name or ".ln" in name:
            values = values * 0.1 + (0.0 if name.endswith("bias") else 1.0)
        else:
            values *= 0.1
        if fp8 and is_kept(name):
            eight, scale = quantised(values)
            tensors[name], tensors[f"{name}_scale_inv"] = eight.cpu(), scale.to(torch.bfloat16).cpu()
        else:
            tensors[name] = values.cpu()
    save_file(tensors, directory / "model.safetensors")
