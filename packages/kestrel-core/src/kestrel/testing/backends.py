"""``check_backend``: does a kernel backend compute what the references compute? For backends' own test suites."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from kestrel.device import describe, resolve_device
from kestrel.ops import OPS, Case, Op, Tolerance, dtype_name
from kestrel.spi.backend import Impl, KernelBackend, No, OpCall, Unavailable

__all__ = ["BackendReport", "check_backend", "differences", "run_case"]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendReport:
    """What ``check_backend`` looked at: the cases it ran (with their dtype) and those declined, with the reason."""

    ran: tuple[str, ...] = ()
    declined: Mapping[str, str] = field(default_factory=dict)


def check_backend(
    backend: KernelBackend,
    *,
    device: str = "auto",
    dtypes: Sequence[torch.dtype] = DTYPES,
    ops: Sequence[str] | None = None,
    seed: int | None = None,
) -> BackendReport:
    """Run every implementation of ``backend`` on every shared case that it claims; return what ran.

    Outputs and updated tensors must agree with the reference on ``device`` within the op's tolerance, and a second
    run on equal inputs must give identical bits. Inputs are random: fresh ones in each call unless ``seed`` is given
    (a failure names its seed). ``ops`` limits the check to these names.

    Raises AssertionError listing every disagreement; also when the backend does not run on ``device``, provides an
    op that core does not define, or claims none of an op's cases.
    """
    place = resolve_device(device)
    answer = backend.probe(place)
    assert not isinstance(answer, Unavailable), (
        f"{backend.name} does not run on {describe(place)}: {answer.reason}"
    )
    impls = {name: impl for name, impl in backend.impls().items() if ops is None or name in ops}
    unknown = sorted(set(impls) - set(OPS))
    assert not unknown, f"{backend.name} provides {unknown}, which kestrel.ops does not define"
    seed = int(torch.seed() % 2**31) if seed is None else seed
    ran: list[str] = []
    declined: dict[str, str] = {}
    wrong: list[str] = []
    for name, impl in impls.items():
        before = len(ran)
        for case, dtype in _offered(OPS[name], dtypes):
            label = f"{case}, {dtype_name(dtype)}"
            supported = impl.supports(case.query(dtype))
            if isinstance(supported, No):
                declined[label] = supported.reason
                continue
            ran.append(label)
            wrong += [
                f"{label}, seed {seed}: {what}"
                for what in _check_case(OPS[name], impl, case, seed, place, dtype)
            ]
        if len(ran) == before:
            wrong.append(f"{name}: claims none of its cases")
    assert not wrong, f"{backend.name} on {describe(place)}:\n" + "\n".join(wrong)
    return BackendReport(ran=tuple(ran), declined=declined)


def run_case(
    fn: OpCall, case: Case, seed: int, device: torch.device, dtype: torch.dtype, impl: Impl | None = None
) -> list[torch.Tensor]:
    """What ``fn`` makes of fresh inputs of ``case``: the defined rows of its outputs, then the tensors it updates."""
    inputs = case.make(seed, device, dtype)
    args = list(inputs.args)
    if impl is not None and inputs.weight is not None:
        args[inputs.weight] = impl.pack(args[inputs.weight])
    result = fn(*args, **inputs.kwargs)
    outputs = [] if result is None else list(result) if isinstance(result, tuple) else [result]
    return [out[: inputs.num_rows] for out in outputs] + list(inputs.written)


def differences(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor], tolerance: Tolerance) -> list[str]:
    """What is wrong with ``got``, one line per tensor; NaN agrees with NaN alone."""
    if len(got) != len(want):
        return [f"{len(got)} tensors, the reference has {len(want)}"]
    lines = []
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        if a.shape != b.shape:
            lines.append(f"tensor {i} is {tuple(a.shape)}, the reference's is {tuple(b.shape)}")
            continue
        a64, b64 = a.detach().cpu().double(), b.detach().cpu().double()
        close = torch.isclose(a64, b64, rtol=tolerance.rtol, atol=tolerance.atol, equal_nan=True)
        if not bool(close.all()):
            gap = (a64 - b64).abs().nan_to_num(float("inf"))[~close]
            lines.append(
                f"tensor {i}: {gap.numel()} of {a.numel()} numbers are off, the worst by {float(gap.max()):.3g}"
            )
    return lines


def _offered(op: Op, dtypes: Sequence[torch.dtype]) -> Iterator[tuple[Case, torch.dtype]]:
    for case in op.cases():
        for dtype in dtypes:
            if dtype_name(dtype) in op.tolerances:
                yield case, dtype


def _check_case(
    op: Op, impl: Impl, case: Case, seed: int, device: torch.device, dtype: torch.dtype
) -> list[str]:
    want = run_case(op.reference, case, seed, device, dtype)
    got = run_case(impl.fn, case, seed, device, dtype, impl)
    wrong = differences(got, want, op.tolerance(dtype))
    again = run_case(impl.fn, case, seed, device, dtype, impl)
    if differences(again, got, Tolerance(0.0, 0.0)):
        wrong.append("two runs on equal inputs differ")
    return wrong
