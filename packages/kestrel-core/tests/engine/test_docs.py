"""docs/engine.md says what is so: its examples run, its instruments are those there are."""

import asyncio
import re
from pathlib import Path

import pytest

from kestrel.engine import InferenceEngine, SyncEngine, telemetry

PAGE = Path(__file__).parents[4] / "docs/engine.md"


@pytest.fixture(scope="module")
def page():
    if not PAGE.is_file():
        pytest.skip("the documentation is not part of this distribution")
    return PAGE.read_text(encoding="utf-8")


def test_examples_of_the_page_run(page, toys, capsys, monkeypatch):
    create, init = InferenceEngine.create, SyncEngine.__init__
    monkeypatch.setattr(InferenceEngine, "create", lambda config: create(config, plugins=toys.host))
    asynchronous, synchronous = re.findall(r"^```python\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    names = {}
    exec(asynchronous, names)
    asyncio.run(names["main"](toys.config()))
    monkeypatch.undo()
    monkeypatch.setattr(SyncEngine, "__init__", lambda self, config: init(self, config, plugins=toys.host))
    exec(synchronous, names)
    names["main"](toys.config())
    assert capsys.readouterr().out.count("abcdefghijklmnopqrstuvwxyz") == 6


def test_the_page_lists_the_instruments_that_there_are(page, monkeypatch):
    made = {}

    class Meter:
        def __getattr__(self, kind):
            def create(name, **options):
                made[name] = kind.removeprefix("create_").removeprefix("observable_")

            return create

    monkeypatch.setattr(telemetry.metrics, "get_meter", lambda name: Meter())
    telemetry.Telemetry("test", dict)
    listed = dict(re.findall(r"^\| `(kestrel_\w+)` \| (\w+)", page, flags=re.MULTILINE))
    assert listed == made
