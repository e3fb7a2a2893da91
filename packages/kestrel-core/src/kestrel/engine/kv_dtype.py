"""The dtypes of a model's state, where ``kv_cache_dtype`` and ``recurrent_dtype`` ask for others than its own."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

import torch

from kestrel.config import RuntimeConfig
from kestrel.errors import InvalidRequestError
from kestrel.spi import Built, PagedKV, Recurrent, StateSpec, StepDriver, WindowKV

__all__ = ["TORCH_NAMES", "check_recurrent_dtype", "kv_dtype_of", "lack_of_8_bits", "set_kv_dtype"]

TORCH_NAMES = MappingProxyType({"auto": "auto", "fp8_e4m3": "float8_e4m3fn"})  # by what settings say
OLDEST = (8, 9)  # compute capability of CUDA devices that convert floats of 8 bits


def kv_dtype_of(config: RuntimeConfig, device: torch.device) -> str:
    """The torch name of what pages hold, or "auto"; InvalidRequestError where ``device`` cannot hold it."""
    name = TORCH_NAMES[config.kv_cache_dtype]
    if name != "auto" and (lack := lack_of_8_bits(device)):
        raise InvalidRequestError(
            f"kv_cache_dtype {config.kv_cache_dtype!r} was asked for, and {lack}. "
            "Use kv_cache_dtype 'auto', or another device."
        )
    return name


def set_kv_dtype(built: Built, name: str, config: RuntimeConfig) -> None:
    """Declare ``name`` for the pages of ``built`` that have no dtype of their own; InvalidRequestError when there are
    none."""
    driver = built.main
    if name == "auto":
        return
    states = () if isinstance(driver, StepDriver) else driver.spec.states
    changed = tuple(_kept_in(name, state) for state in states)
    if isinstance(driver, StepDriver) or changed == states:
        raise InvalidRequestError(
            f"kv_cache_dtype {config.kv_cache_dtype!r} was asked for, and {config.label} keeps no keys and values in "
            "pages whose dtype is free. Use kv_cache_dtype 'auto'."
        )
    driver.spec = replace(driver.spec, states=changed)


def check_recurrent_dtype(built: Built, config: RuntimeConfig) -> None:
    """InvalidRequestError where ``recurrent_dtype`` asks for less than float32 and no state of ``built`` follows it."""
    name = config.recurrent_dtype
    states = () if isinstance(built.main, StepDriver) else built.main.spec.states
    parts = [part for state in states if isinstance(state, Recurrent) for part in state.parts]
    if name != "float32" and not any(part.dtype == name for part in parts):
        raise InvalidRequestError(
            f"recurrent_dtype {name!r} was asked for, and {config.label} keeps no state of linear attention in it. "
            "Leave recurrent_dtype out."
        )


def _kept_in(name: str, state: StateSpec) -> StateSpec:
    if isinstance(state, PagedKV | WindowKV) and state.dtype == "auto":
        return replace(state, dtype=name)
    return state


def lack_of_8_bits(device: torch.device) -> str:
    """Why ``device`` has no floats of 8 bits, "" where it has."""
    if device.type == "cpu":
        return ""
    if device.type != "cuda":
        return f"{device.type} devices have no floats of 8 bits"
    found = torch.cuda.get_device_capability(device)
    if found < OLDEST:
        return f"{device} has compute capability {found[0]}.{found[1]}, less than {OLDEST[0]}.{OLDEST[1]}"
    return ""
