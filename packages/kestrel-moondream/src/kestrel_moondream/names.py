"""Tensor names of Moondream checkpoints: which model a file holds, and each tensor's name in ``MoondreamModel``.

Two layouts exist. The Hugging Face one is ours with a ``model.`` prefix; the original one is renamed here.
"""

from __future__ import annotations

import re
from collections.abc import Collection

__all__ = ["PACKED", "is_moondream", "is_moondream3", "parameter_name"]

# In order: the first pattern that matches a name's beginning renames it.
_VISUAL = "vision_encoder.encoder.model.visual."
_RENAMES = [
    (re.compile(pattern), ours)
    for pattern, ours in (
        (rf"{re.escape(_VISUAL)}patch_embed\.linear\.", "vision.patch_emb."),
        (rf"{re.escape(_VISUAL)}pos_embed", "vision.pos_emb"),
        (rf"{re.escape(_VISUAL)}blocks\.(\d+)\.norm([12])\.", r"vision.blocks.\1.ln\2."),
        (rf"{re.escape(_VISUAL)}blocks\.", "vision.blocks."),
        (rf"{re.escape(_VISUAL)}norm\.", "vision.post_ln."),
        (r"vision_encoder\.projection\.mlp\.", "vision.proj_mlp."),
        (r"text_model\.transformer\.embd\.wte\.weight", "text.wte"),
        (r"text_model\.transformer\.h\.(\d+)\.mixer\.Wqkv\.", r"text.blocks.\1.attn.qkv."),
        (r"text_model\.transformer\.h\.(\d+)\.mixer\.out_proj\.", r"text.blocks.\1.attn.proj."),
        (r"text_model\.transformer\.h\.", "text.blocks."),
        (r"text_model\.lm_head\.ln\.", "text.post_ln."),
        (r"text_model\.lm_head\.linear\.", "text.lm_head."),
        (r"region_model\.(coord|size)(?:inate)?_features\.weight", r"region.\1_features"),
        (r"region_model\.coordinate_", "region.coord_"),
        (r"region_model\.", "region."),
        (r"model\.(?=text\.|vision\.|region\.)", ""),
    )
]
_MOONDREAM = re.compile(r"(model\.)?text\.blocks\.0\.|text_model\.transformer\.h\.0\.")
_VISION = re.compile(r"(model\.)?vision\.blocks\.0\.|vision_encoder\.")
_MOONDREAM3 = re.compile(
    r"\.tau[._]|\.tau_wq|\.mlp\.(router|experts|output_experts)\.|\.moe_quant\.|\.h\.\d+\.gate\."
)
PACKED = (".weight.packed", ".weight.scale", ".weight.zero_point")


def parameter_name(name: str) -> str:
    """The parameter of ``MoondreamModel`` that checkpoint tensor ``name`` holds; ``name`` itself if it is unknown."""
    name = name.replace("._orig_mod", "").replace("_orig_mod.", "")
    for pattern, ours in _RENAMES:
        renamed, found = pattern.subn(ours, name, count=1) if pattern.match(name) else (name, 0)
        if found:
            return renamed
    return name


def is_moondream(names: Collection[str]) -> bool:
    """A checkpoint of this family, of any generation."""
    return any(_MOONDREAM.match(n) for n in names) and any(_VISION.match(n) for n in names)


def is_moondream3(names: Collection[str]) -> bool:
    """It has expert or attention-temperature tensors."""
    return any(_MOONDREAM3.search(n) for n in names)
