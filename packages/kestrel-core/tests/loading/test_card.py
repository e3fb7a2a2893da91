"""What a checkpoint is, or what is wrong with it, before any tensor is read."""

import json
import struct

import pytest
import torch

from kestrel.errors import LoadError
from kestrel.loading import SafetensorsReader, read_card
from kestrel.spi import TensorInfo

A, B = torch.arange(6.0).reshape(2, 3), torch.zeros(4, dtype=torch.int32)


def test_card_of_a_directory_holds_config_files_and_headers(write):
    directory = write({"a": A, "b": B.bool()}, config={"model_type": "toy"})
    card = read_card("acme/toy", directory, revision="abc")
    assert card.config == {"model_type": "toy"}
    assert card.tensors == {
        "a": TensorInfo((2, 3), "F32", "model.safetensors"),
        "b": TensorInfo((4,), "BOOL", "model.safetensors"),
    }
    assert card.files["model.safetensors"] == (directory / "model.safetensors").stat().st_size
    assert (card.model_id, card.revision, card.directory) == ("acme/toy", "abc", directory)


def test_card_of_a_lone_file_takes_the_config_beside_it_if_any(write):
    directory = write({"a": A})
    lone = read_card("x", directory / "model.safetensors")
    assert lone.config == {}
    (directory / "config.json").write_text('{"size": 3}')
    assert read_card("x", directory / "model.safetensors").config == {"size": 3}
    assert lone.directory == directory


@pytest.mark.parametrize("index", [True, False])
def test_shards_are_one_checkpoint_with_or_without_an_index(write, index):
    directory = write({"a": A}, {"b": B}, index=index)
    card = read_card("x", directory)
    assert {name: info.file for name, info in card.tensors.items()} == {
        "a": "model-00001-of-00002.safetensors",
        "b": "model-00002-of-00002.safetensors",
    }
    reader = SafetensorsReader.of(card)
    assert torch.equal(reader.get("a"), A)
    assert torch.equal(reader.get("b"), B)


@pytest.mark.parametrize("index", [True, False])
def test_every_missing_shard_is_listed(write, index):
    directory = write({"a": A}, {"b": B}, {"c": B}, index=index)
    gone = ["model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors"]
    for name in gone:
        (directory / name).unlink()
    with pytest.raises(LoadError) as caught:
        read_card("x", directory)
    assert caught.value.missing == tuple(gone)
    assert all(name in str(caught.value) for name in gone)


def test_index_that_names_a_tensor_its_shard_lacks_is_refused(write):
    directory = write({"a": A}, {"b": B})
    index = directory / "model.safetensors.index.json"
    places = json.loads(index.read_text())
    places["weight_map"]["ghost"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(places))
    with pytest.raises(LoadError, match="ghost") as caught:
        read_card("x", directory)
    assert caught.value.missing == ("ghost",)


@pytest.mark.parametrize(
    "name", ["../outside.safetensors", "/etc/passwd", "C:\\x.safetensors", "a\\..\\..\\b", ""]
)
def test_index_cannot_lead_out_of_the_checkpoint(write, name):
    directory = write({"a": A}, {"b": B})
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(LoadError, match="leads out of"):
        read_card("x", directory)


def test_one_tensor_in_two_files_is_refused(write):
    with pytest.raises(LoadError, match="'a' is in"):
        read_card("x", write({"a": A}, {"a": A}, index=False))


@pytest.mark.parametrize(
    ("content", "text"),
    [("{", "not JSON"), ("[1]", "an object is needed"), ("\xff", "not JSON"), ("[" * 100_000, "not JSON")],
)
def test_damaged_config_is_named(write, content, text):
    directory = write({"a": A})
    (directory / "config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(LoadError, match=text) as caught:
        read_card("x", directory)
    assert "config.json" in str(caught.value)


def test_pickle_weights_are_refused_asking_for_safetensors(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02")
    with pytest.raises(LoadError, match=r"pytorch_model.bin.*safetensors only"):
        read_card("x", tmp_path)


def test_pickles_beside_safetensors_are_left_alone(write):
    directory = write({"a": A})
    (directory / "pytorch_model.bin").write_bytes(b"\x80\x02")
    assert set(read_card("x", directory).tensors) == {"a"}


def test_directory_without_weights_and_absent_paths_are_errors(tmp_path):
    with pytest.raises(LoadError, match=r"no \*.safetensors file"):
        read_card("x", tmp_path)
    with pytest.raises(LoadError, match="does not exist"):
        read_card("x", tmp_path / "absent")
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(LoadError, match="not a safetensors file"):
        read_card("x", tmp_path / "model.bin")


def header(entries: object, data: bytes = b"") -> bytes:
    raw = json.dumps(entries).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def entry(start: int, end: int, shape: object = (1,), dtype: str = "F32") -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x01\x02",
        b"\xff" * 64,
        struct.pack("<Q", 4) + b"nope",
        struct.pack("<Q", 100_000) + b"[" * 100_000,
        struct.pack("<Q", 400) + b"{}",
        header([1]),
        header({"a": 3}),
        header({"a": entry(0, 4, dtype="F33")}, bytes(4)),
        header({"a": entry(0, 4, shape=[-1])}, bytes(4)),
        header({"a": {"dtype": "F32", "shape": [1]}}, bytes(4)),
        header({"a": entry(0, 8)}, bytes(8)),
        header({"a": entry(0, 4), "b": entry(8, 12)}, bytes(12)),
        header({"a": entry(0, 4)}, bytes(3)),
        header({"a": entry(0, 4)}, bytes(5)),
    ],
)
def test_damaged_safetensors_file_is_named(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(LoadError, match=r"model\.safetensors is not a sound safetensors file"):
        read_card("x", tmp_path)


def test_file_cut_short_after_the_card_was_read_is_a_load_error(write):
    directory = write({"a": A})
    card = read_card("x", directory)
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(LoadError, match=r"cannot read tensor 'a' of .*model\.safetensors"):
        SafetensorsReader.of(card).get("a")


def test_reader_names_an_unknown_tensor(write):
    reader = SafetensorsReader.of(read_card("x", write({"a": A})))
    with pytest.raises(LoadError, match="no tensor 'b'"):
        reader.get("b")
    assert list(reader.names()) == ["a"]


def test_tensors_stay_valid_after_the_reader_is_closed(write):
    with SafetensorsReader.of(read_card("x", write({"a": A}))) as reader:
        tensor = reader.get("a")
    assert torch.equal(tensor, A)
