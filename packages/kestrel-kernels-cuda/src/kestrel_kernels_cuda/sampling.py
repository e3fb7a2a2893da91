"""The sampling ops of this package."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kestrel.spi import Impl
from kestrel_kernels_cuda import (
    sampling_argmax,
    sampling_commit,
    sampling_draw,
    sampling_logprobs,
    sampling_process,
)
from kestrel_kernels_cuda.compiling import CompileCase

__all__ = ["IMPLS", "compile_cases"]

_MODULES = (sampling_argmax, sampling_commit, sampling_draw, sampling_logprobs, sampling_process)
IMPLS: Mapping[str, Impl] = {op: impl for module in _MODULES for op, impl in module.IMPLS.items()}


def compile_cases() -> Iterator[CompileCase]:
    """The cases of every op."""
    for module in _MODULES:
        yield from module.compile_cases()
