"""Tensors of recurrent state: what happens to one slot, in every layer."""

import pytest
import torch

from kestrel.spi import Recurrent, StatePart
from kestrel.state.tensors import RecurrentTensors

SPEC = Recurrent(
    name="delta", layers=3, parts=(StatePart(name="state", shape=(2, 2)), StatePart(name="conv", shape=(4,)))
)


@pytest.fixture
def tensors():
    """Four slots, no two numbers of a part equal."""
    made = RecurrentTensors.allocate(SPEC, 3, dtype=torch.float32, device=torch.device("cpu"))
    for x in made.parts.values():
        x.copy_(torch.arange(1, x.numel() + 1).view_as(x))
    return made


def test_a_slot_is_zeroed_in_every_layer_and_no_other_is(tensors):
    before = {name: x.clone() for name, x in tensors.parts.items()}
    tensors.zero(2)
    for name, x in tensors.parts.items():
        assert not x[:, 2].any()
        assert torch.equal(x[:, [0, 1, 3]], before[name][:, [0, 1, 3]])


def test_a_slot_is_copied_in_every_layer_to_one_other(tensors):
    before = {name: x.clone() for name, x in tensors.parts.items()}
    tensors.copy(1, 3)
    for name, x in tensors.parts.items():
        assert torch.equal(x[:, 3], before[name][:, 1])
        assert torch.equal(x[:, :3], before[name][:, :3])
