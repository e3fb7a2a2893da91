"""Qwen 3.5 with random weights at published sizes: prefill, decode steps and the vision tower, without an engine.

    python benchmarks/qwen.py [--size 0.8B] [--device auto] [--dtype auto] [--batch 1] [--prompt 128] [--steps 16]

Times are medians in milliseconds. ``share`` is the part of a decode step that reading the weights once would take at
``--bandwidth`` GB/s (the device's, from its data sheet).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from kestrel.device import describe, resolve_device, resolve_dtype
from kestrel.ops import resolve_ops
from kestrel.testing.bare import BareLoop, BareSequence
from kestrel.types import Layout, Token
from kestrel_qwen import QwenConfig
from kestrel_qwen.driver import QwenDriver
from kestrel_qwen.model import QwenModel

# hidden, layers, feed-forward (0: experts), heads, key heads, linear value heads, tied; the tower's depth, width,
# heads, feed-forward
SIZES = {
    "0.8B": ((1024, 24, 3584, 8, 2, 16, True), (12, 768, 12, 3072)),
    "2B": ((2048, 24, 6144, 8, 2, 16, True), (24, 1024, 16, 4096)),
    "4B": ((2560, 32, 9216, 16, 4, 32, True), (24, 1024, 16, 4096)),
    "9B": ((4096, 32, 12288, 16, 4, 32, False), (27, 1152, 16, 4304)),
    "27B": ((5120, 64, 17408, 24, 4, 48, False), (27, 1152, 16, 4304)),
    "35B-A3B": ((2048, 40, 0, 16, 2, 32, False), (27, 1152, 16, 4304)),
}
GRID = (1, 32, 32)  # patches of a picture of 512 × 512


class NoTokenizer:
    """Ids are given as they are."""

    vocab_size = 248_320

    def encode(self, text: str) -> list[int]:
        raise NotImplementedError

    def decode(self, ids: Any) -> str:
        return ""

    def token_bytes(self, token_id: int) -> bytes:
        return b""

    def token_id(self, token: str) -> int | None:
        return None


def config_of(size: str) -> QwenConfig:
    """The config of a published model."""
    (hidden, layers, wide, heads, kv_heads, value_heads, tied), (depth, dim, vision_heads, vision_wide) = (
        SIZES[size]
    )
    experts = {
        "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    }  # fmt: skip
    text = {
        "vocab_size": 248_320, "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": 256, "rms_norm_eps": 1e-6, "max_position_embeddings": 262_144,
        "linear_num_key_heads": 16, "linear_num_value_heads": value_heads, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "rope_parameters": {"rope_theta": 1e7},
        **({"intermediate_size": wide} if wide else experts),
    }  # fmt: skip
    vision = {
        "depth": depth, "hidden_size": dim, "num_heads": vision_heads, "intermediate_size": vision_wide,
        "patch_size": 16, "temporal_patch_size": 2, "spatial_merge_size": 2, "num_position_embeddings": 2304,
        "out_hidden_size": hidden,
    }  # fmt: skip
    ids = {"image_token_id": 248_056, "video_token_id": 248_057, "vision_start_token_id": 248_053,
           "vision_end_token_id": 248_054}  # fmt: skip
    values = {
        "model_type": "qwen3_5",
        "text_config": text,
        "vision_config": vision,
        "tie_word_embeddings": tied,
    }
    return QwenConfig.from_hf(values | ids)


def random_model(config: QwenConfig, device: torch.device, dtype: torch.dtype) -> QwenModel:
    """A model of ``config`` whose weights keep numbers at their size."""
    with torch.device("meta"):
        model = QwenModel(config, resolve_ops(device=device), dtype, page_size=16)
    model.to_empty(device=device)
    for parameter in model.parameters():
        parameter.normal_(0.0, parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.1)
    if config.tied:
        model.lm_head.weight = model.language_model.embed_tokens.weight
    return model.eval()


def milliseconds(device: torch.device, run: Callable[[], object], rounds: int) -> float:
    """The median of ``rounds``, after one more to warm up."""
    times = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        run()
        if device.type != "cpu":
            torch.get_device_module(device).synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[1:])


def layout(length: int, seed: int) -> Layout:
    ids = torch.randint(1000, 200_000, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return Layout(tokens=tuple(ids), positions=(tuple(range(length)),) * 3, decode_offset=(0, 0, 0))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="0.8B")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--bandwidth", type=float, default=None)
    args = parser.parse_args()
    device = resolve_device(args.device)
    dtype = resolve_dtype(args.dtype, device, torch.bfloat16)
    config = config_of(args.size)
    with torch.no_grad():
        model = random_model(config, device, dtype)
        driver = QwenDriver(config, model, NoTokenizer(), device)
        max_len = args.prompt + args.steps + 8
        loop = BareLoop(driver, max_rows=args.batch, max_len=max_len, dtype=dtype, device=device)
        print(f"Qwen 3.5 {args.size}, random weights, {dtype} on {describe(device)}")

        def prefill() -> list[BareSequence]:
            sequences = [loop.open(layout(args.prompt, seed)) for seed in range(args.batch)]
            driver.logits(loop.prefill(sequences))
            for sequence in sequences:
                loop.close(sequence)
            return sequences

        prefill_ms = milliseconds(device, prefill, 3)
        sequences = [loop.open(layout(args.prompt, seed)) for seed in range(args.batch)]
        loop.prefill(sequences)

        def step() -> None:
            for sequence in sequences:
                sequence.output.append(Token(1000))
            driver.logits(loop.prefill(sequences))

        step_ms = milliseconds(device, step, args.steps)
        patches = torch.randn(GRID[1] * GRID[2], config.vision.patch_values, device=device, dtype=dtype)
        tower_ms = milliseconds(device, lambda: model.visual(patches, [GRID]), 3)
    read = sum(p.numel() for n, p in model.language_model.named_parameters() if "embed_tokens" not in n)
    read = (read + model.lm_head.weight.numel()) * dtype.itemsize
    print(f"prefill {args.batch} × {args.prompt}: {prefill_ms:.1f} ms")
    print(f"decode step of {args.batch}: {step_ms:.2f} ms, {args.batch * 1e3 / step_ms:.1f} tokens/s", end="")
    if args.bandwidth and config.text.moe is None:
        print(f", share {read / args.bandwidth / 1e6 / step_ms:.0%} of {args.bandwidth:g} GB/s", end="")
    print(f"\ntower, 512 × 512 pixels: {tower_ms:.1f} ms")


if __name__ == "__main__":
    main()
