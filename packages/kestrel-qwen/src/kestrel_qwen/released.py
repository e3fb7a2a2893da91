"""The tensors of a checkpoint in the released layout: every name with its shape. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from kestrel_qwen.config import MoEConfig, QwenConfig, TextConfig, VisionConfig

__all__ = ["released_shapes"]

Shaped = tuple[str, tuple[int, ...]]


def released_shapes(config: QwenConfig) -> dict[str, tuple[int, ...]]:
    """Name to shape of each tensor of ``config`` as released (text-only models: with ``model.`` alone)."""
    text = config.text
    prefix = "model." if config.vision is None else "model.language_model."
    found: dict[str, tuple[int, ...]] = {f"{prefix}embed_tokens.weight": (text.vocab_size, text.hidden_size)}
    found[f"{prefix}norm.weight"] = (text.hidden_size,)
    for layer, kind in enumerate(text.layers):
        mixer = _attention(text) if kind == "full_attention" else _delta(text)
        for name, shape in (*_norms(text.hidden_size), *mixer, *_feed_forward(text)):
            found[f"{prefix}layers.{layer}.{name}"] = shape
    if config.vision is not None:
        found |= {f"model.visual.{name}": shape for name, shape in _tower(config.vision)}
    if not config.tied:
        found["lm_head.weight"] = (text.vocab_size, text.hidden_size)
    return found


def _norms(dim: int) -> Iterator[Shaped]:
    yield "input_layernorm.weight", (dim,)
    yield "post_attention_layernorm.weight", (dim,)


def _attention(text: TextConfig) -> Iterator[Shaped]:
    dim, width, kv_width = text.hidden_size, text.heads * text.head_dim, text.kv_heads * text.head_dim
    yield "self_attn.q_proj.weight", (2 * width, dim)
    yield "self_attn.k_proj.weight", (kv_width, dim)
    yield "self_attn.v_proj.weight", (kv_width, dim)
    yield "self_attn.o_proj.weight", (dim, width)
    yield "self_attn.q_norm.weight", (text.head_dim,)
    yield "self_attn.k_norm.weight", (text.head_dim,)


def _delta(text: TextConfig) -> Iterator[Shaped]:
    delta, dim = text.delta, text.hidden_size
    width = delta.heads * delta.value_dim
    for part, rows in {"qkv": delta.channels, "z": width, "b": delta.heads, "a": delta.heads}.items():
        yield f"linear_attn.in_proj_{part}.weight", (rows, dim)
    yield "linear_attn.conv1d.weight", (delta.channels, 1, delta.taps)
    yield "linear_attn.A_log", (delta.heads,)
    yield "linear_attn.dt_bias", (delta.heads,)
    yield "linear_attn.norm.weight", (delta.value_dim,)
    yield "linear_attn.out_proj.weight", (dim, width)


def _feed_forward(text: TextConfig) -> Iterator[Shaped]:
    dim = text.hidden_size
    if text.moe is None:
        assert text.intermediate_size is not None
        yield from _mlp("mlp", dim, text.intermediate_size)
        return
    moe: MoEConfig = text.moe
    yield "mlp.gate.weight", (moe.experts, dim)
    yield "mlp.experts.gate_up_proj", (moe.experts, 2 * moe.intermediate_size, dim)
    yield "mlp.experts.down_proj", (moe.experts, dim, moe.intermediate_size)
    yield from _mlp("mlp.shared_expert", dim, moe.shared_intermediate_size)
    yield "mlp.shared_expert_gate.weight", (1, dim)


def _mlp(name: str, dim: int, hidden: int) -> Iterator[Shaped]:
    yield f"{name}.gate_proj.weight", (hidden, dim)
    yield f"{name}.up_proj.weight", (hidden, dim)
    yield f"{name}.down_proj.weight", (dim, hidden)


def _tower(vision: VisionConfig) -> Iterator[Shaped]:
    dim, hidden, patch = vision.hidden_size, vision.intermediate_size, vision.patch_size
    yield from _linear("patch_embed.proj", dim, (3, vision.temporal_patch_size, patch, patch))
    yield "pos_embed.weight", (vision.num_position_embeddings, dim)
    for layer in range(vision.depth):
        block = f"blocks.{layer}"
        for norm in ("norm1", "norm2"):
            yield from _linear(f"{block}.{norm}", dim, ())
        yield from _linear(f"{block}.attn.qkv", 3 * dim, (dim,))
        yield from _linear(f"{block}.attn.proj", dim, (dim,))
        yield from _linear(f"{block}.mlp.linear_fc1", hidden, (dim,))
        yield from _linear(f"{block}.mlp.linear_fc2", dim, (hidden,))
    wide = dim * vision.spatial_merge_size**2
    yield from _linear("merger.norm", dim, ())
    yield from _linear("merger.linear_fc1", wide, (wide,))
    yield from _linear("merger.linear_fc2", vision.out_hidden_size, (wide,))


def _linear(name: str, rows: int, inputs: tuple[int, ...]) -> Iterator[Shaped]:
    yield f"{name}.weight", (rows, *inputs)
    yield f"{name}.bias", (rows,)
