"""The published names of every tensor, written out from the specification: Hugging Face layout and original layout."""

from __future__ import annotations

VISUAL = "vision_encoder.encoder.model.visual"
TEXT = "text_model.transformer"


def _both(ours: str, original: str) -> list[tuple[str, str]]:
    return [(f"{ours}.{kind}", f"{original}.{kind}") for kind in ("weight", "bias")]


def original_names(vision_layers: int, text_layers: int) -> dict[str, str]:
    """Names without ``model.`` to names of the original layout."""
    pairs = _both("vision.patch_emb", f"{VISUAL}.patch_embed.linear")
    pairs.append(("vision.pos_emb", f"{VISUAL}.pos_embed"))
    for n in range(vision_layers):
        pairs += _both(f"vision.blocks.{n}.ln1", f"{VISUAL}.blocks.{n}.norm1")
        pairs += _both(f"vision.blocks.{n}.ln2", f"{VISUAL}.blocks.{n}.norm2")
        for part in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2"):
            pairs += _both(f"vision.blocks.{n}.{part}", f"{VISUAL}.blocks.{n}.{part}")
    pairs += _both("vision.post_ln", f"{VISUAL}.norm")
    pairs += _both("vision.proj_mlp.fc1", "vision_encoder.projection.mlp.fc1")
    pairs += _both("vision.proj_mlp.fc2", "vision_encoder.projection.mlp.fc2")
    pairs.append(("text.wte", f"{TEXT}.embd.wte.weight"))
    for n in range(text_layers):
        block, original = f"text.blocks.{n}", f"{TEXT}.h.{n}"
        pairs += _both(f"{block}.ln", f"{original}.ln")
        pairs += _both(f"{block}.attn.qkv", f"{original}.mixer.Wqkv")
        pairs += _both(f"{block}.attn.proj", f"{original}.mixer.out_proj")
        pairs += _both(f"{block}.mlp.fc1", f"{original}.mlp.fc1") + _both(
            f"{block}.mlp.fc2", f"{original}.mlp.fc2"
        )
    pairs += _both("text.post_ln", "text_model.lm_head.ln") + _both(
        "text.lm_head", "text_model.lm_head.linear"
    )
    pairs.append(("region.coord_features", "region_model.coordinate_features.weight"))
    pairs.append(("region.size_features", "region_model.size_features.weight"))
    pairs += _both("region.coord_encoder", "region_model.coordinate_encoder")
    pairs += _both("region.size_encoder", "region_model.size_encoder")
    for layer in ("fc1", "fc2"):
        pairs += _both(f"region.coord_decoder.{layer}", f"region_model.coordinate_decoder.{layer}")
        pairs += _both(f"region.size_decoder.{layer}", f"region_model.size_decoder.{layer}")
    return dict(pairs)


def published_shapes() -> dict[str, tuple[int, ...]]:
    """Every tensor of the published 2B model in the Hugging Face layout, without ``model.``."""
    shapes: dict[str, tuple[int, ...]] = {"vision.pos_emb": (1, 729, 1152), "text.wte": (51200, 2048)}

    def linear(name, outputs, inputs):
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = (outputs, inputs), (outputs,)

    def norm(name, width):
        shapes[f"{name}.weight"] = shapes[f"{name}.bias"] = (width,)

    linear("vision.patch_emb", 1152, 588)
    for n in range(27):
        block = f"vision.blocks.{n}"
        norm(f"{block}.ln1", 1152)
        norm(f"{block}.ln2", 1152)
        linear(f"{block}.attn.qkv", 3456, 1152)
        linear(f"{block}.attn.proj", 1152, 1152)
        linear(f"{block}.mlp.fc1", 4304, 1152)
        linear(f"{block}.mlp.fc2", 1152, 4304)
    norm("vision.post_ln", 1152)
    linear("vision.proj_mlp.fc1", 8192, 2304)
    linear("vision.proj_mlp.fc2", 2048, 8192)
    for n in range(24):
        block = f"text.blocks.{n}"
        norm(f"{block}.ln", 2048)
        linear(f"{block}.attn.qkv", 6144, 2048)
        linear(f"{block}.attn.proj", 2048, 2048)
        linear(f"{block}.mlp.fc1", 8192, 2048)
        linear(f"{block}.mlp.fc2", 2048, 8192)
    norm("text.post_ln", 2048)
    linear("text.lm_head", 51200, 2048)
    shapes |= {"region.coord_features": (1, 128), "region.size_features": (2, 256)}
    linear("region.coord_encoder", 2048, 256)
    linear("region.size_encoder", 2048, 512)
    linear("region.coord_decoder.fc1", 8192, 2048)
    linear("region.coord_decoder.fc2", 1024, 8192)
    linear("region.size_decoder.fc1", 8192, 2048)
    linear("region.size_decoder.fc2", 2048, 8192)
    return shapes
