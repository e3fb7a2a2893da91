"""How much memory a model may use on its device: weights first, then what launches take, then state."""

from __future__ import annotations

import gc
import math
from dataclasses import dataclass, replace

import torch

from kestrel.device import free_memory, resolve_dtype, total_memory
from kestrel.engine.loading import Blueprint
from kestrel.errors import CapacityError

__all__ = ["Demand", "plan_memory", "return_memory", "settle_memory"]

HOST_KV_LIMIT = 2 * 2**30  # api.md: CPU and MPS default to min(2 GiB, 25 % of free memory)
HOST_KV_SHARE = 0.25
GPU_SHARE = 0.9
WORKSPACE_SHARE = 0.1  # activations and allocator slack of a model whose launches are not measured
PROGRAM_BYTES = 256 * 2**20  # what a driver keeps of some hundred captured programs, beside their activations

_SCALES = "_scale_inv"  # what block FP8 checkpoints call the scales of a weight
_SAFETENSORS_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a model gets: its compute dtype, its weights' bytes, and the bytes of its state pools.

    ``kv_pages`` wins over ``kv_bytes`` when the user fixed it. ``setting`` names the setting that decided.
    ``sharers``: models that share what is left, this one included. ``account``: where the device's memory goes, in
    words, once that was measured.
    """

    dtype: torch.dtype
    weight_bytes: int
    kv_bytes: int
    kv_pages: int | None
    setting: str
    sharers: int = 1
    account: str = ""


def plan_memory(blueprint: Blueprint, device: torch.device, sharers: int) -> Demand:
    """The memory of one model. ``sharers``: models still to be loaded on ``device``, this one included.

    An explicit ``kv_cache_bytes`` or ``kv_cache_pages`` is taken as it is; else state gets an equal share of what
    is left. Raises CapacityError with the numbers when the weights do not fit.
    """
    config = blueprint.config
    dtype = resolve_dtype(config.dtype, device, _checkpoint_dtype(blueprint))
    weights = _weight_bytes(blueprint, dtype, device)
    free = free_memory(device)
    if weights > free:
        raise CapacityError(
            f"model {blueprint.card.model_id!r} needs {_gib(weights)} for its weights as "
            f"{str(dtype).removeprefix('torch.')}, and {device} has {_gib(free)} free. "
            "Choose a smaller dtype or model, another device, or free memory."
        )
    left = free - weights
    if config.kv_cache_bytes is not None:
        kv_bytes, setting = config.kv_cache_bytes, "kv_cache_bytes"
    elif config.memory_utilization is not None:
        allowed = (
            int(total_memory(device) * config.memory_utilization) - (total_memory(device) - free) - weights
        )
        kv_bytes, setting = max(0, allowed) // max(1, sharers), "memory_utilization"
    elif device.type == "cuda":
        kv_bytes = int(left * GPU_SHARE * (1 - WORKSPACE_SHARE)) // max(1, sharers)
        setting = "memory_utilization"
    else:
        kv_bytes = min(HOST_KV_LIMIT, int(left * HOST_KV_SHARE)) // max(1, sharers)
        setting = "kv_cache_bytes"
    if config.kv_cache_bytes is not None and kv_bytes > left:
        raise CapacityError(
            f"kv_cache_bytes is {_gib(kv_bytes)}, and {device} has {_gib(left)} left beside the weights of "
            f"{blueprint.card.model_id!r} ({_gib(weights)}). Lower kv_cache_bytes."
        )
    return Demand(
        dtype=dtype,
        weight_bytes=weights,
        kv_bytes=kv_bytes,
        kv_pages=config.kv_cache_pages,
        setting=setting,
        sharers=max(1, sharers),
    )


def settle_memory(
    demand: Demand, blueprint: Blueprint, device: torch.device, *, launch_bytes: int, captures: bool
) -> Demand:
    """``demand`` with the bytes of state that there is room for, now that the weights are on ``device``.

    ``launch_bytes``: what launches were seen to take. ``captures``: programs are captured, which keep activations of
    their own. Raises CapacityError with all numbers when nothing is left, or less than ``kv_cache_bytes``.
    """
    config, model_id = blueprint.config, blueprint.card.model_id
    total, free = total_memory(device), free_memory(device)
    share = config.memory_utilization or GPU_SHARE
    program_bytes = launch_bytes + PROGRAM_BYTES if captures else 0
    usable = total if config.kv_cache_bytes is not None else int(total * share)
    left = usable - (total - free) - launch_bytes - program_bytes
    others = max(0, total - free - demand.weight_bytes)
    account = (
        f"Of {_gib(usable)} that {model_id!r} may use of {device}'s {_gib(total)}, its weights take "
        f"{_gib(demand.weight_bytes)}, others {_gib(others)}, its largest launches "
        f"({config.max_batched_tokens} tokens, {config.max_batch_size} rows) {_gib(launch_bytes)} "
        f"and captured programs {_gib(program_bytes)}"
    )
    if config.kv_cache_bytes is not None:
        if demand.kv_bytes > left:
            raise CapacityError(
                f"kv_cache_bytes is {_gib(demand.kv_bytes)}. {account}: {_gib(max(0, left))} are left. "
                "Lower kv_cache_bytes, max_batched_tokens or max_batch_size."
            )
        return replace(demand, account=account)
    if left <= 0 and config.kv_cache_pages is None:
        raise CapacityError(
            f"no memory is left for state. {account}: {_gib(-left)} too much. Raise memory_utilization "
            f"({share:g}), lower max_batched_tokens or max_batch_size, free memory, or choose a smaller dtype or model."
        )
    return replace(demand, kv_bytes=max(0, left) // demand.sharers, account=account)


def return_memory(device: torch.device) -> None:
    """Give back what an unloaded model held: its objects name each other, and allocators keep what they had."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif device.type == "mps":
        torch.mps.empty_cache()


def _checkpoint_dtype(blueprint: Blueprint) -> torch.dtype | None:
    sizes: dict[str, int] = {}
    for name, tensor in blueprint.card.tensors.items():
        if not name.endswith(_SCALES):
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + 1
    known = {name: count for name, count in sizes.items() if name in _SAFETENSORS_DTYPES}
    return _SAFETENSORS_DTYPES[max(known, key=lambda name: known[name])] if known else None


def _weight_bytes(blueprint: Blueprint, dtype: torch.dtype, device: torch.device) -> int:
    """Bytes of the weights on ``device``; block FP8 ones count as the byte that they are where they are kept. On
    accelerators that is wherever a backend serves them, which is not known before they are loaded. Where encoders
    and prefill multiply in 8 bits, each matrix counts as kept in those as well."""
    wanted = blueprint.config.fp8_weights
    keeps = wanted == "keep" or (wanted == "auto" and device.type == "cuda")
    has_twins = blueprint.config.prefill_dtype != "auto"
    total = 0
    for tensor in blueprint.card.tensors.values():
        size = 1 if keeps and tensor.dtype.startswith("F8_") else dtype.itemsize
        total += math.prod(tensor.shape) * (size + (has_twins and len(tensor.shape) == 2))
    return total


def _gib(num_bytes: int) -> str:
    if num_bytes < 2**20:
        return f"{num_bytes:,} bytes"
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**28 else f"{num_bytes / 2**20:.1f} MiB"
