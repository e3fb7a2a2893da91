"""What the ``kestrel`` entry point loads. Imports neither torch nor Triton."""

from __future__ import annotations

from collections.abc import Sequence

from kestrel.spi import KernelBackend, hookimpl
from kestrel_kernels_cuda.backend import CudaBackend

KESTREL_SPI_VERSION = 1


@hookimpl
def kestrel_kernel_backends() -> Sequence[KernelBackend]:
    """The backend of this package."""
    return (CudaBackend(),)
