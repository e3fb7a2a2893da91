"""What captured programs run must not depend on numbers that only the device knows."""

import pytest
import torch

from kestrel.ops import OPS
from kestrel.testing.capture import CaptureGuard

CPU = torch.device("cpu")
CASES = [case for op in OPS.values() for case in op.cases()]
CAPTURED = [case for case in CASES if "captured" in case.name or "decode" in case.name]


@pytest.mark.parametrize("case", CAPTURED, ids=str)
def test_reference_can_be_captured(case):
    inputs = case.make(1, CPU, torch.float32)
    with CaptureGuard():
        OPS[case.op].reference(*inputs.args, **inputs.kwargs)


@pytest.mark.parametrize(
    "sync",
    [
        lambda x: x.sum().item(),
        lambda x: float(x.sum()),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.masked_select(x > 0),
        lambda x: bool((x > 0).any()),
        lambda x: x.index_put_((x > 0,), torch.tensor(0.0)),
    ],
)
def test_guard_refuses_what_needs_the_host(sync):
    with CaptureGuard(), pytest.raises(AssertionError, match="captured"):
        sync(torch.ones(3))


def test_guard_lets_ordinary_work_pass():
    with CaptureGuard():
        x = torch.ones(3)
        assert x[torch.tensor([0, 2])].shape == (2,)
