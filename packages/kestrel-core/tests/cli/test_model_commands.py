"""list, show, pull, plugins, doctor and bench, over a family that is nothing but a catalog and a description."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kestrel.cli import session
from kestrel.cli.diagnosis import _told
from kestrel.errors import UnknownModelError
from kestrel.ops import OpChoice
from kestrel.plugins import PluginHost, PluginInfo
from kestrel.spi import (
    VERSION,
    Available,
    BuildContext,
    Built,
    CatalogEntry,
    Impl,
    KernelBackend,
    Match,
    ModelCard,
    ModelFamily,
    ModelInfo,
    OpQuery,
    Yes,
    hookimpl,
)


class Family(ModelFamily):
    """Knows an embedded model and one of the hub."""

    name = "acme"

    def match(self, card: ModelCard) -> Match | None:
        return Match()

    def describe(self, card: ModelCard) -> ModelInfo:
        return ModelInfo(
            family="acme",
            architecture="acme-1",
            skills=("query",),
            num_parameters=9_000_000,
            max_context=512,
            defaults={"query": {"temperature": 0.2, "reasoning": False}},
            licence="Apache-2.0",
            notes=("a demonstration",),
        )

    def build(self, card: ModelCard, ctx: BuildContext) -> Built:
        raise NotImplementedError

    def catalog(self) -> tuple[CatalogEntry, ...]:
        return (
            CatalogEntry(name="acme/nano", source="file:/nowhere", embedded=True, note="a toy"),
            CatalogEntry(name="acme/big", source="hf:acme/big", revision="v1"),
        )


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, engine: Any) -> PluginHost:
    """A host with the family, and one plugin that fails."""
    module, broken = ModuleType("acme"), ModuleType("broken")
    module.__dict__.update(KESTREL_SPI_VERSION=VERSION, kestrel_model_families=hookimpl(lambda: [Family()]))
    broken.__dict__.update(KESTREL_SPI_VERSION=VERSION + 1)
    host = PluginHost.from_modules({"acme": module, "broken": broken})
    monkeypatch.setattr(session, "load_plugins", lambda: host)
    return host


@pytest.fixture
def surveyed(monkeypatch: pytest.MonkeyPatch, host: PluginHost, tmp_path: Path) -> list[Any]:
    """Configs that the survey was asked about; it finds every model on this machine."""
    asked: list[Any] = []

    def survey(config: Any, plugins: PluginHost) -> SimpleNamespace:
        asked.append(config)
        card = ModelCard(
            model_id=config.model or str(config.model_path),
            path=tmp_path,
            files={"a.safetensors": 18},
            revision="abc",
        )
        family = plugins.families["acme"]
        return SimpleNamespace(card=card, info=family.describe(card), note="")

    def locate(config: Any, plugins: PluginHost, progress: Any = None) -> SimpleNamespace:
        asked.append(config)
        return SimpleNamespace(model_id=config.model, path=tmp_path, revision=config.revision)

    monkeypatch.setattr(session, "survey_model", survey)
    monkeypatch.setattr(session, "locate_model", locate)
    return asked


def test_list_names_models_and_where_they_are(
    run: Any, host: PluginHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(config: Any, plugins: PluginHost) -> None:
        assert config.offline
        raise UnknownModelError("not here")

    monkeypatch.setattr(session, "locate_model", missing)
    header, *rows = (line.split("\t") for line in run("list").lines)
    assert header == ["name", "family", "source", "revision", "state"]
    assert rows == [
        ["acme/nano", "acme", "file:/nowhere", "-", "embedded"],
        ["acme/big", "acme", "hf:acme/big", "v1", "not pulled"],
    ]
    monkeypatch.setattr(session, "locate_model", lambda config, plugins: None)
    assert [json.loads(line)["state"] for line in run("list", "--json").lines] == ["embedded", "cached"]


def test_the_default_model_is_announced_with_its_note(run: Any, host: PluginHost) -> None:
    ran = run("query", "How many?")
    assert "no --model given: acme/nano is used. a toy" in ran.err
    assert ran.out == "two red circles\n"
    assert "acme/nano" not in run("query", "-m", "acme/nano", "How many?").err


def test_show_prints_skills_defaults_and_licence(run: Any, surveyed: list[Any]) -> None:
    text = run("show", "acme/nano").out
    for part in ("9,000,000", "512", "Apache-2.0", "temperature", "reasoning", "a demonstration", "query"):
        assert part in text
    shown = json.loads(run("show", "acme/nano", "--json").out)
    assert shown["defaults"]["query"] == {"temperature": 0.2, "reasoning": False}
    assert shown["weight_bytes"] == 18


def test_show_never_downloads_and_pull_does(run: Any, surveyed: list[Any]) -> None:
    run("show", "acme/nano")
    run("pull", "acme/nano", "--revision", "main")
    assert [(c.model, c.revision, c.offline) for c in surveyed] == [
        ("acme/nano", None, True),
        ("acme/nano", "main", False),
    ]


def test_a_model_path_is_shown_like_a_name(run: Any, surveyed: list[Any], tmp_path: Path) -> None:
    assert run("show", "--model-path", tmp_path).code == 0
    assert surveyed[0].model_path == str(tmp_path)


def test_a_model_named_twice_is_refused(run: Any, surveyed: list[Any]) -> None:
    assert run("show", "a/b", "-m", "c/d").code == 2


def test_plugins_lists_hooks_and_failures(run: Any, host: PluginHost) -> None:
    rows = {row["name"]: row for row in map(json.loads, run("plugins", "--json").lines)}
    assert rows["acme"]["hooks"] == ["kestrel_model_families"]
    assert rows["acme"]["state"] == "ok"
    assert rows["broken"]["state"].startswith("failed: PluginError")
    assert "broken" in run("plugins").out


def test_doctor_shows_the_machine_and_why_plugins_fail(run: Any, host: PluginHost) -> None:
    shown = json.loads(run("doctor", "--json").out)
    assert shown["devices"]["cpu"].startswith("CPU")
    assert shown["backends"]["reference"]
    assert "broken" in shown["failures"]
    assert "ops" not in shown


def bring(backend: KernelBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """``backend`` as the only one that is installed."""

    @hookimpl
    def kestrel_kernel_backends() -> list[KernelBackend]:
        return [backend]

    plugin = ModuleType(backend.name)
    plugin.__dict__.update(KESTREL_SPI_VERSION=VERSION, kestrel_kernel_backends=kestrel_kernel_backends)
    monkeypatch.setattr(session, "load_plugins", lambda: PluginHost.from_modules({backend.name: plugin}))


def test_doctor_shows_ops_that_nobody_will_ask_for(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Hasty(KernelBackend):
        name = "hasty"

        def probe(self, device: Any) -> Available:
            return Available()

        def impls(self) -> dict[str, Impl]:
            return dict.fromkeys(("liner", "linear", "lora_delta"), Impl(supports=lambda q: Yes(), fn=print))

    bring(Hasty(), monkeypatch)
    shown = json.loads(run("doctor", "--json").out)
    assert shown["backends"]["hasty"] == {"cpu": "available", "unknown ops": "liner (did you mean linear?)"}


def test_doctor_shows_the_versions_of_what_plugins_come_from(
    run: Any, host: PluginHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    acme = PluginInfo(name="acme", distribution="kestrel-acme", version="1.2")
    monkeypatch.setattr(PluginHost, "plugins", (acme,))
    packages = json.loads(run("doctor", "--json").out)["packages"]
    assert packages["kestrel-acme"] == "1.2"
    assert packages["kestrel-core"]
    assert packages["triton"]


def test_doctor_shows_why_a_kernel_backend_fails(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(KernelBackend):
        name = "broken"

        def probe(self, device: Any) -> Any:
            raise OSError("libcuda is missing")

        def impls(self) -> Any:
            raise AssertionError("never asked")

    bring(Broken(), monkeypatch)
    shown = json.loads(run("doctor", "--json").out)
    assert shown["backends"]["broken"]["cpu"] == "unavailable: failed (OSError: libcuda is missing)"


def test_doctor_shows_that_a_kernel_backend_fails_to_name_its_ops(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unbuilt(KernelBackend):
        name = "unbuilt"

        def probe(self, device: Any) -> Available:
            return Available()

        def impls(self) -> Any:
            raise ModuleNotFoundError("no module named norms")

    bring(Unbuilt(), monkeypatch)
    shown = json.loads(run("doctor", "--json").out)["backends"]["unbuilt"]
    assert shown["offers"] == "nothing: it failed (ModuleNotFoundError: no module named norms)"
    assert "unknown ops" not in shown


def test_a_kernel_backend_that_fails_is_one_line_unless_debugging(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(KernelBackend):
        name = "broken"

        def probe(self, device: Any) -> Any:
            raise OSError("libcuda\nis missing")

        def impls(self) -> Any:
            raise AssertionError("never asked")

    bring(Broken(), monkeypatch)
    told = run("doctor", "--json").err.splitlines()
    line = "warning: kernel backend broken failed on cpu (OSError: libcuda is missing; --debug shows the traceback)"
    assert line in told
    assert all(other.startswith("warning: kernel backend broken failed on") for other in told)
    assert "Traceback" in run("doctor", "--json", "--debug").err


def test_doctor_of_a_model_shows_who_serves_each_op(
    run: Any, host: PluginHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kestrel.ops import OpChoice

    async def choices(engine: Any) -> list[OpChoice]:
        query = OpQuery.of("linear", n=4)
        return [OpChoice(query=query, provider="reference", rejected={"fast": "no float64"})]

    async def decode_path(engine: Any) -> str:
        return "captured programs for 1, 2 rows"

    monkeypatch.setattr(session, "op_choices", choices)
    monkeypatch.setattr(session, "decode_path", decode_path)
    shown = json.loads(run("doctor", "acme/nano", "--json").out)
    assert shown["decode"] == "captured programs for 1, 2 rows"
    assert shown["ops"] == [
        {"op": "linear(n=4)", "provider": "reference", "rejected": {"fast": "no float64"}}
    ]
    assert "linear(n=4)\treference\tfast=no float64" in run("doctor", "acme/nano").out


def test_doctor_shows_the_machine_though_the_model_does_not_load(
    run: Any, host: PluginHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def create(*given: Any) -> Any:
        raise UnknownModelError("no model is called 'lost'")

    monkeypatch.setattr(session, "create_engine", create)
    ran = run("doctor", "lost")
    assert (ran.code, ran.err) == (1, "error: no model is called 'lost'\n")
    assert "reference" in ran.out
    shown = json.loads(run("doctor", "lost", "--json").out)
    assert shown["backends"]["reference"]
    assert shown["error"]["type"] == "UnknownModelError"


def test_bench_reports_batch_one_and_eight(run: Any, engine: Any) -> None:
    shown = json.loads(run("bench", "--json", "--rounds", "1").out)
    assert [speed["batch"] for speed in shown["speeds"]] == [1, 8]
    assert shown["speeds"][0]["decode_tokens_per_s"] == pytest.approx(100.0)
    assert shown["speeds"][1]["decode_tokens_per_s"] == pytest.approx(800.0)
    prompts = [inputs["prompt"] for _, inputs, _ in engine.calls]
    assert len({prompt[:8] for prompt in prompts}) == len(prompts)  # none is answered from the prefix cache


def test_a_table_in_a_pipe_is_tab_separated_and_aligned_on_a_terminal(
    run: Any, host: PluginHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kestrel.cli import output

    assert "\t" in run("plugins").out
    monkeypatch.setattr(output, "is_terminal", lambda stream: True)
    ran = run("plugins")
    assert "\t" not in ran.out
    assert "acme" in ran.out


def test_doctor_tells_a_reader_once_what_holds_for_several_numbers_of_rows() -> None:
    def choice(rows: int, provider: str, **rejected: str) -> OpChoice:
        return OpChoice(query=OpQuery.of("linear", k=8, rows=rows), provider=provider, rejected=rejected)

    choices = [choice(1, "fast"), *(choice(n, "reference", fast="no", gone="not here") for n in (0, 8, 16))]
    assert _told(choices, {"gone"}) == [
        {"op": "linear(k=8, rows=1)", "provider": "fast", "rejected": {}},
        {"op": "linear(k=8), rows to 8, 16 and more", "provider": "reference", "rejected": {"fast": "no"}},
    ]
