"""Writes the shipped files (config.json, model.safetensors) from a training folder, and reads them back.

python -m training.export --run training/runs/ck --dtype float16
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from . import phrases as p
from . import pieces
from . import tokenizer as nano_tokenizer
from .checkpoint import load_shards
from .model import NanoConfig, NanoModel
from .tokenizer import NANO_DIR

TEXT = ("dim", "ff_dim", "n_layers", "vocab_size", "max_context", "n_heads", "rope_theta")
VISION = ("enc_dim", "enc_patch_size", "enc_n_layers", "enc_ff_dim", "enc_n_heads", "crop_size", "max_crops",
          "overlap_margin", "proj_inner_dim")  # fmt: skip
REGION = ("coord_feat_dim", "coord_out_dim", "size_feat_dim", "size_out_dim", "inner_dim")


def config_json(c: NanoConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """The config in Moondream's layout, templates included."""

    def skill(name: str) -> list[int]:
        return [pieces.SKILL_OPEN, *tokenizer.encode(name, add_special_tokens=False).ids, pieces.SKILL_CLOSE]

    def length(name: str) -> list[int]:
        return [*skill("describe"), *tokenizer.encode(name, add_special_tokens=False).ids, pieces.ANSWER]

    sizes = c.to_dict()
    templates: dict[str, Any] = {
        name: {"prefix": skill(name), "suffix": [pieces.ANSWER]} for name in ("query", "detect", "point")
    }
    templates["caption"] = {name: length(name) for name in ("short", "normal", "long")}
    return {
        "model_type": "moondream1",
        "config": {
            "text": {name: sizes[name] for name in TEXT} | {"n_kv_heads": c.n_heads},
            "vision": {name: sizes[name] for name in VISION} | {"proj_out_dim": c.dim, "in_channels": 3},
            "region": {name: sizes[name] for name in REGION} | {"dim": c.dim},
            "tokenizer": {
                "bos_id": pieces.EOS, "eos_id": pieces.EOS, "answer_id": pieces.ANSWER, "thinking_id": pieces.THINK,
                "coord_id": pieces.COORD, "size_id": pieces.SIZE, "start_ground_points_id": pieces.GROUND_OPEN,
                "end_ground_id": pieces.GROUND_CLOSE, "templates": templates,
            },
        },
    }  # fmt: skip


def write(weights: dict[str, Tensor], c: NanoConfig, folder: Path, dtype: torch.dtype) -> None:
    """Puts config.json and model.safetensors, every name prefixed ``model.``, into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    config = config_json(c, nano_tokenizer.load())
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tensors = {f"model.{name}": tensor.to(dtype).contiguous() for name, tensor in weights.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def read(folder: Path = NANO_DIR, dtype: torch.dtype = torch.float32) -> NanoModel:
    """The shipped model as a training module."""
    inner = json.loads((folder / "config.json").read_text())["config"]
    sizes = {
        name: inner[part][name]
        for part, names in (("text", TEXT), ("vision", VISION), ("region", REGION))
        for name in names
    }
    model = NanoModel(NanoConfig(**sizes))
    tensors = load_file(folder / "model.safetensors")
    model.load_state_dict(
        {name.removeprefix("model."): tensor.float() for name, tensor in tensors.items()}, strict=True
    )
    return model.to(dtype).eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--folder", type=Path, default=NANO_DIR)
    parser.add_argument("--dtype", choices=["float16", "bfloat16"], default="float16")
    args = parser.parse_args()
    write(load_shards(args.run, "average"), NanoConfig(), args.folder, getattr(torch, args.dtype))
    size = (args.folder / "model.safetensors").stat().st_size
    print(f"{args.folder / 'model.safetensors'}: {size:,} bytes, {len(p.QUESTION_NAMES)} kinds of question")


if __name__ == "__main__":
    main()
