"""Names, layouts and strictness: every tensor of a checkpoint has its place, and every place its tensor."""

import json
import shutil

import pytest
import torch
from moondream_layouts import original_names, published_shapes
from safetensors.torch import load_file, save_file

from kestrel.errors import LoadError
from kestrel.ops import OPS, resolve_ops
from kestrel.spi import Available, Impl, KernelBackend, TensorInfo, Yes
from kestrel_moondream.config import MoondreamConfig
from kestrel_moondream.model import MoondreamModel
from kestrel_moondream.names import is_moondream, is_moondream3, parameter_name
from kestrel_moondream.weights import load as load_into
from kestrel_moondream.weights import unpack_int4


@pytest.fixture(scope="module")
def tensors(tiny_dir):
    return {name.removeprefix("model."): t for name, t in load_file(tiny_dir / "model.safetensors").items()}


@pytest.fixture
def save(tmp_path, tiny_dir):
    """A function that writes tensors into a copy of the tiny checkpoint."""

    def write(named):
        for name in ("config.json", "tokenizer.json"):
            shutil.copy(tiny_dir / name, tmp_path / name)
        save_file({name: t.contiguous() for name, t in named.items()}, tmp_path / "model.safetensors")
        return tmp_path

    return write


def in_original_layout(tensors):
    names = original_names(vision_layers=2, text_layers=3)
    assert names.keys() == tensors.keys()
    return {names[name]: t.T if name.endswith("_features") else t for name, t in tensors.items()}


def state(built):
    return built.main.model.state_dict()


def test_the_published_model_has_592_tensors_of_the_published_shapes():
    with torch.device("meta"):
        model = MoondreamModel(MoondreamConfig(), resolve_ops(), torch.bfloat16, page_size=16)
    shapes = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    assert len(shapes) == 592
    assert shapes == published_shapes()


@pytest.mark.parametrize("prefix", ["", "_orig_mod."])
def test_names_of_both_layouts_mean_the_same_parameters(prefix):
    names = original_names(vision_layers=27, text_layers=24)
    assert names.keys() == published_shapes().keys()
    for ours, original in names.items():
        assert parameter_name(original) == ours
        assert parameter_name(f"{prefix}model.{ours}") == ours
        assert parameter_name(ours.replace("blocks.", "blocks._orig_mod.")) == ours
    assert is_moondream(names.values())
    assert is_moondream([f"model.{n}" for n in names])
    assert not is_moondream3(names.values())
    assert not is_moondream3(names)


def test_both_layouts_load_into_equal_models(load, save, built, tensors):
    original = state(load(save(in_original_layout(tensors))))
    assert original.keys() == state(built).keys()
    assert all(torch.equal(t, original[name]) for name, t in state(built).items())


def test_a_lone_file_beside_its_config_loads(load, tiny_dir, built):
    alone = state(load(tiny_dir / "model.safetensors"))
    assert all(torch.equal(t, alone[name]) for name, t in state(built).items())


def test_half_precision_weights_are_cast(load, save, built, tensors):
    got = state(load(save({f"model.{n}": t.to(torch.bfloat16) for n, t in tensors.items()})))
    assert all(t.dtype == torch.float32 for t in got.values())
    assert all(torch.equal(t.to(torch.bfloat16), got[n].to(torch.bfloat16)) for n, t in state(built).items())


@pytest.mark.parametrize("layout", ["hf", "original"])
@pytest.mark.parametrize("at", [0, 40, 81])
def test_a_missing_tensor_is_named(load, save, tensors, layout, at):
    named = (
        in_original_layout(tensors) if layout == "original" else {f"model.{n}": t for n, t in tensors.items()}
    )
    dropped = sorted(named)[at]
    del named[dropped]
    with pytest.raises(LoadError) as caught:
        load(save(named))
    assert caught.value.missing == (parameter_name(dropped),)
    assert not caught.value.unexpected


@pytest.mark.parametrize(
    "extra", ["model.text.blocks.0.attn.gate", "lm_head.weight", "region_model.size_head.bias"]
)
def test_an_unexpected_tensor_is_named(load, save, tensors, extra):
    named = {f"model.{n}": t for n, t in tensors.items()} | {extra: torch.zeros(3)}
    with pytest.raises(LoadError) as caught:
        load(save(named))
    assert caught.value.unexpected == (extra,)
    assert not caught.value.missing


def test_a_misshapen_tensor_is_named(load, save, tensors):
    named = {f"model.{n}": t for n, t in tensors.items()} | {"model.text.wte": torch.zeros(277, 63)}
    with pytest.raises(LoadError) as caught:
        load(save(named))
    assert caught.value.misshapen == ("model.text.wte",)


def test_a_tokenizer_larger_than_the_model_is_refused(load, save, tensors, tmp_path):
    path = save({f"model.{n}": t for n, t in tensors.items()})
    card = json.loads((path / "tokenizer.json").read_text())
    card["model"]["vocab"]["ab"] = 277
    (path / "tokenizer.json").write_text(json.dumps(card))
    with pytest.raises(LoadError, match="tokenizer_path"):
        load(path)


@pytest.mark.parametrize(("section", "name"), [("text", "n_layers"), ("vision", "enc_n_layers")])
def test_more_layers_than_there_can_be_are_refused_at_once(load, save, tensors, section, name):
    directory = save({f"model.{key}": t for key, t in tensors.items()})
    config = json.loads((directory / "config.json").read_text())
    config["config"][section][name] = 10**12
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(LoadError, match="has 1000000000000 layers and the checkpoint only"):
        load(directory)


def pack(groups):
    """4-bit values [G, 128] as the published checkpoint packs them."""
    half = len(groups) // 2
    return (groups[:half] << 4) | groups[half:]


def test_four_bit_groups_fill_the_high_nibbles_first():
    q = torch.arange(4 * 128, dtype=torch.int64).reshape(4, 128).remainder(16).to(torch.uint8)
    scale, zero = torch.tensor([[0.5], [1.0], [2.0], [4.0]]), torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    got = unpack_int4(pack(q), scale, zero, (2, 256))
    assert torch.equal(got, ((q.float() - zero) * scale).reshape(2, 256))


def test_a_four_bit_checkpoint_loads_as_floats(load, save, built, tensors):
    generator = torch.Generator().manual_seed(0)
    named, expected = {f"model.{n}": t for n, t in tensors.items()}, {}
    for name in ("text.blocks.1.mlp.fc1", "region.coord_decoder.fc1", "text.blocks.0.attn.qkv"):
        shape = named.pop(f"model.{name}.weight").shape
        groups = shape.numel() // 128
        q = torch.randint(0, 16, (groups, 128), generator=generator).to(torch.uint8)
        scale, zero = (
            torch.rand(groups, 1, generator=generator),
            torch.rand(groups, 1, generator=generator) * 15,
        )
        parts = {"packed": pack(q), "scale": scale, "zero_point": zero}
        named |= {f"model.{name}.weight.{part}": t for part, t in parts.items()}
        expected[f"{name}.weight"] = ((q.float() - zero) * scale).reshape(shape)
    got = state(load(save(named)))
    assert all(torch.equal(t, got[name]) for name, t in (state(built) | expected).items())
    del named["model.text.blocks.1.mlp.fc1.weight.scale"]
    with pytest.raises(LoadError, match="scale"):
        load(save(named))


class Doubling(KernelBackend):
    """Serves every linear from weights of its own layout: twice the checkpoint's."""

    name = "doubling"

    def probe(self, device):
        return Available()

    def impls(self):
        return {"linear": Impl(supports=lambda query: Yes(), fn=self.linear, pack=lambda weight: weight * 2)}

    @staticmethod
    def linear(x, weight, *rest):
        return OPS["linear"].reference(x, weight / 2, *rest)


def test_weights_are_laid_out_for_the_provider_of_their_op(built, tensors):
    reader = Reader(tensors)
    with torch.device("meta"):
        model = MoondreamModel(
            built.main.config, resolve_ops(backends=[Doubling()]), torch.float32, page_size=16
        )
    load_into(model, reader, device="cpu", dtype=torch.float32)
    assert torch.equal(model.text.lm_head.weight, 2 * tensors["text.lm_head.weight"])
    assert torch.equal(model.text.wte, tensors["text.wte"])
    x = torch.ones(3, model.text.lm_head.in_features)
    assert torch.allclose(model.text.lm_head(x), built.main.model.text.lm_head(x))


class Reader:
    """A ``WeightReader`` over tensors in memory."""

    def __init__(self, tensors):
        self._given = tensors
        self.tensors = {
            name: TensorInfo(tuple(t.shape), "F32", "model.safetensors") for name, t in tensors.items()
        }

    def names(self):
        return iter(self._given)

    def get(self, name):
        return self._given[name]
