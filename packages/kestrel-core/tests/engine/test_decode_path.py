"""decode_path and enable_cuda_graphs: captured programs where wanted and possible, or an error that says why not."""

from functools import partial

import pytest

from kestrel.config import RuntimeConfig
from kestrel.engine import decode_path
from kestrel.errors import InvalidRequestError, LoadError, NoKernelError
from kestrel.lanes import build
from kestrel.ops import OpTable
from kestrel.sampling import Sampler
from kestrel.spi.backend import OpQuery
from kestrel.testing.graphs import ReplayGraphs


@pytest.fixture
def graphs(monkeypatch):
    """A stand-in that captures on the CPU, and sampling that looks at no value, as on a device that captures."""
    graphs = ReplayGraphs()
    monkeypatch.setattr(build, "Sampler", partial(Sampler, branch_free=True))
    monkeypatch.setattr(decode_path, "graphs_for", lambda device: graphs)
    return graphs


def needing_attention(monkeypatch):
    """Every model needs an op whose reference reads lengths on the host."""
    query = OpQuery.of("paged_attention", mode="decode", dtype="float32")
    compile_jobs = OpTable.compile_jobs

    def ask(self, row_counts):
        self.resolve(query)
        return compile_jobs(self, row_counts)

    monkeypatch.setattr(OpTable, "compile_jobs", ask)


async def model_of(engine):
    return await engine.fleet.ready(engine.models[0])


def test_generated_without_graphs_contradicts_itself():
    with pytest.raises(InvalidRequestError, match="decode_path 'generated' and enable_cuda_graphs off"):
        RuntimeConfig(decode_path="generated", enable_cuda_graphs=False)


async def test_generated_is_refused_where_nothing_captures(toys):
    with pytest.raises(InvalidRequestError, match="captured on CUDA devices, and this is cpu"):
        await toys.create(toys.config(decode_path="generated"))


async def test_auto_on_a_cpu_runs_op_by_op_and_says_so_when_asked(toys, caplog):
    async with toys.engine() as engine:
        model = await model_of(engine)
        assert str(model.decode) == "op by op: programs are captured on CUDA devices, and this is cpu"
        assert "op by op, which is slower" not in caplog.text


@pytest.mark.parametrize("path", ["auto", "generated"])
async def test_programs_are_captured_for_every_batch_size(toys, graphs, path):
    async with toys.engine(decode_path=path, max_batch_size=6) as engine:
        model = await model_of(engine)
        assert model.decode.sizes == (1, 2, 4, 6)
        assert str(model.decode) == "captured programs for 1, 2, 4, 6 rows"
        before = graphs.num_replays
        result = await engine.query(question="hello", settings={"max_tokens": 5})
        assert result.output["answer"]
        assert graphs.num_replays > before


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"decode_path": "native"}, "decode_path is 'native'"),
        ({"enable_cuda_graphs": False}, "enable_cuda_graphs is off"),
    ],
)
async def test_capturing_can_be_forbidden(toys, graphs, settings, reason):
    async with toys.engine(**settings) as engine:
        assert (await model_of(engine)).decode.reason == reason
    assert not graphs.programs


async def test_ops_that_read_the_host_keep_auto_op_by_op_and_are_an_error_of_generated(
    toys, graphs, monkeypatch, caplog
):
    needing_attention(monkeypatch)
    async with toys.engine() as engine:
        assert (
            "paged_attention(dtype=float32, mode=decode) by reference"
            in (await model_of(engine)).decode.reason
        )
    assert caplog.text.count("decode runs op by op, which is slower") == 1
    with pytest.raises(NoKernelError, match=r"decode_path is 'generated', and these ops.*paged_attention"):
        await toys.create(toys.config(decode_path="generated"))
    assert not graphs.programs


async def test_a_capture_that_fails_is_logged_once_or_an_error_of_generated(
    toys, graphs, caplog, monkeypatch
):
    def broken(run):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(graphs, "capture", broken)
    async with toys.engine() as engine:
        model = await model_of(engine)
        assert model.decode.sizes == ()
        assert "operation not permitted" in model.decode.reason
        assert (await engine.query(question="hello", settings={"max_tokens": 5})).output["answer"]
    assert caplog.text.count("decode runs op by op, which is slower") == 1
    with pytest.raises(LoadError, match=r"could not be captured .*operation not permitted"):
        await toys.create(toys.config(decode_path="generated"))


async def test_a_model_whose_first_launch_fails_is_not_captured(toys, graphs, caplog):
    toys.controls().failure = RuntimeError("no such kernel")
    async with toys.engine() as engine:
        assert (await model_of(engine)).decode.reason == "its first launch failed"
    with pytest.raises(LoadError, match="no such kernel"):
        await toys.create(toys.config(decode_path="generated"))
