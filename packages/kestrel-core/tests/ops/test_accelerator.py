"""References on an accelerator: the same numbers as on the CPU, and what is captured replays."""

import pytest
import torch

from kestrel.device import resolve_device
from kestrel.ops import OPS
from kestrel.testing.backends import differences, run_case

pytestmark = pytest.mark.gpu
CASES = [case for op in OPS.values() for case in op.cases()]
CAPTURED = [case for case in CASES if "captured" in case.name]


@pytest.fixture
def device():
    found = resolve_device("auto")
    if found.type == "cpu":
        pytest.skip("no accelerator here")
    return found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_reference_agrees_with_the_cpu(case, device):
    op = OPS[case.op]
    got = run_case(op.reference, case, 1, device, torch.float32)
    want = run_case(op.reference, case, 1, torch.device("cpu"), torch.float32)
    assert differences(got, want, op.tolerance(torch.float32)) == []


@pytest.mark.parametrize("case", CAPTURED, ids=str)
def test_reference_replays_from_a_captured_program(case, device):
    if device.type != "cuda":
        pytest.skip("only CUDA captures programs")
    op = OPS[case.op]
    want = run_case(op.reference, case, 1, device, torch.float32)
    inputs, warm = (case.make(1, device, torch.float32) for _ in range(2))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        op.reference(*warm.args, **warm.kwargs)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = op.reference(*inputs.args, **inputs.kwargs)
    graph.replay()
    outputs = [] if result is None else list(result) if isinstance(result, tuple) else [result]
    got = [out[: inputs.num_rows] for out in outputs] + list(inputs.written)
    assert differences(got, want, op.tolerance(torch.float32)) == []
