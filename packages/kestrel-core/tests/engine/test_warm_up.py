"""Before the first request: kernels compiled side by side, and a failure that costs nobody the load."""

import threading

import pytest

from kestrel.config import RuntimeConfig
from kestrel.engine import warm_up
from kestrel.engine.warm_up import compile_kernels
from kestrel.lanes import TokenLane
from kestrel.ops import resolve_ops
from kestrel.spi.backend import Available, Impl, KernelBackend, OpQuery, Yes
from kestrel.testing.engines import ALPHABET

CONFIG = RuntimeConfig(max_batch_size=4, max_batched_tokens=128)


class Compiled(KernelBackend):
    """Notes the row counts that jobs compile for; ``job`` is what a job does beside."""

    name = "compiled"

    def __init__(self, job=lambda: None):
        self.done, self._job = [], job

    def probe(self, device):
        return Available()

    def impls(self):
        return {"rope": Impl(supports=lambda query: Yes(), fn=len, warm=self._warm)}

    def _warm(self, query, row_counts):
        def compile_for(count):
            self._job()
            self.done.append((query.get("mode"), count))

        return [lambda count=count: compile_for(count) for count in row_counts]


def table(backend, **facts):
    return resolve_ops([OpQuery.of("rope", **facts)], backends=[backend])


def test_kernels_are_compiled_for_the_rows_of_their_programs_once():
    backend = Compiled()
    ops = table(backend, mode="decode")
    compile_kernels(ops, CONFIG)
    assert sorted(backend.done) == [("decode", 1), ("decode", 2), ("decode", 4)]
    compile_kernels(ops, CONFIG)
    assert len(backend.done) == 3
    ops.resolve(OpQuery.of("rope", mode="prefill"))
    compile_kernels(ops, CONFIG)
    assert backend.done[3:] == [("prefill", 128)]


def test_kernels_are_compiled_side_by_side(monkeypatch):
    monkeypatch.setattr(warm_up.os, "cpu_count", lambda: 3)
    together = threading.Barrier(3, timeout=20)
    backend = Compiled(together.wait)
    compile_kernels(table(backend, mode="decode"), CONFIG)
    assert len(backend.done) == 3


@pytest.mark.parametrize("error", [RuntimeError("no compiler"), OSError("no disk")])
def test_a_kernel_that_does_not_compile_ahead_is_logged(caplog, error):
    def fail():
        raise error

    compile_kernels(table(Compiled(fail), mode="decode"), CONFIG)
    assert "3 of 3 kernels were not compiled ahead" in caplog.text
    assert str(error) in caplog.text


async def test_encoders_that_cannot_be_captured_ahead_cost_nobody_the_load(toys, monkeypatch, caplog):
    def fail(lane):
        raise RuntimeError("no memory")

    monkeypatch.setattr(TokenLane, "capture_encoders", fail)
    async with toys.engine() as engine:
        assert (await engine.query(question="?")).output == {"answer": ALPHABET}
    assert "encoders are captured as they come: RuntimeError: no memory" in caplog.text
