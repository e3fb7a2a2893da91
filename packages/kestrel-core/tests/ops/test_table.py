import logging

import pytest
import torch

from kestrel.errors import NoKernelError, PluginError
from kestrel.ops import OPS, REFERENCE, RESERVED, resolve_ops, unknown_ops
from kestrel.spi.backend import Available, Impl, KernelBackend, No, OpQuery, Unavailable, Yes

QUERY = OpQuery.of("rms_norm", dim=8, kind="rms", dtype="float32")
GPU = torch.device("cuda")


class Backend(KernelBackend):
    def __init__(self, name, priority=0, answer=None, op="rms_norm", probe=None):
        self.name, self.priority = name, priority
        self._answer, self._op, self._probe = answer or Yes(), op, probe or Available()
        self.fn = lambda *args: name

    def probe(self, device):
        return self._probe

    def impls(self):
        return {
            self._op: Impl(supports=lambda query: self._answer, fn=self.fn, pack=lambda weight: weight + 1)
        }


def test_without_backends_every_op_is_the_reference():
    table = resolve_ops()
    for op in OPS.values():
        assert table.resolve(OpQuery.of(op.name, dtype="float32")) is op.reference


def test_the_highest_priority_that_says_yes_serves_the_query():
    low, high, shy = Backend("low", 1), Backend("high", 5), Backend("shy", 9, answer=No("dim 8 is too small"))
    table = resolve_ops([QUERY], backends=[low, high, shy])
    assert table.resolve(QUERY) is high.fn
    (row,) = table.rows()
    assert (row.query, row.provider) == (QUERY, "high")
    assert row.rejected == {"shy": "dim 8 is too small"}


def test_reasons_of_all_losers_are_kept():
    backends = [Backend("away", probe=Unavailable("no such device")), Backend("other", op="rope")]
    table = resolve_ops([QUERY], backends=backends)
    (row,) = table.rows()
    assert row.provider == REFERENCE
    assert row.rejected == {"away": "no such device", "other": "has no rms_norm"}


def test_an_override_is_asked_first():
    high = Backend("high", 5)
    table = resolve_ops([QUERY], backends=[high], overrides={"rms_norm": REFERENCE})
    assert table.resolve(QUERY) is OPS["rms_norm"].reference


def test_an_override_that_declines_falls_back_in_the_usual_order():
    shy, high = Backend("shy", answer=No("not today")), Backend("high", 5)
    table = resolve_ops([QUERY], backends=[shy, high], overrides={"rms_norm": "shy"})
    assert table.resolve(QUERY) is high.fn
    assert table.rows()[0].rejected == {"shy": "not today"}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"rms_norm": "refernce"}, "Did you mean 'reference'"),
        ({"rmsnorm": REFERENCE}, "Did you mean 'rms_norm'"),
        ({"rms_norm": "away"}, "no such device"),
    ],
)
def test_an_override_that_names_nothing_usable_is_an_error_with_the_choices(overrides, message):
    away = Backend("away", probe=Unavailable("no such device"))
    with pytest.raises(NoKernelError, match=message):
        resolve_ops([QUERY], backends=[away], overrides=overrides)


def test_strict_refuses_a_reference_on_an_accelerator_but_not_on_the_cpu():
    shy = Backend("shy", answer=No("dim 8 is too small"))
    with pytest.raises(NoKernelError, match="dim 8 is too small") as error:
        resolve_ops([QUERY], GPU, [shy], strict=True)
    assert error.value.reasons == {"shy": "dim 8 is too small"}
    assert resolve_ops([QUERY], backends=[shy], strict=True).rows()[0].provider == REFERENCE


def test_strict_accepts_a_reference_that_the_user_chose():
    table = resolve_ops([QUERY], GPU, overrides={"rms_norm": REFERENCE}, strict=True)
    assert table.rows()[0].provider == REFERENCE


def test_a_fall_to_the_reference_on_an_accelerator_warns_once_per_op(caplog):
    other = OpQuery.of("rms_norm", dim=16, kind="rms", dtype="float32")
    with caplog.at_level(logging.WARNING):
        resolve_ops([QUERY, QUERY, other], GPU, [Backend("shy", answer=No("dim 8 is too small"))])
    (record,) = caplog.records
    assert "dim 8 is too small" in record.getMessage()


def test_an_op_that_nobody_provides_is_an_error():
    with pytest.raises(NoKernelError, match="rms_norm"):
        resolve_ops([OpQuery.of("rmsnorm")])


def test_weights_are_packed_by_the_provider_that_serves_the_query():
    table = resolve_ops(backends=[Backend("high")])
    weight = torch.zeros(2)
    assert torch.equal(table.pack(QUERY, weight), torch.ones(2))
    assert resolve_ops().pack(QUERY, weight) is weight


def test_a_provider_that_cannot_lay_a_weight_out_is_to_blame_and_not_the_checkpoint():
    backend = Backend("high")
    with pytest.raises(PluginError, match="'high' was to lay out the weight of rms_norm") as caught:
        resolve_ops(backends=[backend]).pack(QUERY, None)  # None + 1
    assert "ops={'rms_norm': 'reference'}" in str(caught.value)


def test_an_op_that_core_does_not_know_is_told_with_what_was_likely_meant(caplog):
    table = resolve_ops(backends=[Backend("acme", op="rms_nrom")])
    assert "acme offers ops that Kestrel does not know" in caplog.text
    assert "'rms_nrom' (did you mean 'rms_norm'?)" in caplog.text
    assert table.resolve(OpQuery.of("rms_nrom"))("x") == "acme"  # a family of the same project may ask for it


def test_a_reserved_op_may_be_offered_and_asked_for_without_a_word(caplog):
    assert not set(RESERVED) & set(OPS)
    acme = Backend("acme", op="lora_delta")
    table = resolve_ops(backends=[acme])
    assert not caplog.records
    assert table.find(OpQuery.of("lora_delta", rank=8)) is acme.fn
    assert resolve_ops().find(OpQuery.of("lora_delta", rank=8)) is None
    assert unknown_ops([*RESERVED, *OPS, "zzz"]) == {"zzz": ""}


class Broken(Backend):
    """Raises in the method called ``where``."""

    def __init__(self, where, error=OSError):
        super().__init__("broken", 9)
        self.where, self.error = where, error

    def probe(self, device):
        return self.fail("probe") or super().probe(device)

    def impls(self):
        offered = self.fail("impls") or super().impls()
        if self.where == "supports":
            return {op: Impl(supports=lambda query: self.fail("supports"), fn=self.fn) for op in offered}
        return offered

    def fail(self, where):
        if where == self.where:
            raise self.error("libcuda is missing")


@pytest.mark.parametrize("where", ["probe", "impls", "supports"])
@pytest.mark.parametrize("error", [OSError, SystemExit])
def test_a_backend_that_raises_is_left_out_with_its_reason(where, error, caplog):
    low = Backend("low")
    table = resolve_ops([QUERY], backends=[Broken(where, error), low])
    (row,) = table.rows()
    assert row.provider == "low"
    assert f"{error.__name__}: libcuda is missing" in row.rejected["broken"]
    assert "broken failed" in caplog.text


class Vague(Backend):
    """Answers True in the method called ``where``."""

    def __init__(self, where):
        super().__init__("vague", 9)
        self.where = where

    def probe(self, device):
        return self.where == "probe" or super().probe(device)

    def impls(self):
        if self.where == "supports":
            return {"rms_norm": Impl(supports=lambda query: True, fn=self.fn)}
        return self.where == "impls" or super().impls()


@pytest.mark.parametrize("where", ["probe", "impls", "supports"])
def test_a_backend_that_answers_with_something_else_is_left_out_and_told_what_was_missed(where):
    (row,) = resolve_ops([QUERY], backends=[Vague(where), Backend("low")]).rows()
    assert row.provider == "low"
    assert f"TypeError: {where} gave a bool" in row.rejected["vague"]


def test_what_keeps_a_program_from_being_captured_is_named_with_its_provider():
    decode, prefill = (
        OpQuery.of("paged_attention", mode=mode, dtype="float32") for mode in ("decode", "prefill")
    )
    table = resolve_ops([decode, prefill, QUERY])
    assert [choice.query for choice in table.eager_in("decode")] == [decode]
    assert [choice.query for choice in table.eager_in("prefill")] == [prefill]
    assert table.eager_in("encode") == []
    served = resolve_ops([decode, QUERY], backends=[Backend("fast", op="paged_attention")])
    assert served.eager_in("decode") == []


def test_a_backends_own_op_may_keep_every_program_from_being_captured():
    backend = Backend("waits")
    backend.impls = lambda: {
        "rms_norm": Impl(supports=lambda q: Yes(), fn=len, eager_in=frozenset({"decode"}))
    }
    table = resolve_ops([QUERY], backends=[backend])
    assert [choice.provider for choice in table.eager_in("decode")] == ["waits"]
    assert table.eager_in("prefill") == []


def test_compile_jobs_are_asked_for_the_rows_of_the_programs_that_a_query_runs_in(caplog):
    asked = {}

    def warm(query, row_counts):
        asked[query] = list(row_counts)
        if query.get("dim") == 9:
            raise RuntimeError("does not know")
        return [lambda: None] * len(row_counts)

    backend = Backend("jit")
    backend.impls = lambda: {
        op: Impl(supports=lambda q: Yes(), fn=len, warm=warm) for op in ("rms_norm", "paged_attention")
    }
    decode = OpQuery.of("paged_attention", mode="decode")
    broken = OpQuery.of("rms_norm", dim=9)
    table = resolve_ops([QUERY, decode, broken, OpQuery.of("rope")], backends=[backend])
    jobs = table.compile_jobs({"decode": (1, 2), "prefill": (2, 128)})
    assert asked == {QUERY: [1, 2, 128], decode: [1, 2], broken: [1, 2, 128]}
    assert len(jobs) == 5
    assert table.compile_jobs({"decode": (1, 2), "prefill": (2, 128)}) == [], "nothing was asked since"
    assert "does not say what to compile" in caplog.text


def test_a_fusion_is_found_only_where_a_provider_has_it():
    query = OpQuery.of("norm_linear", rows=1)
    assert resolve_ops().find(query) is None
    table = resolve_ops(backends=[Backend("fused", op="norm_linear")])
    assert table.find(query) is table.find(query) is table.resolve(query)
    assert [row.provider for row in table.rows()] == ["fused"]
    declined = resolve_ops(backends=[Backend("fused", op="norm_linear", answer=No("too small"))])
    assert declined.find(query) is None
    assert declined.rows() == []


def test_an_override_can_turn_a_fusion_off():
    query = OpQuery.of("norm_linear", rows=1)
    table = resolve_ops(backends=[Backend("fused", op="norm_linear")], overrides={"norm_linear": REFERENCE})
    assert table.find(query) is None


def test_looking_for_a_fusion_that_nobody_has_is_no_error_on_a_strict_accelerator():
    query = OpQuery.of("norm_linear", rows=1)
    assert resolve_ops(device=torch.device("cuda"), strict=True).find(query) is None
