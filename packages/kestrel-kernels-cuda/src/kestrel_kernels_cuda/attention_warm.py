"""Launches without tensors: what to compile while a model loads, and what the compile test looks at."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from kestrel.spi.batch import Limits
from kestrel_kernels_cuda.compiling import CompileCase
from kestrel_kernels_cuda.launch import Launch

__all__ = ["DECODES", "META", "any_limits", "cases_of", "distinct", "jobs_of"]

META = torch.device("meta")

DECODES = ((1, 64, 64), (1, 2, 2), (1, 1, 1), (512, 1, 2), (512, 1, 1))
"""Rows, wanted blocks of a row and splits of decode launches: few rows whose blocks are joined by a kernel, in place,
or that have one; many rows, of which long ones may have several, or none."""

_KINDS = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int32: "*i32", torch.int64: "*i64",
    torch.float8_e4m3fn: "*fp8e4nv",
}  # fmt: skip


def any_limits(rows: int, tokens: int, query_len: int, context: int) -> Limits:
    """Ceilings of a launch that is only compiled."""
    return Limits(max_rows=rows, max_tokens=tokens, max_query_len=query_len, max_context_len=context)


def jobs_of(launches: Iterable[Launch]) -> list[Callable[[], object]]:
    """One job per kernel and configuration among ``launches``."""
    return [launch.compile for launch in distinct(launches)]


def distinct(launches: Iterable[Launch]) -> list[Launch]:
    """The launches without those that would compile the same again."""
    different: dict[str, Launch] = {}
    for launch in launches:
        different.setdefault(_key(launch), launch)
    return list(different.values())


def _key(launch: Launch) -> str:
    names = launch.kernel.arg_names
    kinds = [_kind(arg) for arg in launch.args]
    return f"{launch.kernel.__name__} {kinds} {_aligned(launch, names)} {sorted(launch.meta.items())}"


def _aligned(launch: Launch, names: Sequence[str]) -> tuple[str, ...]:
    """The integers that Triton would find to be multiples of 16."""
    if not isinstance(launch.kernel, JITFunction):
        return ()  # an interpreted kernel
    free = {names[i] if isinstance(i, int) else i for i in launch.kernel.do_not_specialize or ()}
    given = zip(names, launch.args, strict=False)
    return tuple(n for n, arg in given if isinstance(arg, int) and arg % 16 == 0 and n not in free)


def cases_of(name: str, launches: Iterable[Launch], archs: tuple[int, ...]) -> Iterator[CompileCase]:
    """The compile cases of launches."""
    for launch in distinct(launches):
        names = launch.kernel.arg_names
        given = dict(zip(names, launch.args, strict=False))
        meta = dict(launch.meta)
        warps, stages = meta.pop("num_warps"), meta.pop("num_stages", 3)
        options = {"launch_pdl": True} if meta.pop("launch_pdl", False) else {}
        yield CompileCase(
            name=f"{name} {launch.kernel.__name__}",
            kernel=launch.kernel,
            signature={n: _kind(arg) for n, arg in given.items() if arg is not None},
            constexprs={**meta, **{n: None for n, arg in given.items() if arg is None}},
            num_warps=warps,
            num_stages=stages,
            aligned=_aligned(launch, names),
            archs=archs,
            options=options,
        )


def _kind(arg: object) -> str:
    if isinstance(arg, torch.Tensor):
        return _KINDS[arg.dtype]
    if isinstance(arg, TensorDescriptor):
        return f"tensordesc<{_KINDS[arg.base.dtype][1:]}{list(arg.block_shape)}>"
    return "i32" if isinstance(arg, int) else "fp32" if isinstance(arg, float) else "none"
