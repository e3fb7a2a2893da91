"""Choosing a device and a dtype. Reads no settings; the engine passes them in."""

from __future__ import annotations

import platform

import torch

from kestrel.errors import InvalidRequestError, closest

__all__ = ["describe", "has_streams", "resolve_device", "resolve_dtype", "use_device"]

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def resolve_device(name: str = "auto") -> torch.device:
    """The device that ``name`` means here: "auto" is CUDA, else MPS, else CPU; "cuda" is "cuda:0".

    Raises InvalidRequestError when it is not on this machine, saying what is.
    """
    kind, _, index = name.partition(":")
    here = _present()
    if kind == "auto":
        return torch.device("cuda", 0) if "cuda" in here else torch.device(here[0])
    if kind not in ("cpu", "cuda", "mps"):
        raise InvalidRequestError(f"device is {name!r}. {closest(kind, ['auto', 'cpu', 'cuda', 'mps'])}")
    if kind not in here:
        raise InvalidRequestError(
            f"device {name!r} was asked for, but torch {torch.__version__} finds only {', '.join(here)} here; "
            f"use device='auto', or install a torch build and driver for {kind}"
        )
    if kind != "cuda":
        return torch.device(kind)
    number = int(index or 0)
    if number >= torch.cuda.device_count():
        raise InvalidRequestError(
            f"device {name!r} was asked for, but there are {torch.cuda.device_count()} CUDA devices; "
            f"use cuda:0 to cuda:{torch.cuda.device_count() - 1}"
        )
    return torch.device("cuda", number)


def resolve_dtype(
    name: str, device: torch.device, checkpoint_dtype: torch.dtype | None = None
) -> torch.dtype:
    """The dtype that ``name`` means on ``device``.

    "auto" is float32 on CPU (bfloat16 is many times slower on most), float16 on MPS, and on CUDA the checkpoint's
    (bfloat16 when it has none, or one that is no floating 16 or 32 bit type, or when the GPU lacks bfloat16: float16).
    Raises InvalidRequestError for another name.
    """
    if name in _DTYPES:
        return _DTYPES[name]
    if name != "auto":
        raise InvalidRequestError(f"dtype is {name!r}. {closest(name, ['auto', *_DTYPES])}")
    if device.type == "cpu":
        return torch.float32
    if device.type == "mps":
        return torch.float16
    wanted = checkpoint_dtype or torch.bfloat16
    if wanted not in _DTYPES.values():
        wanted = torch.bfloat16
    has_bfloat16 = device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)
    return torch.float16 if wanted is torch.bfloat16 and not has_bfloat16 else wanted


def has_streams(device: torch.device) -> bool:
    """Whether work on ``device`` is queued, so that a second step in flight hides the host's time."""
    return device.type in ("cuda", "xpu")


def use_device(device: torch.device) -> None:
    """What this thread launches without naming a device goes to ``device``: kernels of packages do so."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def describe(device: torch.device) -> str:
    """``device`` in words, for logs and ``kestrel doctor``."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"{torch.cuda.get_device_name(device)} ({device}, compute capability {major}.{minor})"
    threads = torch.get_num_threads()
    name = "Apple GPU" if device.type == "mps" else f"CPU ({threads} thread{'s' if threads != 1 else ''})"
    return f"{name}, {platform.machine()}"


def _present() -> list[str]:
    """Device kinds of this machine, best first; "cpu" is always there."""
    found = ["cuda"] if torch.cuda.is_available() else []
    return [*found, *(["mps"] if torch.backends.mps.is_available() else []), "cpu"]
