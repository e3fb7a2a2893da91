"""One launch of a kernel as a value, so that the code that launches is also the code that compiles ahead of it.

A launcher builds ``Launch`` from tensors. An op runs it; a warm-up job builds it from tensors of the meta device, which
take no memory, and compiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from threading import Lock
from typing import Any

import torch
from triton.compiler import CompiledKernel
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.runtime import OutOfResources
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from kestrel.errors import ModelFaultError
from kestrel.spi import No, OpQuery, Yes
from kestrel_kernels_cuda.compiling import CompileCase
from kestrel_kernels_cuda.devices import E4M3, known_arch

__all__ = [
    "DTYPES",
    "KV_DTYPES",
    "Launch",
    "Launches",
    "compile_case_of",
    "distinct",
    "dtype_of",
    "jobs_of",
    "kv_dtype_of",
    "power_of_two",
    "refuse_dtype",
    "refuse_e4m3",
    "refuse_pages",
    "supports_dtypes",
]

DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
KV_DTYPES: Mapping[str, torch.dtype] = {**DTYPES, "float8_e4m3fn": torch.float8_e4m3fn}
"""What pages may hold."""

_POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int16: "*i16",
    torch.uint8: "*u8",
    torch.float8_e4m3fn: "*fp8e4nv",
}


@dataclass(frozen=True, slots=True)
class Launch:
    """``kernel`` over ``grid`` with positional ``args``; ``meta``: constants, and options of the compiler."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    meta: Mapping[str, Any] = field(default_factory=dict)

    def run(self) -> None:
        """Launch on the current stream; nothing when the grid is empty."""
        if not all(self.grid):
            return
        try:
            self.kernel[self.grid](*self.args, **self.meta)
        except OutOfResources as error:
            raise _too_large(self, error) from error

    def compile(self) -> None:
        """Compile for the current device without launching, with what a first launch would make beside: the host code
        that passes arguments, for which Triton runs a C compiler. Safe on any thread."""
        with _lock_of(self.variant):  # what several ops share is compiled by one of them
            compiled = self.kernel.warmup(*self.args, grid=self.grid, **self.meta)
            try:
                if isinstance(compiled, CompiledKernel):
                    _ = compiled.run
            except OutOfResources as error:
                raise _too_large(self, error) from error

    @property
    def variant(self) -> str:
        """What launches of the same compiled kernel have in common."""
        kinds = [1 if isinstance(value, int) and value == 1 else _spelled(value) for value in self.args]
        return str((self.kernel.__name__, kinds, _multiples_of_16(self), sorted(self.meta.items())))


@dataclass(frozen=True, slots=True)
class Launches:
    """Some one after the other."""

    parts: tuple[Launch, ...]

    def run(self) -> None:
        """Launch each on the current stream."""
        for part in self.parts:
            part.run()

    def compile(self) -> None:
        """As ``Launch.compile`` for each."""
        for part in self.parts:
            part.compile()


@cache
def _lock_of(variant: str) -> Lock:
    """One lock for all launches of ``variant``. Two threads that ask first at once may get two, and compile twice."""
    return Lock()


def compile_case_of(name: str, launch: Launch, archs: tuple[int, ...] | None = None) -> CompileCase:
    """``launch``, of tensors of the meta device, as a case of the compile test.

    None becomes a constant; pointers and multiples of 16 count as aligned. ``archs``: by default those that have what
    the launch asks for.
    """
    names = launch.kernel.arg_names[: len(launch.args)]
    given = dict(zip(names, launch.args, strict=True))
    options = {key: launch.meta[key] for key in ("num_warps", "num_stages") if key in launch.meta}
    others = {key: launch.meta[key] for key in ("launch_pdl", "maxnreg") if key in launch.meta}
    constants = {key: value for key, value in launch.meta.items() if key not in options | others}
    return CompileCase(
        name=name,
        kernel=launch.kernel,
        signature={name: _spelled(value) for name, value in given.items() if value is not None},
        constexprs=constants | {name: None for name, value in given.items() if value is None},
        archs=archs or ((90,) if "launch_pdl" in others else (80, 90)),
        options=others,
        aligned=_multiples_of_16(launch),
        **options,
    )


def jobs_of(launches: Iterable[Launch]) -> list[Callable[[], object]]:
    """One job per kernel and configuration among ``launches``: it compiles, on any thread."""
    return [launch.compile for launch in distinct(launches)]


def distinct(launches: Iterable[Launch]) -> list[Launch]:
    """The launches without those that would compile the same again."""
    different: dict[str, Launch] = {}
    for launch in launches:
        different.setdefault(launch.variant, launch)
    return list(different.values())


def _too_large(launch: Launch, error: OutOfResources) -> ModelFaultError:
    """What to say of a kernel that asks for more than a block of this device may have."""
    name = launch.kernel.__name__
    return ModelFaultError(
        f"{name} with {dict(launch.meta)} needs {error.required} of {error.name} and this device has {error.limit}. "
        f'Give the op that it computes to the reference, RuntimeConfig(ops={{op: "reference"}}), and report the device'
    )


def _multiples_of_16(launch: Launch) -> tuple[str, ...]:
    """The integers that Triton makes a variant of the kernel for."""
    if not isinstance(launch.kernel, JITFunction):
        return ()  # an interpreted kernel has no variants
    free = set(launch.kernel.do_not_specialize or ())
    given = zip(launch.kernel.arg_names, launch.args, strict=False)
    return tuple(n for n, value in given if isinstance(value, int) and value % 16 == 0 and n not in free)


def _spelled(value: torch.Tensor | TensorDescriptor | GluonDescriptor | float | None) -> str:
    """Triton's word for the type of an argument."""
    if isinstance(value, torch.Tensor):
        return _POINTERS[value.dtype]
    if isinstance(value, GluonDescriptor):
        return f"tensordesc<{_POINTERS[value.base.dtype][1:]}{list(value.block_shape)},{value.layout!r}>"
    if isinstance(value, TensorDescriptor):
        return f"tensordesc<{_POINTERS[value.base.dtype][1:]}{list(value.block_shape)}>"
    if value is None:
        return "constexpr"
    return "fp32" if isinstance(value, float) else "i32"


def power_of_two(number: int) -> int:
    """The smallest power of two that is not below ``number``."""
    return 1 << max(0, number - 1).bit_length()


def dtype_of(query: OpQuery) -> torch.dtype:
    """The dtype of a query that ``refuse_dtype`` let pass."""
    return DTYPES[query.get("dtype")]


def kv_dtype_of(query: OpQuery) -> torch.dtype:
    """The dtype of the pages that a query which ``refuse_pages`` let pass is about."""
    return KV_DTYPES[query.get("kv_dtype") or query.get("dtype")]


def refuse_pages(query: OpQuery) -> No | None:
    """Why pages of a query's dtype are not served; None when they are."""
    kept = query.get("kv_dtype")
    if kept is not None and kept not in KV_DTYPES:
        return No(f"serves pages of {', '.join(KV_DTYPES)}, not {kept}")
    refused = refuse_e4m3() if kept == "float8_e4m3fn" else None
    return refused or refuse_dtype(query)


def refuse_dtype(query: OpQuery) -> No | None:
    """Why a query's dtype is not served; None when it is."""
    if query.get("dtype") in DTYPES:
        return None
    return No(f"serves {', '.join(DTYPES)}, not {query.get('dtype')}")


def refuse_e4m3() -> No | None:
    """Why 8-bit floats are not served; None where they can be read."""
    arch = known_arch()
    if arch is None or arch >= E4M3:
        return None
    return No(f"sm_{arch} does not read e4m3 floats; sm_{E4M3} and newer do")


def supports_dtypes(query: OpQuery) -> Yes | No:
    """Yes to every query of a dtype in ``DTYPES``."""
    return refuse_dtype(query) or Yes()
