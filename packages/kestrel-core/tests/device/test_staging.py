"""Host arrays on their way to a device that has memory of its own; on a CPU such a device is played."""

import numpy as np
import pytest
import torch

from kestrel.device import Staging, staging

CPU = torch.device("cpu")


@pytest.fixture
def apart(monkeypatch):
    """The CPU as a device that does not share the host's memory."""
    monkeypatch.setattr(staging, "shares_host", lambda device: False)


def arrays(seed, count):
    rng = np.random.default_rng(seed)
    dtypes = [np.int64, np.int32, np.float32, np.uint8, np.bool_]
    shapes = [tuple(rng.integers(0, 9, rng.integers(1, 4))) for _ in range(count)]
    return [(rng.random(shape) * 200).astype(dtypes[i % len(dtypes)]) for i, shape in enumerate(shapes)]


def test_on_a_cpu_an_array_stays_where_it_is():
    array = np.arange(4)
    there = Staging(CPU).put(array)
    array[0] = 9
    assert there.tolist() == [9, 1, 2, 3]


@pytest.mark.parametrize("least_bytes", [64, 1 << 14])
def test_arrays_of_every_kind_arrive_with_one_send(apart, least_bytes):
    stage = Staging(CPU, least_bytes=least_bytes)
    for seed in range(2 * staging.RING + 1):
        sent = arrays(seed, 11)
        there = [stage.put(array) for array in sent]
        copies = [array.copy() for array in sent]
        for array in sent:
            array[...] = 0
        stage.send()
        for tensor, array in zip(there, copies, strict=True):
            assert tensor.dtype == torch.from_numpy(array).dtype
            assert tensor.tolist() == array.tolist()


def test_what_was_put_stays_until_the_ring_comes_round(apart):
    stage = Staging(CPU)
    there = []
    for value in range(staging.RING):
        there.append(stage.put(np.full(3, value)))
        stage.send()
    assert [tensor.tolist() for tensor in there] == [[value] * 3 for value in range(staging.RING)]


def test_a_buffer_that_was_too_small_is_large_enough_the_next_time(apart):
    stage = Staging(CPU, least_bytes=64)
    for _ in range(2 * staging.RING):
        for _ in range(5):
            stage.put(np.zeros(64))
        stage.send()
    assert all(len(slot._blocks) == 1 for slot in stage._ring)


def test_tensors_are_laid_side_by_side(apart):
    stage = Staging(CPU)
    parts = [torch.arange(6).view(2, 3), torch.full((1, 3), 7), torch.zeros(0, 3, dtype=torch.int64)]
    there = stage.put_all(parts)
    stage.send()
    assert there.tolist() == [[0, 1, 2], [3, 4, 5], [7, 7, 7]]


def test_on_a_cpu_tensors_side_by_side_are_there_at_once():
    parts = [torch.arange(3), torch.arange(2)]
    assert Staging(CPU).put_all(parts).tolist() == [0, 1, 2, 0, 1]
    assert Staging(CPU).put_all(parts[:1]).tolist() == [0, 1, 2]


@pytest.mark.parametrize("is_apart", [False, True])
def test_a_table_has_what_was_touched_and_what_the_device_wrote_elsewhere(request, is_apart):
    if is_apart:
        request.getfixturevalue("apart")
    stage = Staging(CPU)
    table = stage.table((4, 3), np.int32, fill=5)
    table.tensor[3] = 8
    table.host[1] = [1, 2, 3]
    table.touch(1)
    table.host[2, 1:] = 4
    table.touch(2, 1, 3)
    stage.send()
    assert table.tensor.tolist() == [[5, 5, 5], [1, 2, 3], [5, 4, 4], [8, 8, 8]]


def test_nothing_reaches_a_table_before_the_send_nor_twice(apart):
    stage = Staging(CPU)
    table = stage.table((3,), np.int64)
    table.host[1] = 1
    table.touch(1)
    assert table.tensor.tolist() == [0, 0, 0]
    stage.send()
    table.tensor[1] = 7
    stage.send()
    assert table.tensor.tolist() == [0, 7, 0]


def test_tables_agree_with_a_plain_model_over_random_writes(apart):
    rng = np.random.default_rng(3)
    stage = Staging(CPU, least_bytes=64)
    tables = [stage.table((5, 4), np.int64), stage.table((5,), np.bool_), stage.table((5, 2, 2), np.float32)]
    wanted = [table.host.copy() for table in tables]
    for _ in range(60):
        for table, want in zip(tables, wanted, strict=True):
            for _ in range(rng.integers(0, 4)):
                row, flat = int(rng.integers(5)), table.host.reshape(5, -1)
                start, stop = sorted(rng.integers(0, flat.shape[1] + 1, 2).tolist())
                flat[row, start:stop] = rng.integers(0, 2, stop - start)
                if start < stop:
                    table.touch(row, start, stop)
                want.reshape(5, -1)[row, start:stop] = flat[row, start:stop]
        stage.send()
        for table, want in zip(tables, wanted, strict=True):
            assert table.tensor.tolist() == want.tolist()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")  # so says torch
def test_a_gpu_gets_arrays_and_rows_without_waiting():
    device = torch.device("cuda:0")
    stage = Staging(device, least_bytes=64)
    table = stage.table((6, 4), np.int64)
    seen = []
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        for turn in range(3 * staging.RING):
            there = stage.put(np.full((3, 5), turn, dtype=np.int32))
            table.host[turn % 6] = turn
            table.touch(turn % 6)
            stage.send()
            seen.append(there.clone())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [int(x[2, 4]) for x in seen] == list(range(3 * staging.RING))
    assert table.tensor[:, 0].tolist() == [6, 7, 8, 9, 10, 11]


def test_rows_that_can_wait_go_with_the_first_others(apart):
    stage = Staging(CPU)
    table, other = stage.table((3, 2), np.int64, 7), stage.table((2,), np.int32)
    table.host[1] = 0
    table.touch(1, can_wait=True)
    stage.send()
    assert table.tensor[1].tolist() == [7, 7], "a send for it alone would cost more than it is worth"
    other.host[0] = 5
    other.touch(0)
    stage.send()
    assert table.tensor.tolist() == [[7, 7], [0, 0], [7, 7]]
    assert other.tensor.tolist() == [5, 0]


def test_rows_that_can_wait_go_with_what_is_put_and_with_a_flush(apart):
    stage = Staging(CPU)
    table = stage.table((2,), np.int64, 7)
    for row, also in enumerate((lambda: stage.put(np.zeros(1)), stage.flush)):
        table.host[row] = 0
        table.touch(row, can_wait=True)
        also()
        stage.send()
        assert table.tensor[row] == 0
