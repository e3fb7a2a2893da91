"""A tiny random checkpoint of the family, in Hub layout: float32 weights, a byte-level tokenizer, both configs.

Its windows last 3 s, so that a file of some seconds is a long one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

__all__ = ["TINY_LANGUAGES", "write_tiny"]

TINY_LANGUAGES = ("en", "zh", "de", "es", "ja", "fr")
TINY_TIMES = 151
DIM, HEADS, LAYERS, FFN, MELS, CONTEXT = 64, 4, 2, 128, 80, 150
SUPPRESSED = (
    "<|startoftranscript|>", "<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>", "<|nospeech|>",
)  # fmt: skip
TIME_SPREAD, TIME_COMMON, EOT_COMMON = 0.6, 1.1, 0.9
GAINS = {"encoder": 2.0, "decoder": 8.0}  # of MLPs, so that the next id is another
SPREAD = 6.0  # of logits, so that the best two of them are rarely close


def write_tiny(directory: Path, seed: int, **changes: Any) -> None:
    """config.json, generation_config.json, model.safetensors and tokenizer.json. ``changes`` go into config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = tiny_tokenizer()
    config = tiny_config(tokenizer) | changes
    (directory / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    generation = {
        "is_multilingual": True,
        "alignment_heads": [[1, 0], [1, 2]],
        "begin_suppress_tokens": [tokenizer.token_to_id("Ġ"), tokenizer.token_to_id("<|endoftext|>")],
        "suppress_tokens": [tokenizer.token_to_id(token) for token in ("#", "*", "@", *SUPPRESSED)],
        "lang_to_id": {f"<|{code}|>": tokenizer.token_to_id(f"<|{code}|>") for code in TINY_LANGUAGES},
    }
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=2), encoding="utf-8")
    save_file(random_weights(config, seed), directory / "model.safetensors")
    tokenizer.save(str(directory / "tokenizer.json"))


def tiny_config(tokenizer: Tokenizer) -> dict[str, Any]:
    """config.json of a tiny multilingual Whisper."""
    eot = tokenizer.token_to_id("<|endoftext|>")
    return {
        "model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"],
        "vocab_size": tokenizer.get_vocab_size(), "d_model": DIM, "num_mel_bins": MELS,
        "encoder_layers": LAYERS, "decoder_layers": LAYERS,
        "encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS,
        "encoder_ffn_dim": FFN, "decoder_ffn_dim": FFN,
        "max_source_positions": CONTEXT, "max_target_positions": 448,
        "activation_function": "gelu", "scale_embedding": False,
        "bos_token_id": eot, "eos_token_id": eot, "pad_token_id": eot,
        "decoder_start_token_id": tokenizer.token_to_id("<|startoftranscript|>"),
    }  # fmt: skip


def tiny_tokenizer() -> Tokenizer:
    """A token per byte, Whisper's control tokens, six languages and the times up to 3 s."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    control = [
        "<|endoftext|>", "<|startoftranscript|>", *(f"<|{code}|>" for code in TINY_LANGUAGES), "<|translate|>",
        "<|transcribe|>", "<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>",
        *(f"<|{0.02 * i:.2f}|>" for i in range(TINY_TIMES)),
    ]  # fmt: skip
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def random_weights(config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """A float32 tensor for every name of the Hub layout, drawn on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    dim, found = config["d_model"], {}

    def draw(name: str, *shape: int, scale: float = 1.0) -> None:
        fan = shape[-1] if len(shape) == 2 else shape[1] * shape[2] if len(shape) == 3 else 1
        found[name] = torch.randn(shape, generator=generator, device="cpu") * (scale / fan**0.5)

    def norm(name: str) -> None:
        found[f"{name}.weight"] = 1 + 0.1 * torch.randn(dim, generator=generator, device="cpu")
        draw(f"{name}.bias", dim, scale=0.1)

    for part, ins in (("conv1", config["num_mel_bins"]), ("conv2", dim)):
        draw(f"model.encoder.{part}.weight", dim, ins, 3, scale=2.0)
        draw(f"model.encoder.{part}.bias", dim, scale=0.1)
    draw("model.decoder.embed_tokens.weight", config["vocab_size"], dim, scale=SPREAD)
    for half, length in (
        ("encoder", config["max_source_positions"]),
        ("decoder", config["max_target_positions"]),
    ):
        draw(f"model.{half}.embed_positions.weight", length, dim, scale=dim**0.5)
        norm(f"model.{half}.layer_norm")
        for layer in range(config[f"{half}_layers"]):
            stem = f"model.{half}.layers.{layer}"
            attentions = ("self_attn",) if half == "encoder" else ("self_attn", "encoder_attn")
            for attention in attentions:
                norm(f"{stem}.{attention}_layer_norm")
                for part in ("q", "k", "v", "out"):
                    draw(f"{stem}.{attention}.{part}_proj.weight", dim, dim, scale=2.0)
                    if part != "k":
                        draw(f"{stem}.{attention}.{part}_proj.bias", dim, scale=0.1)
            norm(f"{stem}.final_layer_norm")
            ffn = config[f"{half}_ffn_dim"]
            draw(f"{stem}.fc1.weight", ffn, dim, scale=2.0)
            draw(f"{stem}.fc1.bias", ffn, scale=0.1)
            draw(f"{stem}.fc2.weight", dim, ffn, scale=GAINS[half])
            draw(f"{stem}.fc2.bias", dim, scale=0.1)
    _mix(found["model.decoder.embed_tokens.weight"], generator)
    return found


def _mix(table_VC: torch.Tensor, generator: torch.Generator) -> None:
    """Make random outputs lively: times rise and fall together, and so does the end, now and then above all text."""
    first = table_VC.shape[0] - TINY_TIMES
    common = torch.randn(table_VC.shape[1], generator=generator, device="cpu")
    times = table_VC[first:]
    times.mul_(TIME_SPREAD).add_(common * TIME_COMMON)
    eot = 256
    table_VC[eot] = 0.5 * table_VC[eot] + EOT_COMMON * common
