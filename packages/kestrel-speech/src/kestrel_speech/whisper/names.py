"""Tensor names of the two published layouts, as names in ``WhisperModel``."""

from __future__ import annotations

import re

__all__ = ["KEY_BIAS", "KEY_WEIGHT", "parameter_name"]

# The keys' projections, which have no bias in a checkpoint.
KEY_WEIGHT = re.compile(r"(?P<stem>.*attn\.(k_proj|key))\.weight")
KEY_BIAS = re.compile(r"(?P<stem>.*attn\.(k_proj|key))\.bias")

_ORIGINAL = {
    "encoder.positional_embedding": "encoder.embed_positions.weight",
    "encoder.ln_post": "encoder.layer_norm",
    "decoder.token_embedding": "decoder.embed_tokens",
    "decoder.positional_embedding": "decoder.embed_positions.weight",
    "decoder.ln": "decoder.layer_norm",
}
_ORIGINAL_BLOCK = {
    "attn": "self_attn",
    "attn_ln": "self_attn_layer_norm",
    "cross_attn": "encoder_attn",
    "cross_attn_ln": "encoder_attn_layer_norm",
    "mlp.0": "fc1",
    "mlp.2": "fc2",
    "mlp_ln": "final_layer_norm",
    "query": "q_proj",
    "key": "k_proj",
    "value": "v_proj",
    "out": "out_proj",
}
_BLOCK = re.compile(
    r"(encoder|decoder)\.blocks\.(\d+)\.(attn|cross_attn|mlp\.\d|\w+_ln)\.(?:(query|key|value|out)\.)?(\w+)"
)
_PARTS = re.compile(r"(self_attn|encoder_attn)\.([qkv])_proj\.")


def parameter_name(name: str) -> str:
    """The module's name of a tensor of either layout; a name of neither comes back as it is."""
    name = name.removeprefix("model.")
    if block := _BLOCK.fullmatch(name):
        half, layer, part, projection, leaf = block.groups()
        middle = [_ORIGINAL_BLOCK[part]] + ([_ORIGINAL_BLOCK[projection]] if projection else [])
        name = ".".join([half, "layers", layer, *middle, leaf])
    for theirs, ours in _ORIGINAL.items():
        if name == theirs or name.startswith(theirs + "."):
            name = ours + name[len(theirs) :]
    return _PARTS.sub(_packed, name)


def _packed(match: re.Match[str]) -> str:
    """Projections that are one product here."""
    attention, part = match.groups()
    if attention == "self_attn":
        return f"self_attn.qkv.{part}."
    return "encoder_attn.q_proj." if part == "q" else f"encoder_attn.kv.{part}."
