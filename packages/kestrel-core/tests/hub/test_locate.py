"""What a user types becomes files, or an error that says what could be typed."""

import types
from pathlib import Path

import pytest

from kestrel.config import RuntimeConfig
from kestrel.errors import LoadError, UnknownModelError
from kestrel.hub import FileSource, Located, inside, resolve_model
from kestrel.plugins import PluginHost
from kestrel.spi import CatalogEntry, ModelFamily, Source, hookimpl


class Recorder(Source):
    """A source that remembers what it was asked."""

    def __init__(self, scheme: str, error: Exception | None = None) -> None:
        self.scheme, self.error, self.asked = scheme, error, []

    def locate(self, reference, *, revision, offline, progress=None):
        self.asked.append((reference, revision, offline))
        if self.error is not None:
            raise self.error
        if progress is not None:
            progress("model.safetensors", 1, 2)
        return Path("cache/snapshots") / ("f" * 40)


class Family(ModelFamily):
    name = "toy"

    def match(self, card):
        return None

    def describe(self, card):
        raise NotImplementedError

    def build(self, card, ctx):
        raise NotImplementedError

    def catalog(self):
        return [
            CatalogEntry(name="acme/big", source="hf:acme/big-model", revision="abc", note="large"),
            CatalogEntry(name="acme/nano", source="file:/nano", embedded=True, note="a demonstration model"),
            CatalogEntry(name="acme/lost", source="gone:thing"),
        ]


FAMILY = Family()


def host(families=(FAMILY,), sources=(), broken=False):
    plugin = types.SimpleNamespace(KESTREL_SPI_VERSION=1)
    plugin.kestrel_model_families = hookimpl(lambda: list(families))
    plugin.kestrel_model_sources = hookimpl(lambda: list(sources))
    plugins = {"toy": plugin}
    if broken:
        plugins["broken"] = types.SimpleNamespace(KESTREL_SPI_VERSION=0)
    return PluginHost.from_modules(plugins)


@pytest.fixture
def sources():
    return {scheme: Recorder(scheme) for scheme in ("file", "hf")}


def resolve(sources, model=None, plugins=None, **options):
    config = {key: options.pop(key) for key in ("model_path", "revision", "offline") if key in options}
    return resolve_model(RuntimeConfig(model=model, **config), plugins or host(), sources=sources, **options)


def test_registered_name_leads_to_its_source_at_its_pinned_revision(sources):
    found = resolve(sources, "acme/big")
    assert sources["hf"].asked == [("acme/big-model", "abc", False)]
    assert found == Located(path=found.path, model_id="acme/big", revision="f" * 40, note="large")


def test_revision_of_the_user_wins_and_case_does_not_matter(sources):
    assert resolve(sources, "Acme/BIG", revision="def").model_id == "acme/big"
    assert sources["hf"].asked == [("acme/big-model", "def", False)]


def test_no_name_means_the_embedded_model_and_says_so(sources):
    found = resolve(sources)
    assert sources["file"].asked == [("/nano", None, False)]
    assert (found.model_id, found.note) == ("acme/nano", "a demonstration model")


def test_no_name_without_an_embedded_model_says_what_to_do(sources):
    with pytest.raises(UnknownModelError, match=r"install the package kestrel-moondream.*broken"):
        resolve(sources, plugins=host(families=(), broken=True))


def test_path_wins_over_the_name(sources, tmp_path):
    (tmp_path / "mine").mkdir()
    found = resolve({"file": FileSource()}, "acme/big", model_path=tmp_path / "mine")
    assert (found.path, found.model_id) == (tmp_path / "mine", "acme/big")


@pytest.mark.parametrize(
    ("path", "name"), [("mine", "mine"), ("acme-2.1", "acme-2.1"), ("one.safetensors", "one")]
)
def test_a_path_without_a_name_is_called_as_it_ends(tmp_path, path, name):
    (tmp_path / path).mkdir()
    assert resolve({"file": FileSource()}, model_path=str(tmp_path / path)).model_id == name


@pytest.mark.parametrize(
    ("name", "scheme", "reference"),
    [
        ("other/repo", "hf", "other/repo"),
        ("hf:other/repo", "hf", "other/repo"),
        ("file:/some/where", "file", "/some/where"),
        ("./local", "file", "./local"),
        ("../local/model", "file", "../local/model"),
        ("/local/model", "file", "/local/model"),
        ("~/model", "file", "~/model"),
        ("model.safetensors", "file", "model.safetensors"),
    ],
)
def test_unregistered_names_are_read_by_their_form(sources, name, scheme, reference):
    resolve(sources, name)
    assert sources[scheme].asked == [(reference, None, False)]


def test_scheme_of_a_plugin_is_served_by_it(sources):
    mine = Recorder("acme")
    resolve(sources, "acme:a thing", plugins=host(sources=[mine]))
    assert mine.asked == [("a thing", None, False)]


@pytest.mark.parametrize("name", ["acme-big", "nope:x", "a b/c", "x/y/z", "C:model"])
def test_unknown_names_are_answered_with_the_closest_and_the_failed_plugins(sources, name):
    with pytest.raises(UnknownModelError) as caught:
        resolve(sources, name, plugins=host(broken=True))
    assert "acme/big" in str(caught.value)
    assert "Failed to load: broken" in str(caught.value)
    assert not sources["hf"].asked


@pytest.mark.parametrize("name", ["echo", "models/echo"])
def test_a_directory_of_an_unknown_name_is_hinted_at(sources, name, tmp_path, monkeypatch):
    (tmp_path / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    sources["hf"].error = UnknownModelError("no repository")
    with pytest.raises(UnknownModelError, match=f"There is a directory '{name}' here: write ./{name}"):
        resolve(sources, name)
    assert resolve({"file": FileSource()}, f"./{name}").path.name == "echo"


def test_closest_registered_name_comes_first(sources):
    with pytest.raises(UnknownModelError, match="Did you mean 'acme/nano'"):
        resolve(sources, "acme-nano")


def test_registered_model_whose_source_is_gone_names_the_failed_plugins(sources):
    with pytest.raises(UnknownModelError, match=r"gone:thing.*Failed to load: broken"):
        resolve(sources, "acme/lost", plugins=host(broken=True))


def test_absent_repository_error_names_failed_plugins_too(sources):
    sources["hf"].error = UnknownModelError("no repository")
    with pytest.raises(UnknownModelError, match=r"no repository.*Failed to load: broken"):
        resolve(sources, "other/repo", plugins=host(broken=True))


def test_source_that_fails_in_its_own_way_is_a_load_error(sources):
    sources["hf"].error = ZeroDivisionError("oops")
    with pytest.raises(LoadError, match="hf:other/repo cannot be located: ZeroDivisionError: oops"):
        resolve(sources, "other/repo")


def test_offline_of_either_kind_reaches_the_source(sources):
    resolve(sources, "other/repo", offline=True)
    assert sources["hf"].asked == [("other/repo", None, True)]


def test_progress_names_the_download(sources):
    seen = []
    resolve(sources, "other/repo", progress=lambda *step: seen.append(step))
    assert seen == [("download model.safetensors", 1, 2)]


def test_absent_path_is_an_unknown_model():
    with pytest.raises(UnknownModelError, match="does not exist"):
        resolve_model(RuntimeConfig(model_path="no/such/model"), host())


@pytest.mark.parametrize(
    "name", ["..", "../x", "a/../../x", "/x", "C:\\x", "\\\\host\\x", "a\\..\\x", "", "a\0b"]
)
def test_names_stay_inside_their_root(tmp_path, name):
    with pytest.raises(LoadError, match="leads out of"):
        inside(tmp_path, name)


def test_plain_names_below_the_root_are_allowed(tmp_path):
    assert inside(tmp_path, "a/b..c.safetensors") == tmp_path / "a/b..c.safetensors"
