"""log_mel: the reference, which is library calls on a GPU (cuFFT, cuBLAS) and a few passes over little."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kestrel.ops.log_mel import log_mel
from kestrel.spi import Impl, No, OpQuery, Yes
from kestrel_kernels_cuda.compiling import CompileCase

__all__ = ["IMPLS", "compile_cases"]


def supports(query: OpQuery) -> Yes | No:
    """Yes to float32: the decades of quiet bands need it."""
    if query.get("dtype") != "float32":
        return No(f"transforms float32, not {query.get('dtype')}")
    return Yes()


IMPLS: Mapping[str, Impl] = {"log_mel": Impl(supports=supports, fn=log_mel)}


def compile_cases() -> Iterator[CompileCase]:
    """None: no kernel of this package takes part."""
    return iter(())
