"""Names of tensors: from any published layout to the parameters of ``QwenModel``. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Collection

__all__ = ["IGNORED", "is_qwen", "parameter_name"]

IGNORED = {"mtp.*": "the head that drafts tokens ahead; Kestrel decodes without drafts"}
# The first match at the beginning of a name is replaced; text-only checkpoints have ``model.`` alone.
_PREFIXES = (
    (re.compile(r"model\.language_model\."), "language_model."),
    (re.compile(r"model\.visual\."), "visual."),
    (re.compile(r"model\.(?=embed_tokens\.|layers\.|norm\.)"), "language_model."),
)
_PARTS = (
    (re.compile(r"\.self_attn\.([qkv]_proj)\."), r".self_attn.qkv.\1."),
    (re.compile(r"\.linear_attn\.in_proj_(qkv|z|b|a)\."), r".linear_attn.in_proj.\1."),
    (re.compile(r"\.linear_attn\.(conv1d|norm)\.weight$"), r".linear_attn.\1"),
    (re.compile(r"\.(mlp|shared_expert)\.(gate|up)_proj\."), r".\1.fc1.\2."),
    (re.compile(r"\.(mlp|shared_expert)\.down_proj\."), r".\1.fc2."),
    (re.compile(r"^visual\.patch_embed\.proj\."), "visual.patch_embed."),
    (re.compile(r"^visual\.pos_embed\.weight$"), "visual.pos_embed"),
    (re.compile(r"^visual\.merger\.linear_fc"), "visual.merger.mlp.fc"),
    (re.compile(r"^(visual\.blocks\.\d+\.mlp)\.linear_fc"), r"\1.fc"),
)
# 8-bit projections begin at whole blocks of rows: those of the gates lie apart.
_SCALED = ((re.compile(r"\.linear_attn\.in_proj_(b|a)\."), r".linear_attn.gates_proj.\1."),)
_DELTA = re.compile(r"model\.(language_model\.)?layers\.\d+\.linear_attn\.in_proj_qkv\.weight")


def parameter_name(name: str, *, scaled: bool = False) -> str:
    """The parameter of ``QwenModel``, or the part of one, that tensor ``name`` holds; ``name`` if unknown. ``scaled``:
    as the model was built with."""
    for pattern, ours in _PREFIXES:
        if pattern.match(name):
            name = pattern.sub(ours, name, count=1)
            break
    for pattern, ours in _SCALED + _PARTS if scaled else _PARTS:
        renamed, found = pattern.subn(ours, name, count=1)
        if found:
            return renamed
    return name


def is_qwen(names: Collection[str]) -> bool:
    """It has gated DeltaNet mixers whose projections are split as in Qwen 3.5."""
    return any(_DELTA.fullmatch(name) for name in names)
