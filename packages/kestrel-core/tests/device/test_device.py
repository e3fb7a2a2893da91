import pytest
import torch

from kestrel.device import (
    choice,
    describe,
    free_memory,
    has_streams,
    memory,
    resolve_device,
    resolve_dtype,
    total_memory,
)
from kestrel.errors import InvalidRequestError

CPU, GPU, MPS = torch.device("cpu"), torch.device("cuda", 0), torch.device("mps")


def test_auto_takes_the_best_device_present(monkeypatch):
    monkeypatch.setattr(choice, "_present", lambda: ["cuda", "mps", "cpu"])
    assert resolve_device("auto") == GPU
    monkeypatch.setattr(choice, "_present", lambda: ["mps", "cpu"])
    assert resolve_device("auto") == MPS
    monkeypatch.setattr(choice, "_present", lambda: ["cpu"])
    assert resolve_device("auto") == CPU


def test_an_absent_device_is_an_error_that_says_what_is_there(monkeypatch):
    monkeypatch.setattr(choice, "_present", lambda: ["cpu"])
    with pytest.raises(InvalidRequestError, match="finds only cpu here"):
        resolve_device("cuda:1")


def test_a_device_number_beyond_the_last_is_an_error(monkeypatch):
    monkeypatch.setattr(choice, "_present", lambda: ["cuda", "cpu"])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(InvalidRequestError, match="2 CUDA devices"):
        resolve_device("cuda:2")


def test_an_unknown_device_names_the_choices():
    with pytest.raises(InvalidRequestError, match="Choices: auto, cpu, cuda, mps"):
        resolve_device("tpu")


def test_auto_dtype_depends_on_the_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert resolve_dtype("auto", CPU, torch.bfloat16) == torch.float32
    assert resolve_dtype("auto", MPS, torch.bfloat16) == torch.float16
    assert resolve_dtype("auto", GPU, torch.float16) == torch.float16
    assert resolve_dtype("auto", GPU, torch.float8_e4m3fn) == torch.bfloat16
    assert resolve_dtype("auto", GPU, None) == torch.bfloat16


def test_auto_dtype_avoids_bfloat16_where_the_gpu_lacks_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert resolve_dtype("auto", GPU, torch.bfloat16) == torch.float16
    assert resolve_dtype("auto", GPU, torch.float32) == torch.float32


def test_a_named_dtype_is_taken_and_an_unknown_one_refused():
    assert resolve_dtype("bfloat16", CPU, torch.float32) == torch.bfloat16
    with pytest.raises(InvalidRequestError, match="Did you mean 'bfloat16'"):
        resolve_dtype("bfloat", CPU, None)


def test_host_memory_is_plausible():
    total, free = total_memory(CPU), free_memory(CPU)
    assert 2**28 < total < 2**50
    assert 0 < free <= total


def test_a_container_limit_bounds_host_memory(monkeypatch):
    monkeypatch.setattr(memory, "_cgroup_memory", lambda: (2**28, 2**27))
    assert total_memory(CPU) == 2**28
    assert free_memory(CPU) <= 2**27


def test_the_cpu_has_no_streams_and_describes_itself():
    assert not has_streams(CPU)
    assert has_streams(GPU)
    assert "CPU" in describe(CPU)
