"""Small checkpoints, written with the safetensors library."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a checkpoint and returns its directory: ``write({"a": tensor})``, or shards ``write({…}, {…})``."""

    def write(*shards: dict[str, torch.Tensor], config: object = None, index: bool = True) -> Path:
        names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
        names = ["model.safetensors"] if len(shards) == 1 else names
        for name, tensors in zip(names, shards, strict=True):
            save_file(tensors, tmp_path / name)
        if len(shards) > 1 and index:
            places = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
            (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
        if config is not None:
            (tmp_path / "config.json").write_text(json.dumps(config))
        return tmp_path

    return write
