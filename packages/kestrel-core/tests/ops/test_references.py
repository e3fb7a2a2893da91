"""References against the naive float64 versions, on every shared case."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from kestrel.ops import OPS
from kestrel.testing.backends import differences, run_case

CPU = torch.device("cpu")


def _naive(name):
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module.NAIVE


NAIVE = _naive("naive") | _naive("naive_sampling")
CASES = [case for op in OPS.values() for case in op.cases()]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_reference_agrees_with_the_naive_version(case):
    op = OPS[case.op]
    for seed in (1, 2):
        got = run_case(op.reference, case, seed, CPU, torch.float32)
        want = run_case(NAIVE[case.op], case, seed, CPU, torch.float32)
        assert differences(got, want, op.tolerance(torch.float32)) == []


@pytest.mark.parametrize("case", [c for c in CASES if "bfloat16" in OPS[c.op].tolerances], ids=str)
def test_reference_in_bfloat16_stays_within_its_tolerance(case):
    op = OPS[case.op]
    got = run_case(op.reference, case, 3, CPU, torch.bfloat16)
    want = run_case(NAIVE[case.op], case, 3, CPU, torch.bfloat16)
    # ids, or one dtype for all
    wide = case.op.startswith("sample_") or case.op in ("delta_gates", "e4m3_cast")
    assert wide or got[0].dtype == torch.bfloat16
    assert differences(got, want, op.tolerance(torch.bfloat16)) == []


@pytest.mark.parametrize("op", OPS.values(), ids=lambda op: op.name)
def test_every_op_has_cases_for_the_smallest_and_odd_sizes_and_documents_itself(op):
    names = " ".join(case.name for case in op.cases())
    assert "smallest" in names
    assert "odd" in names
    assert op.reference.__doc__
    assert len({case.name for case in op.cases()}) == len(op.cases())


@pytest.mark.parametrize("op", OPS.values(), ids=lambda op: op.name)
def test_facts_of_cases_are_the_documented_ones(op):
    for case in op.cases():
        assert set(case.facts) | {"dtype"} == set(op.facts) | {"dtype"}
