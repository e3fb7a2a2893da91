"""The example plugin as a stranger's package: installed, discovered, run and removed again, each in a fresh process."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kestrel.testing.families import check_family

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples/kestrel-echo"
PUBLIC = ("errors", "layers", "loading", "media", "ops", "spi", "testing", "types")
MAX_LINES = 150

LIST = """
import json
from kestrel.config import Environment
from kestrel.plugins import PluginHost
host = PluginHost.load(Environment.read())
rows = [[row.name, row.distribution, row.version, list(row.hooks)] for row in host.plugins if row.is_enabled]
failed = {name: str(error) for name, error in host.failed.items()}
print(json.dumps({"families": list(host.families), "plugins": rows, "failed": failed}))
"""

RUN = """
import json, sys
from pathlib import Path
from kestrel.config import RuntimeConfig
from kestrel.engine import SyncEngine
from kestrel_echo.tiny import write
directory = Path(sys.argv[1])
write(directory, 0)
with SyncEngine(RuntimeConfig(model_path=directory, device="cpu", kv_cache_pages=64)) as engine:
    first, second = (engine.query(question="Is anybody there?") for _ in range(2))
    streamed = "".join(chunk.text for chunk in engine.generate("Is anybody there?", stream=True))
    whole = engine.generate("Is anybody there?")
print(json.dumps({
    "answers": [first.output["answer"], second.output["answer"]], "cached": second.metrics.cached_tokens,
    "tokens": len(first.tokens), "streamed": streamed, "generated": whole.output["text"],
}))
"""


def python(code: str, *arguments: object, path: Path | None) -> dict:
    """What ``code`` printed as JSON, run in a process that finds installed packages and those of ``path``."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(path or ""),
        "KESTREL_PLUGINS": "echo",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=environment, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that pip installed the example into, without the network."""
    if importlib.util.find_spec("hatchling") is None:
        pytest.skip("hatchling is not installed")
    source = tmp_path_factory.mktemp("source") / "kestrel-echo"
    shutil.copytree(EXAMPLE, source)  # pip builds in place
    target = tmp_path_factory.mktemp("target")
    command = "pip install --no-deps --no-build-isolation --no-index --no-compile --quiet --target".split()
    done = subprocess.run(
        [sys.executable, "-m", *command, str(target), str(source)],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return target


def test_installed_package_is_discovered_with_its_hooks(installed: Path):
    found = python(LIST, path=installed)
    assert found == {
        "families": ["echo"],
        "plugins": [["echo", "kestrel-echo", "1.0", ["kestrel_model_families"]]],
        "failed": {},
    }


def test_installed_family_answers_through_the_engine(installed: Path, tmp_path: Path):
    found = python(RUN, tmp_path, path=installed)
    assert found["answers"][0]
    assert found["answers"][0] == found["answers"][1]
    assert found["cached"] > 0
    assert 1 <= found["tokens"] <= 16
    assert found["streamed"] == found["generated"]


def test_removed_package_is_gone(installed: Path, tmp_path: Path):
    copy = shutil.copytree(installed, tmp_path / "copy")
    assert python(LIST, path=copy)["families"] == ["echo"]
    shutil.rmtree(copy)
    found = python(LIST, path=copy)
    assert found["families"] == []
    assert "not installed" in found["failed"]["echo"]


def test_example_keeps_the_promises_of_a_family(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(EXAMPLE / "src"))
    from kestrel_echo.plugin import SKILLS, EchoFamily

    assert set(check_family(EchoFamily()).skills) == set(SKILLS)


def test_example_is_short_and_uses_public_modules_only():
    sources = [path.read_text(encoding="utf-8") for path in EXAMPLE.rglob("*.py")]
    lines = [line for source in sources for line in source.splitlines()]
    assert 0 < len(lines) < MAX_LINES
    imported = [line.split()[1] for line in lines if line.lstrip().startswith("from kestrel.")]
    assert imported
    assert {module.split(".")[1] for module in imported} <= set(PUBLIC)
