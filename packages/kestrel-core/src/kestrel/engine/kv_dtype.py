"""The dtypes of a model's state, where ``kv_cache_dtype`` and ``recurrent_dtype`` ask for others than its own."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

import torch

from kestrel.config import RuntimeConfig
from kestrel.errors import InvalidRequestError
from kestrel.spi import Built, PagedKV, Recurrent, StateSpec, StepDriver, WindowKV

__all__ = ["check_recurrent_dtype", "kv_dtype_of", "set_kv_dtype", "torch_name"]

_TORCH_NAMES = MappingProxyType({"auto": "auto", "fp8_e4m3": "float8_e4m3fn"})  # by what settings say
OLDEST = (8, 9)  # compute capability of CUDA devices that convert floats of 8 bits


def torch_name(setting: str, asked: str, device: torch.device) -> str:
    """The torch name of the dtype that ``setting`` asks for, or "auto"; InvalidRequestError where ``device`` has none
    such."""
    name = _TORCH_NAMES[asked]
    if name != "auto" and (lack := _lack_of_8_bits(device)):
        raise InvalidRequestError(
            f"{setting} {asked!r} was asked for, and {lack}. "
            f"Use {setting} 'auto', or a CUDA device of compute capability {OLDEST[0]}.{OLDEST[1]} or newer."
        )
    return name


def kv_dtype_of(config: RuntimeConfig, device: torch.device) -> str:
    """The torch name of what pages hold, as ``torch_name``."""
    return torch_name("kv_cache_dtype", config.kv_cache_dtype, device)


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


def _lack_of_8_bits(device: torch.device) -> str:
    """Why ``device`` has no floats of 8 bits, "" where it has."""
    if device.type == "cpu":
        return ""
    if device.type != "cuda":
        return f"{device.type} devices have no floats of 8 bits"
    found = torch.cuda.get_device_capability(device)
    if found < OLDEST:
        return f"{device} has compute capability {found[0]}.{found[1]}, less than {OLDEST[0]}.{OLDEST[1]}"
    return ""
