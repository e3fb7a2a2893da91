"""The stand-in for captured programs says what an accelerator would do wrong in silence."""

import pytest
import torch

from kestrel.testing.graphs import ReplayGraphs


def test_a_replay_computes_again_from_what_is_in_the_same_memory():
    x, graphs = torch.ones(3), ReplayGraphs()
    program = graphs.capture(lambda: x * 2)
    first = program.replay()
    assert first.tolist() == [2, 2, 2]
    x.fill_(5)
    assert program.replay() is first
    assert first.tolist() == [10, 10, 10]
    assert graphs.num_replays == 2


def test_capturing_computes_nothing():
    x = torch.zeros(1)
    program = ReplayGraphs().capture(lambda: x.add_(1))
    assert x.item() == 0
    program.replay()
    assert x.item() == 1


def test_memory_that_moved_is_found():
    held = {"x": torch.ones(3)}
    program = ReplayGraphs().capture(lambda: held["x"] + 1)
    program.replay()
    held["x"] = torch.ones(3)
    with pytest.raises(AssertionError, match=r"call 0 of a captured program was .*aten.add"):
        program.replay()


@pytest.mark.parametrize(
    "run",
    [
        lambda turn, x: x + turn[0],
        lambda turn, x: x.exp() if turn[0] else x.sin(),
        lambda turn, x: x if turn[0] else x + 1,
    ],
    ids=["a number of the host", "another operation", "fewer operations"],
)
def test_what_the_host_decides_anew_is_found(run):
    turn, x = [0], torch.ones(2)
    program = ReplayGraphs().capture(lambda: run(turn, x))
    program.replay()
    turn[0] = 1
    with pytest.raises(AssertionError, match=r"captured program|a program of"):
        program.replay()


def test_a_tensor_of_python_values_is_refused():
    x = torch.ones(2)
    program = ReplayGraphs().capture(lambda: x + torch.tensor([1.0, 2.0]))
    with pytest.raises(AssertionError, match="makes a tensor of Python values"):
        program.replay()


def test_reading_a_number_back_is_refused():
    x = torch.ones(2)
    program = ReplayGraphs().capture(lambda: x * x.sum().item())
    with pytest.raises(AssertionError, match="reads a number back"):
        program.replay()


def test_results_are_spoilt_by_programs_captured_before_but_not_by_those_that_read_them():
    x, graphs = torch.ones(2), ReplayGraphs()
    other = graphs.capture(lambda: x + 1)
    made = graphs.capture(lambda: x * 3)
    result = made.replay()
    reader = graphs.capture(lambda: result + 1)
    assert reader.replay().tolist() == [4, 4]
    assert result.tolist() == [3, 3]
    other.replay()
    assert result.tolist() != [3, 3]
