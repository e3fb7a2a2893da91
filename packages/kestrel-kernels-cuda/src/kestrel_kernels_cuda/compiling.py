"""Compiling kernels for architectures that this machine does not have, and reading what they would need there.

``python -m kestrel_kernels_cuda.compiling [--arch 90] [--only NAME]`` prints one JSON line per kernel, configuration
and architecture. No GPU is needed; Triton's wheel carries the assembler and ``cuobjdump``.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from kestrel_kernels_cuda.assembly import unset_registers
from kestrel_kernels_cuda.backend import MODULES
from kestrel_kernels_cuda.devices import SHARED_LIMIT

__all__ = ["SHARED_LIMIT", "CompileCase", "Compiled", "cases", "compile_case"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileCase:
    """One kernel with one configuration.

    ``signature``: Triton's type of each run-time argument ("*bf16", "i32", "fp32"); ``constexprs``: the values of the
    others. Pointers count as aligned to 16 bytes, unless the kernel does not ask; so do the integers in ``aligned``.
    ``archs``: the architectures that the configuration is meant for. Warps and stages are Triton's by default.
    ``stack``: bytes of stack that a thread may have, where the assembly or a measurement showed that they cost little.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    aligned: tuple[str, ...] = ()
    archs: tuple[int, ...] = (80, 90)
    stack: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """What the assembler says of a kernel: bytes of shared memory per block, registers per thread, and bytes of stack
    and local memory per thread (spills), ``allowed`` of them. ``unset``: as ``assembly.unset_registers``. ``error`` is
    empty when it compiled."""

    name: str
    arch: int
    shared: int = 0
    registers: int = 0
    stack: int = 0
    allowed: int = 0
    local: int = 0
    unset: Mapping[str, str] = field(default_factory=dict)
    error: str = ""


def cases() -> Iterator[CompileCase]:
    """The cases of every module."""
    for module in MODULES:
        yield from import_module(f"kestrel_kernels_cuda.{module}").compile_cases()


def compile_case(case: CompileCase, arch: int) -> Compiled:
    """``case`` compiled for ``arch`` (90 is sm_90)."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    names = case.kernel.arg_names
    signature = {name: case.signature.get(name, "constexpr") for name in names}
    anywhere = {param.name for param in case.kernel.params if param.do_not_specialize_on_alignment}
    pointers = {name for name, kind in signature.items() if kind.startswith("*")} - anywhere
    aligned = [name for name in names if name in pointers or name in case.aligned]
    source = (GluonASTSource if case.kernel.is_gluon() else ASTSource)(
        fn=case.kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in case.constexprs.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages, **case.options}
    try:
        kernel = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    except Exception as error:
        return Compiled(name=case.name, arch=arch, error=f"{type(error).__name__}: {error}")
    cubin = kernel.asm["cubin"]
    usage = _dumped(cubin, "--dump-resource-usage")
    numbers = {
        name: max(int(found) for found in re.findall(rf"\b{name}:(\d+)", usage))
        for name in ("REG", "STACK", "LOCAL")
    }
    return Compiled(
        name=case.name,
        arch=arch,
        shared=kernel.metadata.shared,
        registers=numbers["REG"],
        stack=numbers["STACK"],
        allowed=case.stack,
        local=numbers["LOCAL"],
        unset=unset_registers(_dumped(cubin, "-sass")),
    )


def _dumped(cubin: bytes, option: str) -> str:
    """What ``cuobjdump`` prints of a kernel."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        return subprocess.run([tool, option, path], capture_output=True, text=True, check=True).stdout


def _by_number(job: tuple[int, int]) -> Compiled:
    number, arch = job
    return compile_case(list(cases())[number], arch)


def main(argv: list[str] | None = None) -> int:
    """0 when every case compiled."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", type=int, action="append", help="80, 90, …; default: those of each case")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--jobs", type=int, default=2)
    wanted = parser.parse_args(argv)
    jobs = [
        (number, arch)
        for number, case in enumerate(cases())
        if wanted.only in case.name
        for arch in wanted.arch or case.archs
    ]
    failed = False
    with ProcessPoolExecutor(wanted.jobs) as pool:
        for compiled in pool.map(_by_number, jobs):
            print(json.dumps(asdict(compiled)), flush=True)
            failed = failed or bool(compiled.error)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
