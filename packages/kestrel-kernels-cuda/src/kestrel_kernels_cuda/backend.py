"""The backend: where it runs, and which module provides which op."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING

from kestrel.spi import Available, Impl, KernelBackend, Unavailable

if TYPE_CHECKING:
    import torch

__all__ = ["MODULES", "CudaBackend"]

OLDEST = (8, 0)  # compute capability: bfloat16 matrix units and asynchronous copies

MODULES: tuple[str, ...] = (
    "angles",
    "attention_cross",
    "attention_paged",
    "attention_step",
    "attention_vision",
    "causal_conv",
    "cross_write",
    "experts",
    "experts_fp8",
    "gated_delta",
    "gated_delta_step",
    "gated_norm",
    "gates",
    "kv_write",
    "linear",
    "linear_e4m3",
    "linear_fp8",
    "linear_pair",
    "log_mel",
    "norms",
    "pages",
    "resize",
    "rope",
    "routing",
    "row_tables",
    "sampling",
)
"""Modules of this package with ``IMPLS`` (op name to ``Impl``) and ``compile_cases()`` (see ``compiling``)."""


class CudaBackend(KernelBackend):
    """Triton kernels on CUDA devices."""

    name = "cuda"
    priority = 10

    def probe(self, device: torch.device) -> Available | Unavailable:
        """Available on a CUDA device of compute capability 8.0 or newer with Triton installed."""
        if device.type != "cuda":
            return Unavailable(f"runs on CUDA devices, not on {device.type}")
        if importlib.util.find_spec("triton") is None:
            return Unavailable("Triton is not installed; install triton>=3.6")
        import torch

        if torch.version.hip is not None:
            return Unavailable("runs on NVIDIA devices; this torch is built for ROCm")
        found = torch.cuda.get_device_capability(device)
        if found < OLDEST:
            return Unavailable(
                f"{torch.cuda.get_device_name(device)} has compute capability {found[0]}.{found[1]}; "
                f"the kernels need {OLDEST[0]}.{OLDEST[1]}"
            )
        return Available(f"sm_{found[0]}{found[1]}, Triton {import_module('triton').__version__}")

    def impls(self) -> Mapping[str, Impl]:
        """The implementations of every module. Imports Triton; builds no kernel."""
        found: dict[str, Impl] = {}
        for name in MODULES:
            for op, impl in import_module(f"kestrel_kernels_cuda.{name}").IMPLS.items():
                assert op not in found, f"two modules provide {op}; {name} is the second"
                found[op] = impl
        return found
