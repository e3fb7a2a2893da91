"""Repositories arrive whole in the hub's own cache, as safetensors only, or say why not."""

import errno
import socket

import pytest

from kestrel.errors import LoadError, UnknownModelError
from kestrel.hub import HubSource

SHA = "a" * 40
FILES = {
    "config.json": b'{"model_type": "toy"}',
    "tokenizer.json": b"{}",
    "model.safetensors": bytes(300_000),
    "pytorch_model.bin": b"pickle",
    "modeling_toy.py": b"raise SystemExit",
    "README.md": b"# Toy",
    "onnx/config.json": b"{}",
}


@pytest.fixture
def source(hub, tmp_path):
    hub.repos["acme/toy"] = dict(FILES)
    return HubSource(endpoint=hub.url, cache_dir=tmp_path / "cache")


@pytest.fixture
def sever(monkeypatch):
    """From its call on, every attempt to reach anything fails the test."""

    def refuse(*args, **options):
        raise AssertionError(f"a connection was tried: {args}")

    def sever():
        monkeypatch.setattr(socket.socket, "connect", refuse)
        monkeypatch.setattr(socket, "getaddrinfo", refuse)

    return sever


def locate(source, repo="acme/toy", revision=None, offline=False, progress=None):
    return source.locate(repo, revision=revision, offline=offline, progress=progress)


def test_snapshot_holds_weights_configs_and_tokenizer_and_nothing_that_runs(source, hub):
    folder = locate(source)
    assert folder.name == SHA
    assert {path.name for path in folder.iterdir()} == {"config.json", "tokenizer.json", "model.safetensors"}
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert set(hub.fetched) == {"config.json", "tokenizer.json", "model.safetensors"}


def test_second_time_fetches_no_file(source, hub):
    first = locate(source)
    hub.fetched.clear()
    assert locate(source) == first
    assert hub.fetched == []


def test_progress_counts_bytes_up_to_the_whole(source):
    seen = []
    locate(source, progress=lambda name, done, total: seen.append((name, done, total)))
    total = sum(len(FILES[name]) for name in ("config.json", "tokenizer.json", "model.safetensors"))
    assert seen[-1] == ("model.safetensors", total, total)
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    assert {all_ for _, _, all_ in seen} == {total}


def test_pinned_revision_is_fetched(source):
    assert locate(source, revision=SHA).name == SHA


@pytest.mark.parametrize("revision", [None, "main", SHA])
def test_offline_finds_the_cache_and_makes_no_connection(source, sever, revision):
    folder = locate(source)
    sever()
    assert locate(source, revision=revision, offline=True) == folder


@pytest.mark.parametrize("revision", [None, SHA, "v2"])
def test_offline_without_a_cache_says_how_to_get_it_and_makes_no_connection(source, sever, revision):
    sever()
    with pytest.raises(UnknownModelError, match="kestrel pull acme/toy"):
        locate(source, revision=revision, offline=True)


def test_offline_snapshot_without_weights_is_not_a_model(source, hub):
    folder = locate(source)
    (folder / "model.safetensors").unlink()
    with pytest.raises(UnknownModelError, match="without weights"):
        locate(source, offline=True)


def test_unreachable_hub_falls_back_to_the_cache_and_says_so(source, hub, caplog, tmp_path):
    folder = locate(source)
    away = HubSource(endpoint="http://127.0.0.1:9", cache_dir=tmp_path / "cache")
    assert locate(away) == folder
    assert "cannot be reached" in caplog.text


def test_unreachable_hub_without_a_cache_is_a_load_error(hub, tmp_path):
    away = HubSource(endpoint="http://127.0.0.1:9", cache_dir=tmp_path / "cache")
    with pytest.raises(LoadError, match=r"'acme/toy' cannot be downloaded.*retry"):
        locate(away)


def test_repository_with_pickles_only_is_refused_before_any_download(source, hub):
    hub.repos["acme/toy"] = {"config.json": b"{}", "pytorch_model.bin": b"pickle"}
    with pytest.raises(LoadError, match=r"pytorch_model\.bin.*has safetensors"):
        locate(source)
    assert hub.fetched == []


def test_repository_without_weights_is_refused(source, hub):
    hub.repos["acme/toy"] = {"README.md": b"# Nothing"}
    with pytest.raises(LoadError, match=r"no \*\.safetensors"):
        locate(source)


def test_unknown_repository_and_revision_and_bad_names_are_unknown_models(source):
    with pytest.raises(UnknownModelError, match=r"no repository 'acme/absent'.*HF_TOKEN"):
        locate(source, "acme/absent")
    with pytest.raises(UnknownModelError, match="no revision 'v9'"):
        locate(source, revision="v9")
    with pytest.raises(UnknownModelError, match="owner/name"):
        locate(source, "a/b/c")


def test_gated_repository_says_to_accept_its_terms(source, hub):
    hub.refuse["acme/gated"] = (403, "GatedRepo")
    with pytest.raises(LoadError, match=r"gated.*terms.*HF_TOKEN"):
        locate(source, "acme/gated")


def test_failing_hub_is_a_load_error(source, hub):
    hub.refuse["acme/toy"] = (418, "")
    with pytest.raises(LoadError, match="cannot be downloaded"):
        locate(source)


def test_disk_full_while_downloading_names_place_and_bytes(source, monkeypatch, tmp_path):
    import huggingface_hub

    def full(*args, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", full)
    with pytest.raises(LoadError, match="disk is full") as caught:
        locate(source)
    assert str(tmp_path / "cache") in str(caught.value)
    assert "config.json of 21 bytes" in str(caught.value) or "tokenizer.json of 2 bytes" in str(caught.value)


def test_download_larger_than_the_free_space_is_refused_before_it_starts(source, hub, monkeypatch):
    import shutil
    from collections import namedtuple

    monkeypatch.setattr(shutil, "disk_usage", lambda path: namedtuple("Usage", "total used free")(1, 1, 1000))
    with pytest.raises(LoadError, match="300023 bytes, with 1000 free"):
        locate(source)
    assert hub.fetched == []
