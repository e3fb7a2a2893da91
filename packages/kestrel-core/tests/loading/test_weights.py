"""Every tensor of the checkpoint and every parameter of the module is accounted for."""

import pytest
import torch
from torch import nn

from kestrel.errors import LoadError
from kestrel.layers import Packed
from kestrel.loading import SafetensorsReader, load_weights, read_card
from kestrel.spi import OpQuery


class NoOps:
    """Modules are built and never run here."""

    def resolve(self, query: OpQuery):
        return lambda *args: None

    def pack(self, query, weight):
        return weight


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.block = nn.Linear(4, 3)
        self.register_buffer("steps", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("angles", torch.arange(3.0, device="cpu"), persistent=False)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = Packed(NoOps(), 4, {"q": 4, "k": 2, "v": 2})


GIVEN = {
    "embed.weight": torch.arange(20.0).reshape(5, 4),
    "block.weight": torch.arange(12.0).reshape(3, 4).half(),
    "block.bias": torch.ones(3, dtype=torch.bfloat16),
    "steps": torch.tensor([7, 8]),
}


def on_meta(kind):
    with torch.device("meta"):
        return kind()


@pytest.fixture
def load(write):
    """Loads tensors into a module built on the meta device, and returns it."""

    def load(tensors, kind=Toy, **options):
        module = on_meta(kind)
        options = {"device": "cpu", "dtype": torch.float32} | options
        load_weights(module, SafetensorsReader.of(read_card("toy", write(tensors))), **options)
        return module

    return load


def test_module_is_filled_converted_and_ready(load):
    module = load(GIVEN)
    assert torch.equal(module.embed.weight, GIVEN["embed.weight"])
    assert torch.equal(module.block.weight, GIVEN["block.weight"].float())
    assert module.block.bias.dtype == torch.float32
    assert torch.equal(module.steps, GIVEN["steps"])
    assert torch.equal(module.angles, torch.arange(3.0))
    assert not module.training
    assert not any(parameter.requires_grad for parameter in module.parameters())


def test_dtype_applies_to_floats_and_exceptions_by_name(load):
    module = load(GIVEN, dtype=torch.bfloat16, dtypes={"block.*": torch.float64})
    assert module.embed.weight.dtype == torch.bfloat16
    assert module.block.weight.dtype == torch.float64
    assert module.steps.dtype == torch.int64
    assert module.angles.dtype == torch.float32


def test_report_lists_all_that_is_wrong_at_once(load):
    wrong = GIVEN | {
        "embed.weight": torch.zeros(5, 3),
        "steps": torch.zeros(2),
        "extra.bias": torch.zeros(1),
    }
    del wrong["block.bias"]
    with pytest.raises(LoadError) as caught:
        load(wrong)
    error = caught.value
    assert error.missing == ("block.bias",)
    assert error.unexpected == ("extra.bias",)
    assert error.misshapen == ("embed.weight", "steps")
    for line in (
        "does not fit Toy",
        "missing (1)",
        "extra.bias: F32 [1]",
        "[5, 3] in the checkpoint, [5, 4] in the model",
        "F32 in the checkpoint, the model takes torch.int64",
    ):
        assert line in str(error)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("block.weight", torch.zeros(3, 4, dtype=torch.int32)),
        ("block.weight", torch.zeros(3, 4, dtype=torch.float8_e4m3fn)),
        ("steps", torch.zeros(2, dtype=torch.int32)),
        ("steps", torch.zeros(2, dtype=torch.bool)),
    ],
)
def test_tensor_of_a_wrong_dtype_is_refused(load, name, tensor):
    with pytest.raises(LoadError, match="of a wrong shape or dtype") as caught:
        load(GIVEN | {name: tensor})
    assert caught.value.misshapen == (name,)


def test_module_is_untouched_when_the_checkpoint_does_not_fit(write):
    module = on_meta(Toy)
    reader = SafetensorsReader.of(read_card("toy", write({"a": torch.zeros(1)})))
    with pytest.raises(LoadError):
        load_weights(module, reader, device="cpu", dtype=torch.float32)
    assert all(parameter.is_meta for parameter in module.parameters())


@pytest.mark.parametrize(
    "rename",
    [
        {"model.": "", "model.head.": "block.", "count": "steps"},
        lambda name: {"count": "steps"}.get(name, name.replace("model.head", "block").replace("model.", "")),
    ],
)
def test_names_are_changed_by_table_or_function(load, rename):
    named = {
        "model.embed.weight": GIVEN["embed.weight"],
        "model.head.weight": GIVEN["block.weight"],
        "model.head.bias": GIVEN["block.bias"],
        "count": GIVEN["steps"],
    }
    assert torch.equal(load(named, rename=rename).block.weight, GIVEN["block.weight"].float())


def test_two_tensors_for_one_parameter_are_refused(load):
    with pytest.raises(LoadError, match="already filled"):
        load(GIVEN | {"old.bias": GIVEN["block.bias"].clone()}, rename={"old.": "block."})


def test_ignored_tensors_may_be_there_or_not(load):
    for given in (GIVEN | {"rotary.inv_freq": torch.zeros(2)}, GIVEN):
        module = load(given, ignore={"*.inv_freq": "computed from the config"})
        assert torch.equal(module.block.weight, GIVEN["block.weight"].float())


def test_transform_changes_shape_and_values(load):
    stored = GIVEN | {"block.weight": GIVEN["block.weight"].t().contiguous()}
    module = load(stored, transforms={"block.weight": lambda tensor: tensor.t()})
    assert torch.equal(module.block.weight, GIVEN["block.weight"].float())
    assert module.block.weight.is_contiguous()


def test_transform_that_cannot_apply_is_reported_with_the_rest(load):
    with pytest.raises(LoadError, match="cannot be transformed") as caught:
        load(GIVEN, transforms={"block.weight": lambda tensor: tensor.reshape(5, 5)})
    assert caught.value.misshapen == ("block.weight",)


def test_tied_weight_may_be_absent_and_is_shared(load):
    class Tied(Toy):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(4, 5, bias=False)

    with pytest.raises(LoadError) as caught:
        load(GIVEN, Tied)
    assert caught.value.missing == ("head.weight",)
    module = load(GIVEN, Tied, tied={"head.weight": "embed.weight"})
    assert module.head.weight is module.embed.weight


def test_tied_weight_in_the_checkpoint_must_be_the_same(load):
    class Tied(Toy):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(4, 5, bias=False)

    tied = {"head.weight": "embed.weight"}
    module = load(GIVEN | {"head.weight": GIVEN["embed.weight"].clone()}, Tied, tied=tied)
    assert module.head.weight is module.embed.weight
    with pytest.raises(LoadError, match="one tensor in this model"):
        load(GIVEN | {"head.weight": GIVEN["embed.weight"] + 1}, Tied, tied=tied)


def test_buffer_that_nobody_computed_is_reported(load):
    class Forgetful(Toy):
        def __init__(self):
            super().__init__()
            self.register_buffer("mask", torch.zeros(2), persistent=False)

    with pytest.raises(LoadError) as caught:
        load(GIVEN, Forgetful)
    assert caught.value.missing == ("mask",)


WHOLE = {"qkv.weight": torch.arange(32.0).reshape(8, 4), "qkv.bias": torch.arange(8.0)}
ROWS = {"q": slice(0, 4), "k": slice(4, 6), "v": slice(6, 8)}
PARTS = {
    f"qkv.{part}.{kind}": WHOLE[f"qkv.{kind}"][rows].clone()
    for part, rows in ROWS.items()
    for kind in ("weight", "bias")
}


@pytest.mark.parametrize("given", [WHOLE, PARTS])
def test_packed_weight_is_loaded_whole_or_from_its_parts(load, given):
    module = load(given, Attention)
    assert torch.equal(module.qkv.weight, WHOLE["qkv.weight"])
    assert torch.equal(module.qkv.bias, WHOLE["qkv.bias"])


def test_missing_and_misshapen_parts_of_a_packed_weight_are_reported(load):
    parts = PARTS | {"qkv.v.weight": torch.zeros(1, 4)}
    del parts["qkv.k.weight"], parts["qkv.v.bias"]
    with pytest.raises(LoadError, match="rows 4 to 6") as caught:
        load(parts, Attention)
    assert caught.value.missing == ("qkv.weight", "qkv.bias")
    assert caught.value.misshapen == ("qkv.v.weight",)


def test_part_beside_the_whole_is_refused(load):
    with pytest.raises(LoadError) as caught:
        load(WHOLE | {"qkv.k.bias": torch.zeros(2)}, Attention)
    assert caught.value.unexpected == ("qkv.k.bias",)


def test_progress_counts_bytes_to_the_end(load):
    seen = []
    load(GIVEN, progress=lambda done, total: seen.append((done, total)))
    total = sum(tensor.nbytes for tensor in GIVEN.values())
    assert seen[-1] == (total, total)
    assert seen == sorted(seen)
