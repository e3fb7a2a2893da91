"""``check_backend`` finds what is wrong with a backend, and accepts one that is right."""

import pytest
import torch

from kestrel.ops import OPS
from kestrel.spi.backend import Available, Impl, KernelBackend, No, Unavailable, Yes
from kestrel.testing.backends import check_backend

FLOAT32 = (torch.float32,)


class Backend(KernelBackend):
    name = "trial"

    def __init__(self, op, fn, supports=lambda query: Yes(), available=True, **impl):
        self._impls = {op: Impl(supports=supports, fn=fn, **impl)}
        self._available = available

    def probe(self, device):
        return Available() if self._available else Unavailable("switched off")

    def impls(self):
        return self._impls


def check(backend):
    return check_backend(backend, device="cpu", dtypes=FLOAT32, seed=1)


def test_a_right_backend_passes_and_the_report_lists_what_ran():
    report = check(Backend("rms_norm", OPS["rms_norm"].reference))
    assert len(report.ran) == len(OPS["rms_norm"].cases())
    assert report.declined == {}


def test_declined_cases_are_reported_with_their_reason():
    def supports(query):
        return No("too wide") if query.get("dim") > 100 else Yes()

    report = check(Backend("rms_norm", OPS["rms_norm"].reference, supports))
    assert "too wide" in report.declined.values()
    assert 0 < len(report.ran) < len(OPS["rms_norm"].cases())


def test_a_wrong_result_fails_naming_case_and_seed():
    def off(x, weight, eps=1e-6, *, add_one=False):
        return OPS["rms_norm"].reference(x, weight, eps, add_one=False)

    with pytest.raises(AssertionError, match="rms_plus_one odd, float32, seed 1"):
        check(Backend("rms_norm", off))


def test_a_wrong_write_fails_even_if_nothing_is_returned():
    with pytest.raises(AssertionError, match="copy_page"):
        check(Backend("copy_page", lambda k, v, src, dst, filled: None))


def test_runs_that_differ_fail():
    def noisy(x, weight, eps=1e-6, *, add_one=False):
        out = OPS["rms_norm"].reference(x, weight, eps, add_one=add_one)
        return out + torch.rand(()) * 1e-7

    with pytest.raises(AssertionError, match="two runs on equal inputs differ"):
        check(Backend("rms_norm", noisy))


def test_a_backend_that_claims_no_case_of_its_op_fails():
    with pytest.raises(AssertionError, match="claims none of its cases"):
        check(Backend("rope", OPS["rope"].reference, lambda query: No("never")))


def test_a_backend_that_cannot_run_or_provides_an_unknown_op_fails():
    with pytest.raises(AssertionError, match="switched off"):
        check(Backend("rope", OPS["rope"].reference, available=False))
    with pytest.raises(AssertionError, match="'warp'"):
        check(Backend("warp", OPS["rope"].reference))


def test_weights_are_packed_before_an_implementation_sees_them():
    def linear(x, weight_t, bias=None, epilogue=None, residual=None):
        return OPS["linear"].reference(x, weight_t.T, bias, epilogue, residual)

    report = check(Backend("linear", linear, pack=lambda weight: weight.T.contiguous()))
    assert report.ran


def test_inputs_are_fresh_unless_a_seed_is_given():
    seen = []

    def spy(x, *args, **kwargs):
        seen.append(x.clone())
        return OPS["rope"].reference(x, *args, **kwargs)

    for _ in range(2):
        check_backend(Backend("rope", spy), device="cpu", dtypes=FLOAT32)
    assert not torch.equal(seen[0], seen[len(seen) // 2])
