"""Training state on disk as safetensors only, in shards small enough to move around."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

SHARD_BYTES = 15 * 2**20


def save_shards(tensors: dict[str, Tensor], folder: Path, name: str) -> None:
    """Writes ``name-0.safetensors``, ``name-1`` … of at most ``SHARD_BYTES`` (unless one tensor is larger)."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob(f"{name}-*.safetensors"):
        old.unlink()
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for key, tensor in tensors.items():
        if size and size + tensor.nbytes > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][key] = tensor.contiguous()
        size += tensor.nbytes
    for i, shard in enumerate(shards):
        save_file(shard, folder / f"{name}-{i}.safetensors")


def load_shards(folder: Path, name: str) -> dict[str, Tensor]:
    """All tensors of ``name``; empty when nothing is there."""
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob(f"{name}-*.safetensors")):
        tensors |= load_file(path)
    return tensors


def optimizer_tensors(optimizer: torch.optim.Optimizer, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """First and second moments by parameter name."""
    moments = {}
    for name, parameter in named.items():
        if state := optimizer.state.get(parameter):
            moments |= {f"m.{name}": state["exp_avg"], f"v.{name}": state["exp_avg_sq"]}
    return moments


def restore_moments(
    optimizer: torch.optim.Optimizer, named: Mapping[str, Tensor], saved: dict[str, Tensor], step: int
) -> None:
    for name, parameter in named.items():
        if f"m.{name}" in saved:
            optimizer.state[parameter] = {
                "step": torch.tensor(float(step), device=parameter.device),
                "exp_avg": saved[f"m.{name}"].to(parameter.device),
                "exp_avg_sq": saved[f"v.{name}"].to(parameter.device),
            }
