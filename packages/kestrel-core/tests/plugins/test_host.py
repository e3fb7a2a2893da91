"""A plugin enters whole or not at all, is named when it fails, and never takes others with it."""

import logging
from pathlib import Path

import pytest

from kestrel.config import Environment
from kestrel.errors import PluginError, UnknownModelError
from kestrel.ops import REFERENCE
from kestrel.plugins import PluginHost
from kestrel.spi import (
    Available,
    CatalogEntry,
    KernelBackend,
    ModelCard,
    ModelFamily,
    RequestRecord,
    Source,
    hookimpl,
)
from kestrel.types import Metrics

RECORD = RequestRecord(
    request_id="r1",
    model_id="m",
    skill="query",
    status="finished",
    error_type=None,
    finish_reason="stop",
    metrics=Metrics(),
)


def only(*names):
    return Environment(plugins=names)


def card(model_type):
    return ModelCard(model_id="acme/foo", path=Path("nowhere"), config={"model_type": model_type})


def family(title, names=()):
    class Toy(ModelFamily):
        name = title

        def match(self, card):
            return None

        def describe(self, card):
            raise NotImplementedError

        def build(self, card, ctx):
            raise NotImplementedError

        def catalog(self):
            return [CatalogEntry(name=entry, source="file:x") for entry in names]

    return Toy()


def plugin(*families, version=1, **hooks):
    """A plugin object, as a module would be."""

    class Toy:
        pass

    toy = Toy()
    toy.KESTREL_SPI_VERSION = version
    if families:
        hooks["kestrel_model_families"] = lambda: families
    for name, hook in hooks.items():
        setattr(toy, name, hookimpl(hook))
    return toy


def test_installed_plugin_is_found_and_its_family_recognises_a_checkpoint(install, good):
    install("kestrel-acme", good("acme"), entry="acme", version="2.3")

    host = PluginHost.load(only("acme"))

    assert host.match(card("acme")) is host.families["acme"]
    (row,) = [row for row in host.plugins if row.name == "acme"]
    assert (row.distribution, row.version, row.hooks) == ("kestrel-acme", "2.3", ("kestrel_model_families",))
    assert not host.failed


@pytest.mark.parametrize(
    ("source", "error", "text"),
    [
        ("import no_such_module_at_all", ImportError, "no_such_module_at_all"),
        ("def broken(", SyntaxError, ""),
        ("raise SystemExit(3)", PluginError, "exit"),
        ("x = 1", PluginError, "KESTREL_SPI_VERSION"),
        ("KESTREL_SPI_VERSION = 0", PluginError, "SPI version 0"),
        ("KESTREL_SPI_VERSION = 1", PluginError, "implements no hook"),
        (
            "from kestrel.spi import hookimpl\nKESTREL_SPI_VERSION = 1\n"
            "@hookimpl\ndef kestrel_model_familys(): return []",
            PluginError,
            "Did you mean 'kestrel_model_families'",
        ),
        (
            "from kestrel.spi import hookimpl\nKESTREL_SPI_VERSION = 1\n"
            "@hookimpl\ndef kestrel_skills(engine): return []",
            PluginError,
            "engine",
        ),
        (
            "KESTREL_SPI_VERSION = 1\ndef kestrel_skills(): return []",
            PluginError,
            "without the marker kestrel.spi.hookimpl",
        ),
        (
            "from kestrel.spi import hookimpl\nKESTREL_SPI_VERSION = 1\n"
            "@hookimpl\ndef kestrel_skills(): return [object()]",
            PluginError,
            "each must be a Skill instance",
        ),
        (
            "from kestrel.spi import hookimpl\nKESTREL_SPI_VERSION = 1\n"
            "@hookimpl\ndef kestrel_skills(): return 3",
            PluginError,
            "must return a sequence",
        ),
        (
            "from kestrel.spi import hookimpl\nKESTREL_SPI_VERSION = 1\n"
            "@hookimpl\ndef kestrel_skills(): raise ValueError('no luck')",
            ValueError,
            "no luck",
        ),
    ],
)
def test_broken_plugin_is_named_and_the_others_start(install, good, source, error, text, caplog):
    install("broken", source)
    install("sound", good("sound"))

    host = PluginHost.load(only("broken", "sound"))

    assert list(host.families) == ["sound"]
    assert list(host.failed) == ["broken"]
    assert isinstance(host.failed["broken"], error)
    assert text in str(host.failed["broken"])
    assert "'broken' of broken 1.0 does not run" in caplog.text


def test_unknown_model_error_names_installed_families_and_failed_plugins(install, good):
    install("broken", "import triton_that_is_not_there")
    install("sound", good("sound"))
    host = PluginHost.load(only("broken", "sound"))

    with pytest.raises(UnknownModelError) as caught:
        host.match(card("foo"))

    text = str(caught.value)
    assert "'acme/foo'" in text
    assert "foo" in text
    assert "Installed: sound" in text
    assert "broken (ModuleNotFoundError" in text


def test_two_distributions_with_one_plugin_name_are_an_error_that_names_both(install, good):
    install("acme-one", good("one"), entry="acme")
    install("acme-two", good("two"), entry="acme")
    install("sound", good("sound"))

    host = PluginHost.load(only("acme", "sound"))

    assert set(host.families) == {"one", "sound"}
    (error,) = host.failed.values()
    assert isinstance(error, PluginError)
    assert "acme-one" in str(error)
    assert "acme-two" in str(error)


def test_plugin_that_claims_a_taken_name_is_rolled_back_whole(install, good):
    install("first", good("shared"))
    install(
        "second", good("shared") + "\n@hookimpl\ndef kestrel_request_finished(record): raise SystemError\n"
    )
    install("sound", good("sound"))

    host = PluginHost.load(only("first", "second", "sound"))

    assert set(host.families) == {"shared", "sound"}
    assert list(host.failed) == ["second"]
    assert "'first' of first 1.0" in str(host.failed["second"])
    assert "'second' of second 1.0" in str(host.failed["second"])
    host.request_finished(RECORD)


def test_nothing_of_a_refused_plugin_stays_registered():
    twice = plugin(family("fresh"), family("taken"))
    host = PluginHost.from_modules({"a": plugin(family("taken")), "b": twice})
    assert list(host.families) == ["taken"]


def test_one_plugin_cannot_register_a_name_twice():
    host = PluginHost.from_modules({"a": plugin(family("same"), family("same"))})
    assert list(host.failed) == ["a"]
    assert not host.families


def test_two_families_cannot_offer_one_model_name():
    host = PluginHost.from_modules({"a": plugin(family("a", ["x/y"])), "b": plugin(family("b", ["x/y"]))})
    assert "model name 'x/y'" in str(host.failed["b"])
    assert [entry.name for entry in host.catalog()] == ["x/y"]


@pytest.mark.parametrize("name", ["hf", "file"])
def test_plugin_cannot_take_a_built_in_scheme(name):
    class Mine(Source):
        scheme = name

        def locate(self, reference, *, revision, offline, progress=None):
            raise NotImplementedError

    host = PluginHost.from_modules({"a": plugin(kestrel_model_sources=lambda: [Mine()])})
    assert not host.sources
    assert "kestrel-core" in str(host.failed["a"])


def test_plugin_cannot_take_the_name_of_the_references():
    class Mine(KernelBackend):
        name = REFERENCE

        def probe(self, device):
            return Available()

        def impls(self):
            return {}

    host = PluginHost.from_modules({"a": plugin(kestrel_kernel_backends=lambda: [Mine()])})
    assert not host.backends
    assert "kestrel-core" in str(host.failed["a"])


def test_environment_chooses_plugins_and_the_rest_is_not_imported(install, good):
    install("sound", good("sound"))
    install("unwanted", "raise AssertionError('imported')")

    host = PluginHost.load(only("sound"))

    (row,) = [row for row in host.plugins if row.name == "unwanted"]
    assert not row.is_enabled
    assert row.error is None
    assert "unwanted" not in host.failed


def test_environment_naming_an_absent_plugin_is_reported():
    host = PluginHost.load(only("absent"))
    assert "KESTREL_PLUGINS names 'absent'" in str(host.failed["absent"])


def test_observer_errors_are_logged_and_every_other_observer_is_told(caplog):
    seen = []

    def fails(record):
        raise RuntimeError("observer trouble")

    def works(record):
        seen.append(record)

    host = PluginHost.from_modules(
        {
            "a": plugin(kestrel_request_finished=fails),
            "b": plugin(kestrel_request_finished=works),
            "c": plugin(kestrel_request_finished=lambda: seen.append("no arguments")),
        }
    )
    with caplog.at_level(logging.ERROR):
        host.request_finished(RECORD)

    assert seen == [RECORD, "no arguments"]
    assert "observer trouble" in caplog.text
    assert "plugin a" in caplog.text


def test_routes_and_commands_of_a_failing_plugin_are_left_out_and_it_is_named():
    def fails(cli):
        raise RuntimeError("no commands")

    added = []
    host = PluginHost.from_modules(
        {
            "a": plugin(kestrel_server_routes=lambda engine: [engine], kestrel_commands=fails),
            "b": plugin(
                kestrel_server_routes=lambda config: [config],
                kestrel_commands=lambda cli: added.append(cli),
            ),
        }
    )
    host.add_commands("cli")
    assert host.server_routes("engine", "config") == ["engine", "config"]
    assert added == ["cli"]
    assert list(host.failed) == ["a"]


def test_two_families_with_equal_scores_are_an_error_that_names_both(install, good):
    source = good("acme")
    install("one", source.replace("name = 'acme'", "name = 'one'"))
    install("two", source.replace("name = 'acme'", "name = 'two'"))
    install("worse", source.replace("name = 'acme'", "name = 'worse'").replace("Match(1)", "Match(0)"))

    with pytest.raises(PluginError, match="one and two"):
        PluginHost.load(only("one", "two", "worse")).match(card("acme"))


def test_family_that_fails_to_look_at_a_checkpoint_leaves_it_to_the_others(install, good):
    install("bad", good("bad").replace("card.config.get", "card.no_such_thing"))
    install("sound", good("sound"))
    host = PluginHost.load(only("bad", "sound"))
    assert host.match(card("sound")).name == "sound"
    with pytest.raises(UnknownModelError, match=r"Failed to look at it: bad \(AttributeError"):
        host.match(card("bad"))


def test_hosts_share_nothing():
    first = PluginHost.from_modules({"a": plugin(family("a"))})
    second = PluginHost.from_modules({"b": plugin(family("b"))})
    assert (list(first.families), list(second.families)) == (["a"], ["b"])
