"""Every implementation against core's references, on the cases that core shares with all backends."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed here")

from kestrel.ops import OPS, Case, dtype_name
from kestrel.spi import Yes
from kestrel.testing import check_backend
from kestrel.testing.backends import differences, run_case
from kestrel_kernels_cuda.backend import CudaBackend

SLOW_ELEMENTS = 850_000  # the interpreter takes ten seconds and more for them
MOST_CASES = 20  # of one op that are interpreted; those with more have every mixture of a few variants


def _claimed() -> Iterator[tuple[str, Case]]:
    for name, impl in CudaBackend().impls().items():
        if "float32" not in OPS[name].tolerances:
            continue
        cases = [c for c in OPS[name].cases() if isinstance(impl.supports(c.query(torch.float32)), Yes)]
        taken = random.Random(name).sample(range(len(cases)), min(len(cases), MOST_CASES))
        yield from ((name, cases[i]) for i in sorted(taken))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU runs them all below")
@pytest.mark.parametrize(("name", "case"), list(_claimed()), ids=str)
def test_interpreted_kernel_agrees_with_the_reference(name: str, case: Case) -> None:
    seed, cpu = int(torch.seed() % 2**31), torch.device("cpu")
    inputs = case.make(seed, cpu, torch.float32)
    if sum(x.numel() for x in inputs.args if isinstance(x, torch.Tensor)) > SLOW_ELEMENTS:
        pytest.skip("too large for the interpreter")
    impl = CudaBackend().impls()[name]
    want = run_case(OPS[name].reference, case, seed, cpu, torch.float32)
    got = run_case(impl.fn, case, seed, cpu, torch.float32, impl)
    wrong = differences(got, want, OPS[name].tolerance(torch.float32))
    assert not wrong, f"seed {seed}: {wrong}"


@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted(CudaBackend().impls()))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=dtype_name)
def test_kernel_agrees_with_the_reference_and_with_itself(name: str, dtype: torch.dtype) -> None:
    impl = CudaBackend().impls()[name]
    claimed = [c for c in OPS[name].cases() if isinstance(impl.supports(c.query(dtype)), Yes)]
    if not claimed or dtype_name(dtype) not in OPS[name].tolerances:
        pytest.skip(f"{name} does not serve {dtype_name(dtype)}")
    assert check_backend(CudaBackend(), device="cuda", dtypes=[dtype], ops=[name]).ran
